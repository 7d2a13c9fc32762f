"""Which GEMMs of a manifest bundles serve on each target's GPU, and why they miss the others.

A pure function of a manifest and bundles: the runtime's own matching decides, asked as
torch.compile would ask it on that GPU, whatever machine this runs on.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from nvgemm_runtime.gemm.aten import AtenGemm, operation_of, operator_for, product_of_sum
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.operands import Operand, Request, requests, torch_dtype
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape, roles
from nvgemm_runtime.gemm.types import SWIZZLED_ALIGNMENT_BYTES
from nvgemm_runtime.matching.device import (
    RUNTIME_LIBRARY,
    UNKNOWN_VERSION,
    DeviceFacts,
    RuntimeLibrary,
)
from nvgemm_runtime.matching.index import (
    Basis,
    BundleView,
    Index,
    Match,
    first_served,
)
from nvgemm_runtime.matching.refusals import (
    library_distribution,
    refusal,
    unlaunchable,
    version_numbers,
)
from nvgemm_runtime.matching.usable_rankings import newest_compiler_first
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES, sizes_in_words
from nvgemm_runtime.recording.text import read_others

from ..manifest.parse import Declared, Manifest
from ..targets import BuildTarget


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GEMM."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations, counted as in `Problem.flops`."""
        return 2 * self.m * self.n * self.k * self.batch


def call_of(problem: Problem) -> AtenGemm:
    """The ATen call that a problem declares, on contiguous tensors.

    Tensors are aligned to `ALIGNMENT_BYTES`; swizzled scales to `SWIZZLED_ALIGNMENT_BYTES`, as
    every kernel needs them.
    """
    served = problem.signature
    tensors = {role: _operand(problem, role) for role in roles(served)}
    return AtenGemm(
        op=operator_for(served),
        a=tensors[Role.A],
        b=tensors[Role.B],
        out=tensors[Role.OUT],
        extras=ExtraOperands.of(served, tensors),
    )


def readings(gemm: AtenGemm) -> tuple[Request, ...]:
    """The requests that matching gets for a call, best aligned first; see `operands.requests`.

    There may be several: a single row or column has either layout, and a row added to a single row
    may count as a matrix.
    """
    return requests(operation_of(gemm), gemm.a, gemm.b, out=gemm.out, extras=gemm.extras)


def _operand(problem: Problem, role: Role) -> Operand:
    import torch

    served, shape = problem.signature, role_shape(problem, role)
    return Operand(
        dtype=torch_dtype(role_dtype(served, role)),
        device=torch.device("cuda"),
        shape=shape,
        strides=_strides(served, role, shape),
        address=math.lcm(ALIGNMENT_BYTES, SWIZZLED_ALIGNMENT_BYTES)
        if role in (Role.SCALE_A, Role.SCALE_B)
        else ALIGNMENT_BYTES,
    )


def _strides(served: Signature, role: Role, shape: tuple[int, ...]) -> tuple[int, ...]:
    row_major = {Role.A: served.layout.a_row_major, Role.B: served.layout.b_row_major}
    if not row_major.get(role, True):
        *batch, rows, columns = shape
        return (*(rows * columns for _ in batch), 1, rows)
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]


class Status(str, enum.Enum):
    """Whether and how a GEMM is served."""

    DECLARED = "declared"
    SIGNATURE = "signature"
    MISSED = "missed"


SERVED = frozenset({Status.DECLARED, Status.SIGNATURE})
"""Statuses that count as covered, unless only declared problems shall."""


class Weight(str, enum.Enum):
    """The unit of percentages: distinct GEMMs, how often they were recorded, or their FLOPs."""

    PROBLEMS = "problems"
    COUNT = "count"
    FLOPS = "flops"


@dataclass(frozen=True, kw_only=True)
class GemmCoverage:
    """A recorded GEMM and how it is served on one target.

    Attributes:
        gemm: Its problem's key, or a text where no manifest can declare it.
        problem: Its problem; None where no manifest can declare it.
        sizes: Its sizes; None where that text does not tell them.
        count: How often it was recorded.
        ranked_as: The problem whose ranking is used; None for a miss.
        bundle: Name of the bundle that its best kernel is in; None for a miss.
        reasons: Why it is a miss, beside what `TargetCoverage.refusals` says of all.
        is_split: Whether kernels compute the product alone, into fp32, and torch.compile adds.
    """

    gemm: str
    problem: Problem | None
    sizes: Sizes | None
    count: int
    status: Status = Status.MISSED
    ranked_as: Problem | None = None
    kernels: int = 0
    bundle: str | None = None
    reasons: tuple[str, ...] = ()
    is_split: bool = False

    def weight(self, by: Weight) -> int:
        """Its share of a total in the unit ``by``; a GEMM of unknown sizes has 0 FLOPs."""
        if by is Weight.PROBLEMS:
            return 1
        if by is Weight.COUNT:
            return self.count
        return 0 if self.sizes is None else self.count * self.sizes.flops


