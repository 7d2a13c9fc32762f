"""The plan of one target's build: which kernels to compile, and each problem's ranking of them.

Making a plan asks the provider and its runtime model, which are slow to import. Plans are therefore
cached, under a digest of everything that shapes them and of the modules that make them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from nvgemm_runtime.bundle.encode import source_json, unserved_json
from nvgemm_runtime.bundle.format import (
    ESTIMATE,
    RankingSource,
    Scope,
    UnservedReason,
    canonical_json,
)
from nvgemm_runtime.errors import CompileError, NoCandidateError
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.support import provider_beside
from nvgemm_runtime.gemm.target import Target

from ..manifest.parse import Declared
from ..providers import (
    Candidate,
    Enumeration,
    Provider,
    Rejection,
    parts_of,
    recipe_name,
    recipe_of,
    versions_of,
)
from ..providers.base import RuntimeModel
from ..providers.corrections import Correction, find_correction
from ..providers.group_times import GroupTimes, find_group_times
from ..providers.sources import source_digest, source_modules
from ..rankings.entries import Operator, Rankings
from ..rankings.usable import Basis, UsableRankings, find_usable
from ..storage.cache import Cache, cache_key
from ..targets import BuildTarget
from .select import Selection, prefer_measured, select

_MAKERS = tuple(
    f"nvgemm_{name}"
    for name in (
        *("aot.build.plan", "aot.build.select", "aot.targets.profile", "aot.providers.base"),
        *("aot.providers.corrections", "aot.providers.group_times"),
        *("aot.rankings.usable", "aot.rankings.intervals"),
        *("runtime.gemm.support", "runtime.gemm.problem", "runtime.gemm.types"),
        "runtime.gemm.group_limits",
        *("runtime.gemm.roles", "runtime.gemm.target"),
    )
)
"""Modules whose source shapes a plan, besides those of the provider and the runtime model."""


@dataclass(frozen=True, kw_only=True)
class PlannedProblem:
    """One problem's ranking.

    ``choices`` are pairs of a position in ``Plan.candidates`` and a time in nanoseconds: measured
    where rankings are used for the problem, else estimated. ``is_declared`` is whether the manifest
    declares it: see `_measured_and_not_declared`.
    """

    problem: Problem
    choices: tuple[tuple[int, int | None], ...]
    is_declared: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to build for one target.

    Each of ``candidates`` stands once, in order of signature, name and provider; ``problems`` are
    in their own order; ``unserved`` are those that no operator supports, each with the reason.
    ``unoffered`` are operators that were measured and would fit, but that the provider does not
    list.
    """

    candidates: tuple[Candidate, ...]
    problems: tuple[PlannedProblem, ...]
    unserved: tuple[tuple[Problem, UnservedReason], ...]
    source: RankingSource
    unoffered: tuple[Operator, ...] = ()


RejectionSink = Callable[[BuildTarget, Problem, Rejection], None]
"""Called with every operator that a problem could not or did not get on a target."""


@dataclass(frozen=True, kw_only=True)
class PlanLookup:
    """What determines the plan of one target, and the plan if the cache has it.

    ``not_declared`` are problems that were measured and that the manifest does not declare: see
    `_measured_and_not_declared`.
    """

    declared: tuple[Declared, ...]
    not_declared: tuple[Declared, ...]
    target: BuildTarget
    provider: Provider
    model: RuntimeModel
    correction: Correction | None
    group_times: GroupTimes | None
    key: str
    stored: Plan | None
    measured: UsableRankings | None = None


