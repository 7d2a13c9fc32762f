"""Coverage: which recorded problems bundles serve, on the GPU of each target, and why not others.

A pure function of a manifest and of bundles. Matching is the runtime's own, asked as a process on
that GPU would ask it; nothing depends on the machine that this runs on.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from nvgemm_runtime.declarable import ALIGNMENT_BYTES
from nvgemm_runtime.facts import RUNTIME_LIBRARY, UNKNOWN_VERSION, DeviceFacts, RuntimeLibrary
from nvgemm_runtime.inductor.operand import Operand
from nvgemm_runtime.match import Basis, BundleView, Index, Match, first_served, preferred
from nvgemm_runtime.operands import Request, requests, torch_dtype
from nvgemm_runtime.problem import DType, Op, Problem
from nvgemm_runtime.refusals import library_distribution, refusal, unlaunchable, version_numbers

from .manifest import Declared, Manifest
from .targets import BuildTarget
from .undeclarable import Sizes, Undeclarable


class Status(str, enum.Enum):
    """What becomes of a GEMM."""

    DECLARED = "declared"
    SIGNATURE = "signature"
    MISSED = "missed"


SERVED = frozenset({Status.DECLARED, Status.SIGNATURE})
"""What counts as covered, unless declared problems alone are asked for."""


class Weight(str, enum.Enum):
    """What percentages are of: GEMMs, each once; how often they came up; or their FLOPs."""

    PROBLEMS = "problems"
    COUNT = "count"
    FLOPS = "flops"


@dataclass(frozen=True, kw_only=True)
class GemmCoverage:
    """A recorded GEMM, and what becomes of it on one target.

    Attributes:
        gemm: Its problem's key, or a text where no problem describes it.
        problem: Its problem; None where no manifest can declare it.
        sizes: Its sizes; None where they are not known.
        count: How often it was recorded.
        status: Whether it is served, and how.
        ranked_as: The declared problem whose ranking is used; None for a miss.
        kernels: How many kernels serve it.
        bundle: Name of the bundle that its best kernel is in; None for a miss.
        reasons: Why it is a miss, beside what `TargetCoverage.refusals` says of all.
    """

    gemm: str
    problem: Problem | None
    sizes: Sizes | None
    count: int
    status: Status
    ranked_as: Problem | None = None
    kernels: int = 0
    bundle: str | None = None
    reasons: tuple[str, ...] = ()

    def weight(self, by: Weight) -> int:
        """Its part of a total, in the unit that ``by`` names; without sizes it has 0 FLOPs."""
        if by is Weight.PROBLEMS:
            return 1
        if by is Weight.COUNT:
            return self.count
        return 0 if self.sizes is None else self.count * self.sizes.flops


@dataclass(frozen=True, kw_only=True)
class TargetCoverage:
    """What bundles serve on the GPU of one target.

    Attributes:
        target: The target, and the GPU.
        runtime_library: Version of the library that kernels call, as assumed: the newest that a
            bundle for this GPU was built with.
        bundles: Names of those that this GPU can use, preferred first.
        refusals: Why it cannot use others, or kernels of them.
        gemms: Every recorded GEMM: the manifest's in its order, then those it cannot declare.
    """

    target: BuildTarget
    runtime_library: str
    bundles: tuple[str, ...]
    refusals: tuple[str, ...]
    gemms: tuple[GemmCoverage, ...]

    def weight(self, by: Weight, statuses: Collection[Status] = frozenset(Status)) -> int:
        """Total of the GEMMs that have one of some statuses."""
        return sum(gemm.weight(by) for gemm in self.gemms if gemm.status in statuses)

    def percent(self, by: Weight, statuses: Collection[Status]) -> Fraction:
        """Share of the GEMMs that have one of some statuses: exact, 0 to 100."""
        return Fraction(100 * self.weight(by, statuses), self.weight(by))

    def heaviest(self, by: Weight, statuses: Collection[Status]) -> list[GemmCoverage]:
        """The GEMMs that have one of some statuses, by weight and then by FLOPs, most first."""
        chosen = [gemm for gemm in self.gemms if gemm.status in statuses]
        return sorted(chosen, key=lambda gemm: (-gemm.weight(by), -gemm.weight(Weight.FLOPS)))


def cover(
    manifest: Manifest,
    bundles: Iterable[BundleView],
    *,
    unusable: Sequence[str] = (),
    undeclarable: Sequence[Undeclarable] = (),
) -> tuple[TargetCoverage, ...]:
    """Say what bundles serve of the GEMMs that were recorded, for each of the manifest's targets.

    Args:
        manifest: Recorded or written by hand.
        bundles: What there would be in the process.
        unusable: Why other bundles could not be opened.
        undeclarable: What was recorded beside the manifest.
    """
    views = preferred(bundles)
    asked = [(declared, readings(declared.problem)) for declared in manifest.declared]
    missed = tuple(
        GemmCoverage(
            gemm=gemm.gemm,
            problem=None,
            sizes=gemm.sizes,
            count=gemm.count,
            status=Status.MISSED,
            reasons=(gemm.reason,),
        )
        for gemm in undeclarable
    )
    covered = []
    for target in manifest.targets:
        facts = gpu_facts(target, views)
        assert facts.runtime_library is not None
        index = Index(views, facts, unusable)
        matched = (_match(index, declared, posed) for declared, posed in asked)
        covered.append(
            TargetCoverage(
                target=target,
                runtime_library=facts.runtime_library.version,
                bundles=tuple(view.name for view in views if _serves(view, facts)),
                refusals=index.refusals,
                gemms=(*matched, *missed),
            )
        )
    return tuple(covered)


def gpu_facts(target: BuildTarget, bundles: Iterable[BundleView]) -> DeviceFacts:
    """A target's GPU, in a process whose libraries fit the newest bundle that it can use."""
    facts = DeviceFacts(
        kind="cuda",
        name=target.device.driver_name,
        capability=target.device.capability,
        multiprocessors=target.device.sm_count.value,
        platform=target.target.platform,
        cuda=target.target.cuda,
        runtime_library=RuntimeLibrary(
            path=Path(RUNTIME_LIBRARY), cuda=target.target.cuda, version=UNKNOWN_VERSION
        ),
    )
    headers = [view.header for view in bundles if refusal(view.header, facts) is None]
    named = [header.toolchain.get(library_distribution(header)) for header in headers]
    versions = [version for version in named if version is not None]
    if not versions:
        return facts
    library = RuntimeLibrary(
        path=Path(RUNTIME_LIBRARY),
        cuda=target.target.cuda,
        version=max(versions, key=version_numbers),
    )
    return replace(facts, runtime_library=library)


