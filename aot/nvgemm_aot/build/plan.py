"""The plan of one target's build: which kernels to compile, and each problem's ranking of them.

Making a plan asks the provider and its runtime model; both are slow to import, so plans are cached
under everything that shapes them, the source of the modules that make them included.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvgemm_runtime.bundle.encode import source_json, unserved_json
from nvgemm_runtime.bundle.format import (
    KernelDesign,
    RankingSource,
    Scope,
    UnservedReason,
    canonical_json,
)
from nvgemm_runtime.gemm.problem import Problem, Signature

from ..manifest.parse import Declared
from ..providers import Candidate, Enumeration, Provider, Rejection
from ..providers.runtime_model import BlockShape, RuntimeModel
from ..storage.cache import Cache, cache_key
from ..targets import BuildTarget
from .select import Estimate, Selection, select

_MAKERS = (
    *(
        f"nvgemm_aot.{name}"
        for name in (
            *("build.plan", "build.select", "targets.profile"),
            *("providers.runtime_model", "providers.base"),
        )
    ),
    *(f"nvgemm_runtime.gemm.{name}" for name in ("support", "problem", "types", "roles", "target")),
)
"""Modules whose source shapes a plan, with the provider's and the runtime model's own."""


@dataclass(frozen=True, kw_only=True)
class PlannedProblem:
    """One problem's ranking.

    Attributes:
        choices: Pairs of a position in ``Plan.candidates`` and the estimate in nanoseconds.
    """

    problem: Problem
    choices: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to build for one target.

    Attributes:
        candidates: Every operator to compile, each once, in order of signature and name.
        problems: In order of problem.
        unserved: Problems that no operator supports, each with the reason.
        source: Where the estimates come from.
    """

    candidates: tuple[Candidate, ...]
    problems: tuple[PlannedProblem, ...]
    unserved: tuple[tuple[Problem, UnservedReason], ...]
    source: RankingSource


RejectionSink = Callable[[Problem, Rejection], None]
"""Told of every operator that a problem could not or did not get."""


def make_plan(
    declared: tuple[Declared, ...],
    target: BuildTarget,
    provider: Provider,
    cache: Cache,
    *,
    on_rejection: RejectionSink | None = None,
) -> Plan:
    """Plan one target, from the cache where it was planned before.

    Args:
        declared: The manifest's problems.
        target: What to build for.
        provider: Where kernels come from.
        cache: Where plans are kept; one that cannot be written is done without.
        on_rejection: Asks for every rejection; the plan is then made anew.

    Raises:
        ToolchainError: If the compiler side is incomplete.
    """
    model = provider.runtime_model(target)
    key = _plan_key(declared, target, provider, model)
    stored = cache.get(key) if on_rejection is None else None
    if stored is not None:
        return _decode(json.loads(stored))
    plan = _plan(declared, target, provider, model, on_rejection)
    cache.put_if_possible(key, canonical_json(_encode(plan)))
    return plan


def is_planned(
    declared: tuple[Declared, ...], target: BuildTarget, provider: Provider, cache: Cache
) -> bool:
    """Whether `make_plan` would find its plan in the cache, and so be quick."""
    model = provider.runtime_model(target)
    return cache.has(_plan_key(declared, target, provider, model))


def _plan_key(
    declared: tuple[Declared, ...], target: BuildTarget, provider: Provider, model: RuntimeModel
) -> str:
    own = {type(provider).__module__, type(model).__module__}
    makers = [*_MAKERS, *sorted(own)]
    return cache_key(
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
            "toolchain": provider.toolchain(),
            "model": model.name,
            "makers": [_source_digest(name) for name in makers],
        },
    )


@functools.cache
def _source_digest(name: str) -> str:
    """Digest of a module's source; of a package's, all its modules'."""
    module = importlib.import_module(name)
    sources = {"": inspect.getsource(module)}
    for path in getattr(module, "__path__", ()):
        sources |= {file.name: file.read_text("utf-8") for file in Path(path).glob("*.py")}
    return hashlib.sha256(canonical_json(sources)).hexdigest()