def look_up_plan(
    declared: tuple[Declared, ...],
    target: BuildTarget,
    provider: Provider,
    cache: Cache,
    rankings: Rankings | None = None,
    *,
    beside: Collection[str] = (),
) -> PlanLookup:
    """Look for the plan of one target in the cache, which is quick.

    What ``rankings`` measured and the build can use takes the place of estimates. ``beside`` are
    the GPU products that the same build ranks for as well.
    """
    measured = None
    if rankings is not None:
        toolchains = {
            part.name: {
                **versions_of(part, target.target),
                recipe_name(part.name): recipe_of(part, target.target),
            }
            for part in parts_of(provider)
        }
        gpu = target.device.driver_name
        basis = Basis(
            arch=target.target.arch, gpu=gpu, toolchains=toolchains, beside=frozenset(beside)
        )
        measured = find_usable(rankings, basis)
    not_declared = () if measured is None else _measured_and_not_declared(declared, measured)
    digest = measured and measured.digest(entry.problem for entry in (*declared, *not_declared))
    model = provider.runtime_model(target)
    correction, group_times = find_correction(target, model.name), find_group_times(target)
    sources = (*parts_of(provider), model)
    makers = [*_MAKERS, *sorted({one for source in sources for one in source_modules(source)})]
    key = cache_key(
        "plan",
        {
            "declared": [[entry.problem.key, entry.candidates] for entry in declared],
            "target": target.target.key,
            "device": [
                target.device.name,
                target.device.driver_name,
                target.device.heuristics_gpu,
                target.device.shared_memory_per_block_bytes.value,
            ],
            "provider": [provider.name, provider.recipe],
            "toolchain": versions_of(provider, target.target),
            "model": model.name,
            "correction": None if correction is None else asdict(correction),
            "group times": None if group_times is None else asdict(group_times),
            "makers": [source_digest(name) for name in makers],
            **({} if digest is None else {"measured": digest}),
        },
    )
    stored = cache.get(key)
    return PlanLookup(
        declared=declared,
        not_declared=not_declared,
        target=target,
        provider=provider,
        model=model,
        correction=correction,
        group_times=group_times,
        key=key,
        stored=None if stored is None else _decode(json.loads(stored)),
        measured=measured,
    )


def likely_provider(lookup: PlanLookup) -> str:
    """Guesses whose kernels the plan will rank first, so that its compiler can be started early.

    That is the only provider of a signature where there is one, else the one whose estimates were
    fitted on measurements, else the first.
    """
    names = [part.name for part in parts_of(lookup.provider)]
    signature = lookup.declared[0].problem.signature
    only = provider_beside(signature, lookup.target.target.arch)
    fitted = () if lookup.correction is None else lookup.correction.providers
    return next((name for name in (only, *fitted) if name in names), names[0])


def _measured_and_not_declared(
    declared: Sequence[Declared], measured: UsableRankings
) -> tuple[Declared, ...]:
    """Measured problems whose m lies between those of two declared ones, equal in all else.

    Tables that choose a kernel by m need them. As many kernels are asked for as at the m below.
    """
    lines: dict[Problem, dict[int, Declared]] = {}
    for entry in declared:
        lines.setdefault(replace(entry.problem, m=1), {})[entry.problem.m] = entry
    found = []
    for problem in sorted(measured.problems):
        of_m = lines.get(replace(problem, m=1), {})
        below = [m for m in of_m if m < problem.m]
        if problem.m not in of_m and below and problem.m < max(of_m):
            found.append(Declared(problem=problem, candidates=of_m[max(below)].candidates))
    return tuple(found)


def make_plan(
    lookup: PlanLookup, cache: Cache, *, on_rejection: RejectionSink | None = None
) -> Plan:
    """Return the stored plan of one target, or make it.

    With ``on_rejection``, the plan is always made anew, and every rejection is reported. A new plan
    is kept if the cache can be written.
    """
    if lookup.stored is not None and on_rejection is None:
        return lookup.stored
    plan = _plan_anew(lookup, on_rejection)
    cache.put_if_possible(lookup.key, canonical_json(_encode(plan)))
    return plan