def _serves(bundle: BundleView, facts: DeviceFacts) -> bool:
    usable = any(unlaunchable(kernel) is None for kernel in bundle.header.kernels)
    return usable and refusal(bundle.header, facts) is None


def _match(index: Index, declared: Declared, asked: tuple[Request, ...]) -> GemmCoverage:
    problem = declared.problem
    missed = GemmCoverage(
        gemm=problem.key,
        problem=problem,
        sizes=Sizes(problem.m, problem.n, problem.k, problem.batch),
        count=declared.count,
        status=Status.MISSED,
    )
    _, found = first_served(index.match, asked)
    if not isinstance(found, Match):
        reasons = tuple(reason for reason in found.reasons if reason not in index.refusals)
        return replace(missed, reasons=reasons)
    return replace(
        missed,
        status=Status.DECLARED if found.basis is Basis.DECLARED else Status.SIGNATURE,
        ranked_as=found.ranked_as,
        kernels=len(found.kernels),
        bundle=index.bundles[found.kernels[0].bundle].name,
    )


def readings(problem: Problem) -> tuple[Request, ...]:
    """What contiguous tensors of a problem's sizes pose, best aligned first.

    They start at addresses that are multiples of `ALIGNMENT_BYTES`. One row or column can be read
    in both layouts.
    """
    served, (m, n, k) = problem.signature, (problem.m, problem.n, problem.k)
    a = _operand(problem, served.a, m, k, row_major=served.layout.a_row_major)
    b = _operand(problem, served.b, k, n, row_major=served.layout.b_row_major)
    return requests(served.op, a, b, out=_operand(problem, served.out, m, n, row_major=True))


def _operand(
    problem: Problem, dtype: DType, rows: int, columns: int, *, row_major: bool
) -> Operand:
    import torch

    shape: tuple[int, ...] = (rows, columns)
    strides: tuple[int, ...] = (columns, 1) if row_major else (1, rows)
    if problem.signature.op is Op.BMM:
        shape, strides = (problem.batch, *shape), (rows * columns, *strides)
    return Operand(
        dtype=torch_dtype(dtype),
        device=torch.device("cuda"),
        shape=shape,
        strides=strides,
        address=ALIGNMENT_BYTES,
    )