def _plan(
    declared: tuple[Declared, ...],
    target: BuildTarget,
    provider: Provider,
    model: RuntimeModel,
    on_rejection: RejectionSink | None,
) -> Plan:
    served: list[Selection] = []
    unserved = []
    for selection, enumeration in _selections(declared, target, provider, model.estimate_ns):
        if on_rejection is not None:
            for rejection in (*enumeration.rejections, *selection.rejections):
                on_rejection(selection.problem, rejection)
        if selection.choices:
            served.append(selection)
        else:
            unserved.append((selection.problem, _why_unserved(selection, enumeration, target)))
    chosen = {choice.candidate for selection in served for choice in selection.choices}
    candidates = sorted(chosen, key=lambda c: (c.signature.key, c.operator))
    position = {candidate: index for index, candidate in enumerate(candidates)}
    return Plan(
        candidates=tuple(candidates),
        problems=tuple(
            PlannedProblem(
                problem=selection.problem,
                choices=tuple((position[c.candidate], c.time_ns) for c in selection.choices),
            )
            for selection in served
        ),
        unserved=tuple(unserved),
        source=RankingSource(
            kind="estimate",
            by=model.name,
            gpu=target.device.driver_name,
        ),
    )


def _selections(
    declared: tuple[Declared, ...], target: BuildTarget, provider: Provider, estimate: Estimate
) -> Iterator[tuple[Selection, Enumeration]]:
    enumerations: dict[Signature, Enumeration] = {}
    for entry in declared:
        signature = entry.problem.signature
        if signature not in enumerations:
            enumerations[signature] = provider.enumerate(signature, target)
        enumeration = enumerations[signature]
        yield (
            select(entry.problem, enumeration.candidates, estimate, entry.candidates),
            enumeration,
        )


def _why_unserved(
    selection: Selection, enumeration: Enumeration, target: BuildTarget
) -> UnservedReason:
    """The reason to show: the signature's, where no size of it has a candidate."""
    return UnservedReason(
        text=_what_stopped(selection, enumeration, target),
        scope=Scope.PROBLEM if enumeration.candidates else Scope.SIGNATURE,
    )


def _what_stopped(selection: Selection, enumeration: Enumeration, target: BuildTarget) -> str:
    """What stopped the operators that came furthest."""
    if not selection.rejections and enumeration.absence is not None:
        return enumeration.absence
    for rejections in (selection.rejections, enumeration.rejections):
        reasons = sorted({rejection.reason for rejection in rejections})
        if reasons:
            return "; ".join(reasons)
    return (
        f"no provider has an operator for {selection.problem.signature.key} on {target.target.arch}"
    )


def _encode(plan: Plan) -> dict[str, Any]:
    return {
        "candidates": [
            {**asdict(candidate), "signature": candidate.signature.key}
            for candidate in plan.candidates
        ],
        "problems": [[planned.problem.key, planned.choices] for planned in plan.problems],
        "unserved": unserved_json(dict(plan.unserved)),
        "source": source_json(plan.source),
    }


def _decode(document: dict[str, Any]) -> Plan:
    return Plan(
        candidates=tuple(_decode_candidate(item) for item in document["candidates"]),
        problems=tuple(
            PlannedProblem(
                problem=Problem.parse(key),
                choices=tuple((position, time_ns) for position, time_ns in choices),
            )
            for key, choices in document["problems"]
        ),
        unserved=tuple(
            (
                Problem.parse(item["problem"]),
                UnservedReason(text=item["reason"], scope=Scope(item["scope"])),
            )
            for item in document["unserved"]
        ),
        source=RankingSource(**document["source"]),
    )


def _decode_candidate(item: dict[str, Any]) -> Candidate:
    design, shape = item["design"], item["block_shape"]
    fallback = design["fallback_cluster"]
    return Candidate(
        **{
            **item,
            "signature": Signature.parse(item["signature"]),
            "design": KernelDesign(
                **{
                    **design,
                    "tile": tuple(design["tile"]),
                    "cluster": tuple(design["cluster"]),
                    "fallback_cluster": None if fallback is None else tuple(fallback),
                    "cluster_limits": (),
                }
            ),
            "cluster_sizes": tuple(item["cluster_sizes"]),
            "block_shape": BlockShape(
                tile=tuple(shape["tile"]), cluster=tuple(shape["cluster"]), swapped=shape["swapped"]
            ),
        }
    )