def _plan_anew(lookup: PlanLookup, on_rejection: RejectionSink | None) -> Plan:
    target = lookup.target
    served: list[Selection] = []
    unserved = []
    unoffered: set[Operator] = set()
    for selection, enumeration in _selections(lookup):
        if on_rejection is not None:
            for rejection in (*enumeration.rejections, *selection.rejections):
                on_rejection(target, selection.problem, rejection)
        unoffered |= _unoffered(lookup, selection.problem, enumeration)
        if selection.choices:
            served.append(selection)
        else:
            unserved.append((selection.problem, _unserved_reason(selection, enumeration, target)))
    chosen = {choice.candidate for selection in served for choice in selection.choices}
    candidates = sorted(chosen, key=lambda c: (c.signature.key, c.operator, c.provider))
    position = {candidate: index for index, candidate in enumerate(candidates)}
    not_declared = {entry.problem for entry in lookup.not_declared}
    return Plan(
        candidates=tuple(candidates),
        problems=tuple(
            PlannedProblem(
                problem=selection.problem,
                choices=tuple((position[c.candidate], c.time_ns) for c in selection.choices),
                is_declared=selection.problem not in not_declared,
            )
            for selection in served
        ),
        unserved=tuple(unserved),
        source=RankingSource(
            kind=ESTIMATE, by=_source_name(lookup, served), gpu=target.device.driver_name
        ),
        unoffered=tuple(sorted(unoffered)),
    )


def _unoffered(lookup: PlanLookup, problem: Problem, enumeration: Enumeration) -> set[Operator]:
    """Operators that were measured for a problem, and that the provider does not list."""
    usable = None if lookup.measured is None else lookup.measured.problems.get(problem)
    if usable is None:
        return set()
    return {*usable.operators} - {operator_of(candidate) for candidate in enumeration.candidates}


def operator_of(candidate: Candidate) -> Operator:
    """What rankings call a candidate."""
    return Operator(provider=candidate.provider, operator=candidate.operator)


def _source_name(lookup: PlanLookup, served: Sequence[Selection]) -> str:
    """What a plan's estimates come from: all that gave the times of any problem."""
    names: dict[str, None] = {}
    for selection in served:
        candidates = [choice.candidate for choice in selection.choices]
        names[_estimator(lookup, selection.problem, candidates).name] = None
    return "; ".join(names) or lookup.model.name


def _estimator(
    lookup: PlanLookup, problem: Problem, candidates: Sequence[Candidate]
) -> RuntimeModel | Correction | GroupTimes:
    """What has the last word on a problem's times."""
    for one in (lookup.group_times, lookup.correction):
        if one is not None and one.applies_to(problem, candidates):
            return one
    return lookup.model


def _selections(lookup: PlanLookup) -> Iterator[tuple[Selection, Enumeration]]:
    enumerations: dict[Signature, Enumeration] = {}
    sm_count = lookup.target.device.sm_count.value

    def correct(
        problem: Problem, candidates: Sequence[Candidate], times: Sequence[int | None]
    ) -> list[int | None]:
        last = _estimator(lookup, problem, candidates)
        if isinstance(last, (Correction, GroupTimes)):
            return last.corrected(problem, candidates, times, sm_count)
        return list(times)

    for entry in (*lookup.declared, *lookup.not_declared):
        signature = entry.problem.signature
        if signature not in enumerations:
            enumerations[signature] = lookup.provider.enumerate(signature, lookup.target)
        enumeration = enumerations[signature]
        estimate = lookup.model.estimate_ns
        selection = select(
            entry.problem, enumeration.candidates, estimate, entry.candidates, correct
        )
        measured = lookup.measured.problems if lookup.measured is not None else {}
        usable = measured.get(entry.problem)
        if usable is not None:
            estimated, offered = selection, enumeration.candidates
            selection = prefer_measured(estimated, offered, usable, entry.candidates)
            if selection is estimated and entry in lookup.not_declared:
                continue  # none of the kernels that were measured there can be built
        yield selection, enumeration


def _unserved_reason(
    selection: Selection, enumeration: Enumeration, target: BuildTarget
) -> UnservedReason:
    """Why the operators that came furthest were rejected, and whether that holds for all sizes."""
    reasons = [
        "; ".join(sorted({rejection.reason for rejection in rejections}))
        for rejections in (selection.rejections, enumeration.rejections)
    ]
    if not selection.rejections and enumeration.absence is not None:
        reasons.insert(0, enumeration.absence)
    nothing = (
        f"no provider has an operator for {selection.problem.signature.key} on {target.target.arch}"
    )
    return UnservedReason(
        text=next(filter(None, reasons), nothing),
        scope=Scope.PROBLEM if enumeration.candidates else Scope.SIGNATURE,
    )


