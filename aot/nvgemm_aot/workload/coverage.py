"""Matches a manifest's GEMMs with bundles on each target's GPU, with reasons for misses.

A pure function of manifest and bundles: it runs the runtime's own matching as torch.compile would
on that GPU, whatever machine it runs on.
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
from nvgemm_runtime.matching.index import Index, match_first_reading
from nvgemm_runtime.matching.matches import Basis, BundleView, Match, newest_compiler_first
from nvgemm_runtime.matching.refusals import (
    library_distribution,
    refusal,
    unlaunchable,
    version_numbers,
)
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES, parse_description
from nvgemm_runtime.recording.text import read_others

from ..manifest.parse import Declared, Manifest
from ..targets import BuildTarget


@dataclass(frozen=True)
class Sizes:
    """GEMM sizes."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations, counted as in `Problem.flops`."""
        return 2 * self.m * self.n * self.k * self.batch


def call_of(problem: Problem) -> AtenGemm:
    """Returns the ATen call that a problem declares, on contiguous tensors.

    Tensors are aligned to `ALIGNMENT_BYTES`; swizzled scales to `SWIZZLED_ALIGNMENT_BYTES`, which
    every kernel requires.
    """
    served = problem.signature
    tensors = {role: _operand(problem, role) for role in roles(served)}
    return AtenGemm(
        op=operator_for(served),
        a=tensors[Role.A],
        b=tensors[Role.B],
        out=tensors[Role.OUT],
        extras=ExtraOperands.for_signature(served, tensors),
    )


def readings(gemm: AtenGemm) -> tuple[Request, ...]:
    """Returns a call's requests for matching, best aligned first; see `operands.requests`.

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
    """Coverage status for a GEMM."""

    DECLARED = "declared"
    SIGNATURE = "signature"
    MISSED = "missed"


SERVED = frozenset({Status.DECLARED, Status.SIGNATURE})
"""Statuses that count as covered, unless the user asks for declared problems only."""


class Weight(str, enum.Enum):
    """Unit for percentages: distinct GEMMs, recorded calls, or FLOPs."""

    PROBLEMS = "problems"
    COUNT = "count"
    FLOPS = "flops"


@dataclass(frozen=True, kw_only=True)
class GemmCoverage:
    """Recorded GEMM with its coverage on one target.

    Attributes:
        gemm: Problem key, or a text if no manifest can declare it.
        problem: Problem; None if no manifest can declare it.
        sizes: Sizes; None if the text does not contain them.
        count: Number of recorded calls.
        ranked_as: Problem whose ranking is used; None for a miss.
        bundle: Bundle with the best kernel; None for a miss.
        reasons: Reasons for a miss, besides `TargetCoverage.refusals`.
        is_split: True if kernels compute only the product, into fp32, and torch.compile adds.
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
        """Returns its share of a total in the unit ``by``; unknown sizes count 0 FLOPs."""
        if by is Weight.PROBLEMS:
            return 1
        if by is Weight.COUNT:
            return self.count
        return 0 if self.sizes is None else self.count * self.sizes.flops


def read_undeclarable(text: str) -> tuple[GemmCoverage, ...]:
    """Reads undeclarable GEMMs from a recording's comments; other manifests have none."""
    missed = []
    for line, count in read_others(text).items():
        gemm, _, reason = line.partition(": ")
        extents = parse_description(gemm)
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
    """Bundle coverage on one target's GPU.

    Attributes:
        runtime_library: Assumed version of the library that kernels call: the newest among bundle
            toolchains for this GPU.
        bundles: Names of usable bundles, preferred first.
        refusals: Reasons why other bundles, or their kernels, are unusable.
        gemms: Recorded GEMMs: the manifest's in order, then undeclarable ones.
    """

    target: BuildTarget
    runtime_library: str
    bundles: tuple[str, ...]
    refusals: tuple[str, ...]
    gemms: tuple[GemmCoverage, ...]

    def weight(self, by: Weight, statuses: Collection[Status] = frozenset(Status)) -> int:
        """Returns the total weight of the GEMMs with given statuses."""
        return sum(gemm.weight(by) for gemm in self.gemms if gemm.status in statuses)

    def percent(self, by: Weight, statuses: Collection[Status]) -> Fraction:
        """Returns the percentage of the GEMMs with given statuses: exact, 0 to 100."""
        return Fraction(100 * self.weight(by, statuses), self.weight(by))

    def heaviest(self, by: Weight, statuses: Collection[Status]) -> list[GemmCoverage]:
        """Returns the GEMMs with given statuses, by decreasing weight and FLOPs."""
        chosen = [gemm for gemm in self.gemms if gemm.status in statuses]
        return sorted(chosen, key=lambda gemm: (-gemm.weight(by), -gemm.weight(Weight.FLOPS)))


def cover(
    manifest: Manifest,
    bundles: Iterable[BundleView],
    *,
    unusable: Sequence[str] = (),
    undeclarable: Sequence[GemmCoverage] = (),
) -> tuple[TargetCoverage, ...]:
    """Finds the GEMMs that bundles serve, for each target in a manifest.

    Args:
        manifest: Recorded or hand-written manifest.
        bundles: Bundles available to the process.
        unusable: Reasons why further bundles could not be opened.
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
    """Returns facts about a target's GPU, with the newest usable bundle's library version."""
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
    _, result = match_first_reading(index.match, readings(call))
    if isinstance(result, Match):
        return _covered(missed, result)
    reasons = [reason for reason in result.reasons if reason not in index.refusals]
    product = product_of_sum(call)
    if product is not None:
        # Mirrors how `nvgemm_runtime.inductor.offers` splits a sum.
        request, split = match_first_reading(index.match, readings(product))
        if isinstance(split, Match):
            served = _covered(missed, split)
            # Even if the product is declared, the sum is not.
            return replace(served, status=Status.SIGNATURE, is_split=True)
        reasons += [
            f"for the product alone, {request.problem.key}: {reason}"
            for reason in split.reasons
            if reason not in result.reasons
        ]
    return replace(missed, reasons=tuple(reasons))


def _covered(missed: GemmCoverage, match: Match) -> GemmCoverage:
    return replace(
        missed,
        status=Status.DECLARED if match.basis is Basis.DECLARED else Status.SIGNATURE,
        ranked_as=match.ranked_as,
        kernels=len(match.kernels),
        bundle=match.kernels[0].bundle.name,
    )
