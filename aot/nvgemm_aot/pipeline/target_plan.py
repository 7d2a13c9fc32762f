"""Plans one target's build: the kernels to compile, and their ranking for each problem.

A plan needs the provider and its runtime model, which are slow to import. Plans are therefore
cached. The key is a digest of everything that shapes a plan, including the source of the modules
that make it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from nvgemm_runtime.bundle.encode import source_json, unserved_json
from nvgemm_runtime.bundle.format import canonical_json
from nvgemm_runtime.bundle.ranking_entries import ESTIMATE, RankingSource, Scope, UnservedReason
from nvgemm_runtime.gemm.problem import Problem, Signature

from ..manifest.parse import Declared
from ..providers import (
    Candidate,
    Enumeration,
    Provider,
    Rejection,
    provider_parts,
    recipe_name,
    target_recipe,
    versions_of,
)
from ..providers.base import RuntimeModel
from ..providers.heuristics.corrections import Correction, find_correction
from ..providers.heuristics.group_times import GroupTimes, find_group_times
from ..providers.other_provider import other_provider
from ..providers.sources import source_digest, source_modules
from ..rankings.entries import Operator, Rankings
from ..rankings.usable import RankingBasis, UsableRankings, find_usable
from ..storage.build_cache import Cache, cache_key
from ..storage.remote.remote_cache import RemoteCache
from ..targets import BuildTarget
from .select_candidates import Selection, prefer_measured, select

_MAKERS = tuple(
    f"nvgemm_{name}"
    for name in (
        *(
            "aot.pipeline.target_plan",
            "aot.pipeline.select_candidates",
            "aot.targets.profile",
            "aot.providers.base",
            "aot.providers.other_provider",
        ),
        *("aot.providers.heuristics.corrections", "aot.providers.heuristics.group_times"),
        *("aot.rankings.usable", "aot.rankings.intervals"),
        *("runtime.gemm.support", "runtime.gemm.problem", "runtime.gemm.types"),
        "runtime.gemm.epilogues",
        "runtime.gemm.group_limits",
        *("runtime.gemm.roles", "runtime.gemm.target"),
    )
)
"""Modules whose source shapes a plan, in addition to the provider's and the runtime model's."""


@dataclass(frozen=True, kw_only=True)
class PlannedProblem:
    """One problem's ranking.

    ``choices`` are pairs of an index into ``Plan.candidates`` and a time in nanoseconds: measured
    if rankings are used for the problem, else estimated. ``is_declared`` is False for problems that
    `_measured_and_not_declared` adds.
    """

    problem: Problem
    choices: tuple[tuple[int, int | None], ...]
    is_declared: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Kernels and rankings to build for one target.

    ``candidates`` are unique and sorted by signature, name and provider. ``problems`` are the
    declared ones, followed by measured ones that are not declared; each part is sorted.
    ``unserved`` are the problems that no operator supports, with the reasons. ``unoffered`` are
    measured operators that would fit but that the provider does not list.
    """

    candidates: tuple[Candidate, ...]
    problems: tuple[PlannedProblem, ...]
    unserved: tuple[tuple[Problem, UnservedReason], ...]
    source: RankingSource
    unoffered: tuple[Operator, ...] = ()


RejectionSink = Callable[[BuildTarget, Problem, Rejection], None]
"""Callback for every operator that a problem cannot use or does not use on a target."""