_CANDIDATES = TypeAdapter(tuple[Candidate, ...])


def _encode(plan: Plan) -> dict[str, Any]:
    return {
        "candidates": _CANDIDATES.dump_python(plan.candidates, mode="json"),
        "problems": [
            [planned.problem.key, planned.choices, planned.is_declared] for planned in plan.problems
        ],
        "unserved": unserved_json(dict(plan.unserved)),
        "source": source_json(plan.source),
        "unoffered": [[one.provider, one.operator] for one in plan.unoffered],
    }


def _decode(document: dict[str, Any]) -> Plan:
    return Plan(
        candidates=_CANDIDATES.validate_python(document["candidates"]),
        problems=tuple(
            PlannedProblem(
                problem=Problem.parse(key),
                choices=tuple(map(tuple, choices)),
                is_declared=is_declared,
            )
            for key, choices, is_declared in document["problems"]
        ),
        unserved=tuple(
            (
                Problem.parse(item["problem"]),
                UnservedReason(text=item["reason"], scope=Scope(item["scope"])),
            )
            for item in document["unserved"]
        ),
        source=RankingSource(**document["source"]),
        unoffered=tuple(
            Operator(provider=provider, operator=operator)
            for provider, operator in document["unoffered"]
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A declared problem that no kernel of a target serves; the others are built.

    ``reason`` is one line; ``failed`` is whether there are operators but none compiles. ``device``
    is the one profile that this holds for; None where it holds for every product of the target.
    """

    target: Target
    problem: Problem
    reason: str
    failed: bool = False
    device: str | None = None

    @property
    def where(self) -> str:
        """The target, and the product where it holds for one alone."""
        name = self.target.short_name
        return name if self.device is None else f"{name} on {self.device}"

    @property
    def kept(self) -> UnservedReason:
        """The reason as a bundle keeps it."""
        return UnservedReason(text=self.reason, scope=Scope.PROBLEM)


def unserved_everywhere(
    several: Sequence[Mapping[Problem, UnservedReason]],
) -> dict[Problem, UnservedReason]:
    """Problems without a kernel for any product, with the first product's reason."""
    first, *others = several
    return {problem: why for problem, why in first.items() if all(problem in one for one in others)}


def one_for_all_products(
    unserved: Iterable[Unserved], nowhere: Collection[Problem]
) -> list[Unserved]:
    """Join what holds for every product of a target: problems of ``nowhere`` stand there once."""
    found: dict[tuple[Problem, str | None], Unserved] = {}
    for one in unserved:
        if one.problem in nowhere:
            one = replace(one, device=None)
        found.setdefault((one.problem, one.device), one)
    return list(found.values())


def require_served(unserved: Sequence[Unserved], targets: int, *, strict: bool = False) -> None:
    """Require that at least one target serves each problem; if ``strict``, each on each product.

    Raises:
        CompileError: Naming every problem that none of them serves, and why, if an operator of one
            does not compile.
        NoCandidateError: Likewise, if there are no operators.
    """
    if strict:
        targets = 1
    else:
        unserved = [one for one in unserved if one.device is None]
    counts = Counter(one.problem for one in unserved)
    nowhere = [one for one in unserved if counts[one.problem] >= targets]
    if not nowhere:
        return
    count = len({one.problem for one in nowhere})
    it = "it" if count == 1 else "them"
    failed = any(one.failed for one in nowhere)
    todo = (
        f"name other providers for {it} (providers: in the manifest; all that come along if left "
        f"out), or change or remove {it}"
        if failed
        else f"change or remove {it}"
    )
    head = f"no kernel for {count} problem{'s' * (count > 1)}; {todo}:"
    lines = [f"  {one.where}: {one.problem.key}: {one.reason}" for one in nowhere]
    error = CompileError if failed else NoCandidateError
    raise error("\n".join([head, *lines]))
