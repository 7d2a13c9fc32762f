"""Manifests: the YAML in which a person, or a recording, declares what to build.

`load_manifest` reads one whole: what it returns is right, and what it raises names every mistake.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.problem import DType, Layout, Op, Problem, Signature

from .device import profile_names
from .manifest_schema import (
    ARCHITECTURES,
    INPUT_DTYPES,
    SIZE_KEYS,
    SIZE_WAYS,
    VERSION,
    GemmEntry,
    ManifestEntry,
    SharedEntry,
    allowed_keys,
    json_schema,
)
from .manifest_wording import explain_error, meant_keys
from .targets import BuildTarget, build_target
from .yaml_nodes import Mistake, report_mistakes
from .yaml_source import Location, Source, read_source

__all__ = [
    "DEFAULT_CANDIDATES",
    "MAX_PROBLEMS",
    "Declared",
    "Manifest",
    "json_schema",
    "load_manifest",
]

DEFAULT_CANDIDATES = 8
"""Kernels built for each problem where a manifest does not say."""

MAX_PROBLEMS = 100_000
"""Most problems of one manifest, counted before duplicates merge."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A problem to build for.

    Attributes:
        problem: The GEMM.
        candidates: How many kernels to build for it, at most.

    """

    problem: Problem
    candidates: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a manifest file declares. Two files that say the same in another order load equal.

    Attributes:
        name: Lower-case name, fit to be part of a distribution's name.
        description: One line, possibly empty.
        targets: What to build for: sorted, each architecture once, at least one.
        declared: What to build: sorted by problem, each once, at least one.

    """

    name: str
    description: str
    targets: tuple[BuildTarget, ...]
    declared: tuple[Declared, ...]


