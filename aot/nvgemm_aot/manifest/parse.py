"""Parses manifests.

`load_manifest` returns a valid manifest, or raises an error with every mistake.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.target import Target

from ..targets import BuildTarget, build_targets
from .messages import explain_error, explain_key, meant_keys
from .rules import GemmRules, find_excess, find_target_mistakes
from .schema import (
    VERSION,
    GemmEntry,
    ManifestEntry,
    SharedEntry,
    TargetEntry,
    allowed_keys,
)
from .source import Mistake, Source, compose, make_source, read_text, report_mistakes

DEFAULT_CANDIDATES = 8
"""Kernels per problem if the manifest has no ``candidates``."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Declared problem.

    At most ``candidates`` kernels are built for it. ``count`` is how often recorded graphs use it,
    summed over all entries that declare it; it does not affect the build.
    """

    problem: Problem
    candidates: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Parsed manifest file. Files with the same entries in another order are equal.

    Targets and problems are sorted and never empty. Problems are unique; a target appears once for
    each GPU product that it is ranked for, in file order. The name is lower-case and valid for a
    distribution; the description is one line, possibly empty. ``providers`` are unique names in
    file order; if empty, the builder's defaults apply.
    """

    name: str
    description: str
    targets: tuple[BuildTarget, ...]
    declared: tuple[Declared, ...]
    providers: tuple[str, ...] = ()

    @property
    def bundle_targets(self) -> tuple[Target, ...]:
        """Unique targets; a build makes one bundle for each."""
        return tuple(dict.fromkeys(build_target.target for build_target in self.targets))


def load_manifest(path: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        ManifestError: If the file cannot be read or breaks a rule. The message has one line per
            mistake (``file:line:column: place: found; allowed; likely meant``), sorted by position,
            and ends with their count.
    """
    return parse_manifest(path, read_text(path))


def parse_manifest(path: Path, text: str) -> Manifest:
    """Parses manifest text as `load_manifest` does; ``path`` is for messages."""
    entry, signatures = _read_entry(path, text)
    # Equal entries for one target merge; validation has refused others.
    targets = {resolved[0].target: resolved for resolved in map(_targets_of, entry.targets)}
    return Manifest(
        name=entry.name,
        description=" ".join(entry.description.split()),
        targets=tuple(itertools.chain.from_iterable(targets[target] for target in sorted(targets))),
        declared=_declare(entry, signatures),
        providers=tuple(dict.fromkeys(entry.providers)),
    )


def _targets_of(entry: TargetEntry) -> tuple[BuildTarget, ...]:
    return build_targets(
        entry.arch,
        [entry.device] if entry.device else entry.devices,
        platform=entry.platform or None,
        cuda=entry.cuda or Target.cuda,
    )


def _read_entry(path: Path, text: str) -> tuple[ManifestEntry, list[list[Signature]]]:
    """Validates a manifest; returns it with each gemm entry's signatures."""
    source = make_source(path, compose(path, text))
    excess = find_excess(source)
    if excess is not None:  # reported before any problem is checked
        report_mistakes(path, [excess])
    source, misspelt = _correct_keys(source)
    version = source.data.get("version")
    if type(version) is int and version != VERSION:
        # Another version may have other rules.
        text = f"found {version}; allowed: {VERSION}; this nvgemm-aot supports no other version"
        wrong = source.mistake(("version",), text)
        report_mistakes(path, [*source.mistakes, wrong])
    gemms = GemmRules(source)
    mistakes = [*misspelt, *source.mistakes, *find_target_mistakes(source), *gemms.mistakes]
    try:
        entry = ManifestEntry.model_validate(source.data)
    except ValidationError as error:
        report_mistakes(path, [*mistakes, *_entry_mistakes(source, error)])
    if mistakes:
        report_mistakes(path, mistakes)
    return entry, gemms.signatures


def _correct_keys(source: Source) -> tuple[Source, list[Mistake]]:
    """Renames misspelt top-level keys to the intended ones, so that values are checked too."""
    mistakes = []
    for key in source.data.keys() - {*allowed_keys(()), *SharedEntry.model_fields}:
        meant = [meant_key for meant_key in meant_keys(key, ()) if meant_key not in source.data]
        if meant:
            mistakes.append(source.mistake((key,), explain_key(key, ()), at_key=True))
            source = source.rename(key, meant[0])
    return source, mistakes


def _entry_mistakes(source: Source, error: ValidationError) -> Iterator[Mistake]:
    details = error.errors(include_url=False)
    misspelt = {
        (*detail["loc"][:-1], meant)
        for detail in details
        if detail["type"] == "extra_forbidden"
        for meant in meant_keys(str(detail["loc"][-1]), detail["loc"][:-1])
    }
    for detail in details:
        location, text = detail["loc"], explain_error(detail)
        if detail["type"] == "extra_forbidden":
            yield source.mistake(location, text, at_key=True)
        elif detail["type"] != "missing":
            yield source.mistake(location, text)
        elif location not in misspelt:
            yield source.mistake(location[:-1], text)


def _declare(
    entry: ManifestEntry, signatures: Sequence[Sequence[Signature]]
) -> tuple[Declared, ...]:
    most: dict[Problem, int] = {}
    counts: Counter[Problem] = Counter()
    for gemm, its_signatures in zip(entry.gemms, signatures):
        candidates = (
            gemm.candidates or entry.defaults.candidates or entry.candidates or DEFAULT_CANDIDATES
        )
        for problem in _problems_of(gemm, its_signatures):
            most[problem] = max(candidates, most.get(problem, 0))
            counts[problem] += gemm.count or 1
    # Problem's own order, but with one key computation per problem instead of per comparison.
    ordered = sorted(most, key=lambda p: (p.signature.key, p.n, p.k, p.batch * p.groups, p.m))
    return tuple(
        Declared(problem=problem, candidates=most[problem], count=counts[problem])
        for problem in ordered
    )


def _problems_of(gemm: GemmEntry, signatures: Iterable[Signature]) -> Iterator[Problem]:
    pairs = gemm.nk or [[n, k] for n in gemm.n for k in gemm.k]
    sizes = gemm.mnk or [[m, *pair] for m in gemm.m for pair in pairs]
    for signature, (m, n, k), batch, groups in itertools.product(
        signatures, sizes, gemm.batch or [1], gemm.groups or [1]
    ):
        yield Problem(signature=signature, m=m, n=n, k=k, batch=batch, groups=groups)