@dataclass(frozen=True, kw_only=True)
class PlanLookup:
    """Inputs of one target's plan, and the plan itself if the cache has it.

    ``not_declared`` are measured problems that the manifest does not declare: see
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
    other_gpus: Collection[str] = (),
    remote: RemoteCache | None = None,
) -> PlanLookup:
    """Looks for one target's plan in the cache, then in the remote one, which is quick.

    Usable measurements in ``rankings`` replace estimates. ``other_gpus`` are the other GPU products
    that the same build ranks for.
    """
    measured = None
    if rankings is not None:
        toolchains = {
            part.name: {
                **versions_of(part, target.target),
                recipe_name(part.name): target_recipe(part, target.target),
            }
            for part in provider_parts(provider)
        }
        gpu = target.device.driver_name
        basis = RankingBasis(
            arch=target.target.arch,
            gpu=gpu,
            toolchains=toolchains,
            other_gpus=frozenset(other_gpus),
        )
        measured = find_usable(rankings, basis)
    not_declared = () if measured is None else _measured_and_not_declared(declared, measured)
    digest = measured and measured.digest(entry.problem for entry in (*declared, *not_declared))
    model = provider.runtime_model(target)
    correction, group_times = find_correction(target, model.name), find_group_times(target)
    sources = (*provider_parts(provider), model)
    makers = [
        *_MAKERS,
        *sorted({module for source in sources for module in source_modules(source)}),
    ]
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
    if stored is None and remote is not None:
        problems = {entry.problem for entry in (*declared, *not_declared)}
        check = partial(_plan_fault, problems)
        if remote.fetch([key], cache, check):
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
    """Guesses the provider that the plan will rank first, so that its compiler can start early.

    Takes the only provider of the first signature if there is just one, else the provider whose
    estimates were fitted on measurements, else the first.
    """
    names = [part.name for part in provider_parts(lookup.provider)]
    signature = lookup.declared[0].problem.signature
    only = other_provider(signature, lookup.target.target.arch)
    fitted = () if lookup.correction is None else lookup.correction.providers
    return next((name for name in (only, *fitted) if name in names), names[0])


def _measured_and_not_declared(
    declared: Sequence[Declared], measured: UsableRankings
) -> tuple[Declared, ...]:
    """Returns measured problems whose m lies between two declared ones that are equal in all else.

    Tables that dispatch by m need them. The number of candidates is that of the next smaller m.
    """
    lines: dict[Problem, dict[int, Declared]] = {}
    for entry in declared:
        lines.setdefault(replace(entry.problem, m=1), {})[entry.problem.m] = entry
    between = []
    for problem in sorted(measured.problems):
        by_m = lines.get(replace(problem, m=1), {})
        below = [m for m in by_m if m < problem.m]
        if problem.m not in by_m and below and problem.m < max(by_m):
            between.append(Declared(problem=problem, candidates=by_m[max(below)].candidates))
    return tuple(between)


def _plan_fault(problems: Collection[Problem], _: str, payload: bytes) -> str | None:
    """Returns the reason that another machine's entry is no plan for the problems, or None."""
    try:
        plan = _decode(json.loads(payload))
        named = [index for planned in plan.problems for index, _ in planned.choices]
        planned_problems = {planned.problem for planned in plan.problems}
        planned_problems.update(problem for problem, _ in plan.unserved)
    except Exception as error:
        return f"it is no plan: {type(error).__name__}"
    if not all(type(index) is int and 0 <= index < len(plan.candidates) for index in named):
        return "it is no plan: a choice names no candidate"
    if not planned_problems <= {*problems}:
        return "it is no plan: it has another build's problem"
    return None


def make_plan(
    lookup: PlanLookup,
    cache: Cache,
    *,
    on_rejection: RejectionSink | None = None,
    remote: RemoteCache | None = None,
) -> Plan:
    """Returns one target's stored plan, or makes it.

    With ``on_rejection``, always makes a new plan and reports every rejection. Stores a new plan if
    the cache is writable, and sends it to the remote cache.
    """
    if lookup.stored is not None and on_rejection is None:
        return lookup.stored
    plan = _plan_anew(lookup, on_rejection)
    cache.put_if_possible(lookup.key, canonical_json(_encode(plan)))
    if remote is not None:
        remote.push([lookup.key], cache)
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
        unoffered |= _unoffered_operators(lookup, selection.problem, enumeration)
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


def _unoffered_operators(
    lookup: PlanLookup, problem: Problem, enumeration: Enumeration
) -> set[Operator]:
    """Returns operators that were measured for a problem but that the provider does not list."""
    usable = None if lookup.measured is None else lookup.measured.problems.get(problem)
    if usable is None:
        return set()
    return {*usable.operators} - {operator_of(candidate) for candidate in enumeration.candidates}


def operator_of(candidate: Candidate) -> Operator:
    """Returns a candidate's name in rankings."""
    return Operator(provider=candidate.provider, operator=candidate.operator)


def _source_name(lookup: PlanLookup, served: Sequence[Selection]) -> str:
    """Returns the names of all sources that estimated any of a plan's times."""
    names: dict[str, None] = {}
    for selection in served:
        candidates = [choice.candidate for choice in selection.choices]
        names[_estimator(lookup, selection.problem, candidates).name] = None
    return "; ".join(names) or lookup.model.name


def _estimator(
    lookup: PlanLookup, problem: Problem, candidates: Sequence[Candidate]
) -> RuntimeModel | Correction | GroupTimes:
    """Returns the source that decides a problem's times."""
    for source in (lookup.group_times, lookup.correction):
        if source is not None and source.applies_to(problem, candidates):
            return source
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
                continue  # no measured kernel can be built
        yield selection, enumeration


def _unserved_reason(
    selection: Selection, enumeration: Enumeration, target: BuildTarget
) -> UnservedReason:
    """Returns why the operators that came furthest were rejected, and the reason's scope."""
    reasons = [
        "; ".join(sorted({rejection.reason for rejection in rejections}))
        for rejections in (selection.rejections, enumeration.rejections)
    ]
    if not selection.rejections and enumeration.absence is not None:
        reasons.insert(0, enumeration.absence)
    default = (
        f"no provider has an operator for {selection.problem.signature.key} on {target.target.arch}"
    )
    return UnservedReason(
        text=next(filter(None, reasons), default),
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
        "unoffered": [[operator.provider, operator.operator] for operator in plan.unoffered],
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