def load_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ManifestError: If the file cannot be read or breaks a rule. The message has one line for
            each mistake (``file:line:column: place: found; allowed; likely meant``), sorted by
            position, and ends in their count.

    """
    source = read_source(path)
    entry, mistakes = _validate(source)
    if entry is None or mistakes:
        report_mistakes(path, mistakes)
    # One entry an architecture: entries that agree merge, and others were refused.
    devices = {target.arch: target.device or None for target in entry.targets}
    return Manifest(
        name=entry.name,
        description=" ".join(entry.description.split()),
        targets=tuple(build_target(arch, devices[arch]) for arch in sorted(devices)),
        declared=_declare(entry),
    )


def _validate(source: Source) -> tuple[ManifestEntry | None, list[Mistake]]:
    version = source.data.get("version")
    if type(version) is int and version != VERSION:
        # Under another version's rules the rest may well be right.
        text = f"found {version}; allowed: {VERSION}; this nvgemm-aot reads no other version"
        return None, [*source.mistakes, source.mistake(("version",), text)]
    mistakes = [*source.mistakes, *_target_mistakes(source), *_gemm_mistakes(source)]
    try:
        return ManifestEntry.model_validate(source.data), mistakes
    except ValidationError as error:
        return None, mistakes + list(_entry_mistakes(source, error))


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


def _target_mistakes(source: Source) -> Iterator[Mistake]:
    """Find a device that does not fit its architecture, and two devices for one."""
    first: dict[str, tuple[int, str]] = {}
    targets = source.data.get("targets")
    for index, entry in enumerate(targets if isinstance(targets, list) else []):
        fields = entry if isinstance(entry, dict) else {"arch": entry}
        arch, device = fields.get("arch"), fields.get("device")
        if arch not in ARCHITECTURES or device not in (None, *profile_names()):
            continue
        location: Location = ("targets", index, "device")
        try:
            name = build_target(arch, device).device.name
        except TargetError as error:
            yield source.mistake(location, f"found {device!r}; {error}")
            continue
        earlier, other = first.setdefault(arch, (index, name))
        if name != other:
            yield source.mistake(
                location,
                f"found device {name!r} for {arch}, which targets[{earlier}] builds for {other!r}; "
                "allowed: one device an architecture; build the other into a bundle of its own",
            )


def _gemm_mistakes(source: Source) -> Iterator[Mistake]:
    """Find what single values do not show: what must come together, and how much it makes."""
    gemms = source.data.get("gemms")
    defaults = source.data.get("defaults")
    defaults = defaults if isinstance(defaults, dict) else {}
    misspelt_defaults = _misspelt(defaults, ("defaults",))
    total = 0
    for index, gemm in enumerate(gemms if isinstance(gemms, list) else []):
        if not isinstance(gemm, dict):
            continue
        location: Location = ("gemms", index)
        # A misspelt key already has its line: what it stands for is not also missing.
        misspelt = _misspelt(gemm, location) | misspelt_defaults
        if "dtype" not in gemm.keys() | defaults.keys() | misspelt:
            text = "found no key 'dtype', which is required here or under 'defaults'"
            yield source.mistake(location, f"{text}; allowed: {', '.join(INPUT_DTYPES)}")
        if misspelt.isdisjoint(SIZE_KEYS) and (problem := _size_problem(gemm)):
            yield source.mistake(location, problem)
        op = gemm.get("op", defaults.get("op", Op.MM.value))
        if op == Op.BMM.value and "batch" not in gemm.keys() | misspelt:
            text = "found no key 'batch', which bmm requires; add the number of matrices"
            yield source.mistake(location, text)
        if op == Op.MM.value and "batch" in gemm:
            text = "found key 'batch' with op mm; allowed: with op bmm only; add 'op: bmm'?"
            yield source.mistake((*location, "batch"), text, at_key=True)
        here = _count_problems({**defaults, **gemm})
        if total <= MAX_PROBLEMS < total + here:
            yield source.mistake(
                location,
                f"found {total + here} problems up to here, {here} of them in this entry; allowed: "
                f"at most {MAX_PROBLEMS} in a manifest; shorten its lists or split the manifest",
            )
        total += here


def _misspelt(fields: dict[str, Any], location: Location) -> set[str]:
    unknown = fields.keys() - set(allowed_keys(location))
    return {meant for key in unknown for meant in meant_keys(key, location)}


def _size_problem(gemm: dict[str, Any]) -> str | None:
    given = tuple(key for key in SIZE_KEYS if key in gemm)
    if given in SIZE_WAYS:
        return None
    found = f"found sizes {', '.join(given)}" if given else "found no sizes"
    allowed = " or ".join(f"'{', '.join(way)}'" for way in SIZE_WAYS)
    add = [[key for key in way if key not in given] for way in SIZE_WAYS if {*way} > {*given}]
    drop = [[key for key in given if key not in way] for way in SIZE_WAYS if {*way} < {*given}]
    verb, options = ("add", add) if add else ("leave out", drop)
    advice = " or ".join(" and ".join(option) for option in options)
    return f"{found}; allowed: {allowed}" + (f"; {verb} {advice}" if advice else "")


def _count_problems(fields: dict[str, Any]) -> int:
    factors = ("dtype", "out", "layout", "batch", *SIZE_KEYS)
    given = [fields[key] for key in factors if key in fields]
    return math.prod(len(value) for value in given if isinstance(value, list))


def _declare(entry: ManifestEntry) -> tuple[Declared, ...]:
    most: dict[Problem, int] = {}
    for gemm in entry.gemms:
        candidates = (
            gemm.candidates or entry.defaults.candidates or entry.candidates or DEFAULT_CANDIDATES
        )
        for problem in _expand(gemm, entry.defaults):
            most[problem] = max(candidates, most.get(problem, 0))
    # Problem's own order, with its key made once a problem instead of once a comparison.
    ordered = sorted(most, key=lambda p: (p.signature.key, p.n, p.k, p.batch, p.m))
    return tuple(Declared(problem=problem, candidates=most[problem]) for problem in ordered)


def _expand(gemm: GemmEntry, defaults: SharedEntry) -> Iterator[Problem]:
    op = Op(gemm.op or defaults.op or Op.MM)
    layouts = [Layout(text) for text in gemm.layout or defaults.layout or [Layout.TN]]
    signatures = [
        Signature(
            op=op,
            layout=layout,
            a=dtype,
            b=dtype,
            accumulator=DType.INT32 if dtype.is_integer else DType.FP32,
            out=out,
        )
        for layout in layouts
        for dtype in map(DType, gemm.dtype or defaults.dtype)
        for out in map(DType, gemm.out or defaults.out or [_usual_out(dtype)])
    ]
    pairs = gemm.nk or [[n, k] for n in gemm.n for k in gemm.k]
    sizes = gemm.mnk or [[m, *pair] for m in gemm.m for pair in pairs]
    for signature, (m, n, k), batch in itertools.product(signatures, sizes, gemm.batch or [1]):
        yield Problem(signature=signature, m=m, n=n, k=k, batch=batch)


def _usual_out(dtype: DType) -> DType:
    if dtype.is_integer:
        return DType.INT32
    return dtype if dtype in (DType.FP16, DType.BF16) else DType.BF16