def read_undeclarable(text: str) -> tuple[GemmCoverage, ...]:
    """Read what no manifest can declare from a recording's comments; other manifests have none."""
    missed = []
    for line, count in read_others(text).items():
        gemm, _, reason = line.partition(": ")
        extents = sizes_in_words(gemm)
        missed.append(
            GemmCoverage(
                gemm=gemm,
                problem=None,
                sizes=None if extents is None else Sizes(*extents),
                count=count,
                reasons=(reason or "no manifest can declare it",),
            )
        )
    return tuple(missed)


@dataclass(frozen=True, kw_only=True)
class TargetCoverage:
    """What bundles serve on the GPU of one target.

    Attributes:
        runtime_library: Assumed version of the library that kernels call: the newest that a bundle
            for this GPU was built with.
        bundles: Names of the bundles that this GPU can use, preferred first.
        refusals: Why it cannot use other bundles, or kernels of them.
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
    undeclarable: Sequence[GemmCoverage] = (),
) -> tuple[TargetCoverage, ...]:
    """Find, for each target of a manifest, which of its GEMMs bundles serve.

    Args:
        manifest: Recorded or written by hand.
        bundles: Bundles that the process would have.
        unusable: Why further bundles could not be opened.
        undeclarable: Recorded GEMMs that the manifest cannot declare, all missed.
    """
    views = newest_compiler_first(bundles)
    covered = []
    for target in manifest.targets:
        facts = gpu_facts(target, views)
        assert facts.runtime_library is not None
        index = Index(views, facts, unusable)
        matched = (_cover_gemm(index, declared) for declared in manifest.declared)
        covered.append(
            TargetCoverage(
                target=target,
                runtime_library=facts.runtime_library.version,
                bundles=tuple(view.name for view in views if _is_usable(view, facts)),
                refusals=index.refusals,
                gemms=(*matched, *undeclarable),
            )
        )
    return tuple(covered)


def gpu_facts(target: BuildTarget, bundles: Iterable[BundleView]) -> DeviceFacts:
    """Facts of a target's GPU, with the library version of the newest bundle that it can use."""
    library = RuntimeLibrary(
        path=Path(RUNTIME_LIBRARY), cuda=target.target.cuda, version=UNKNOWN_VERSION
    )
    facts = DeviceFacts(
        kind="cuda",
        name=target.device.driver_name,
        capability=target.device.capability,
        multiprocessors=target.device.sm_count.value,
        platform=target.target.platform,
        cuda=target.target.cuda,
        runtime_library=library,
    )
    headers = [view.header for view in bundles if refusal(view.header, facts) is None]
    named = [header.toolchain.get(library_distribution(header)) for header in headers]
    versions = [version for version in named if version is not None]
    if not versions:
        return facts
    newest = max(versions, key=version_numbers)
    return replace(facts, runtime_library=replace(library, version=newest))


def _is_usable(bundle: BundleView, facts: DeviceFacts) -> bool:
    usable = any(unlaunchable(kernel) is None for kernel in bundle.header.kernels)
    return usable and refusal(bundle.header, facts) is None


def _cover_gemm(index: Index, declared: Declared) -> GemmCoverage:
    problem = declared.problem
    call = call_of(problem)
    missed = GemmCoverage(
        gemm=problem.key,
        problem=problem,
        sizes=Sizes(problem.m, problem.n, problem.k, problem.batch),
        count=declared.count,
    )
    _, found = first_served(index.match, readings(call))
    if isinstance(found, Match):
        return _served(missed, found)
    reasons = [reason for reason in found.reasons if reason not in index.refusals]
    product = product_of_sum(call)
    if product is not None:
        # As `nvgemm_runtime.inductor.offers` splits a sum.
        request, split = first_served(index.match, readings(product))
        if isinstance(split, Match):
            served = _served(missed, split)
            # Even if the product is declared, the sum itself is not.
            return replace(served, status=Status.SIGNATURE, is_split=True)
        reasons += [
            f"for the product alone, {request.problem.key}: {reason}"
            for reason in split.reasons
            if reason not in found.reasons
        ]
    return replace(missed, reasons=tuple(reasons))


def _served(missed: GemmCoverage, found: Match) -> GemmCoverage:
    return replace(
        missed,
        status=Status.DECLARED if found.basis is Basis.DECLARED else Status.SIGNATURE,
        ranked_as=found.ranked_as,
        kernels=len(found.kernels),
        bundle=found.kernels[0].bundle.name,
    )
