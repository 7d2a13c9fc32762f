"""Measured dispatch at every m on this device, for programs and for printing.

It is the table that torch.compile's default mode embeds in generated code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..gemm.aten import unusual_setting
from ..gemm.epilogues import GateForm
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operand_checks import check_kinds
from ..gemm.operands import Request, operation_of, requests
from ..gemm.problem import Op
from ..installed.registry import INSTALLATION
from ..matching.device import DeviceFacts, torch_versions
from ..matching.dispatch import CONFIRM_STEP, Dispatch, decide_dispatch
from ..matching.evidence import Evidence
from ..matching.thresholds import ATEN, MeasuredSize, beating_aten
from ..matching.trust import Terms
from ..settings import counts_repeated_rankings
from .select import facts_of

if TYPE_CHECKING:
    import torch

    from ..matching.matches import MatchedKernel


def default_evidence() -> Evidence:
    """Returns the evidence that a measured ranking needs in default mode, per user setting."""
    return Evidence.REPEATED if counts_repeated_rankings() else Evidence.DEFAULT


def find_dispatch(
    readings: Sequence[Request],
    facts: DeviceFacts,
    *,
    is_precise: bool = False,
    evidence: Evidence | None = None,
    only_deterministic: bool = True,
    product: Dispatch | None = None,
) -> tuple[Request, Dispatch]:
    """Decides which kernel computes a GEMM at every m, from installed bundles' rankings.

    Args:
        readings: All readings for the operands.
        facts: Device.
        is_precise: True if ATen must compute `aten.AtenGemm.is_precise` sums.
        evidence: Evidence that a ranking needs; None for default mode's.
        only_deterministic: True to exclude kernels whose results depend on timing.
        product: For a gated product, the decision for the product alone. Its kernels make the
            separate operations faster than ATen's.

    Returns:
        The first reading with ranked problems, else the first reading; and the decision.
    """
    index = INSTALLATION.index(facts)
    rows = [(request, index.ranked_sizes(request.problem)) for request in readings]
    request, rankings = next((row for row in rows if row[1]), rows[0])
    setting = unusual_setting(request.problem.signature.a)
    terms = Terms(limit=1, is_precise=is_precise, aten_setting=setting)
    versions = torch_versions()
    dispatch = decide_dispatch(
        rankings,
        request,
        facts,
        versions,
        terms,
        evidence=default_evidence() if evidence is None else evidence,
        only_deterministic=only_deterministic,
        savings_ns=None if product is None else _savings_ns(product, rankings),
    )
    return request, dispatch


def _savings_ns(product: Dispatch, sizes: Iterable[int]) -> dict[int, int | None]:
    """Returns the nanoseconds that a product's kernels save on ATen, by m; None if unknown."""
    measured = {size.m: size for size in product.sizes}
    savings: dict[int, int | None] = {}
    for m in sizes:
        kernel_id = product.table.at(m)
        if kernel_id == ATEN:
            savings[m] = 0
        elif m in measured:
            size = measured[m]
            savings[m] = size.aten.time_ns - size.kernels[kernel_id].timing.time_ns
        else:
            savings[m] = None
    return savings


@dataclass(frozen=True, kw_only=True)
class DispatchSegment:
    """Range of m and the kernel that computes there.

    Attributes:
        first, last: Smallest and largest number of rows in A; no end if ``last`` is None.
        kernel: Kernel; None for ATen.
    """

    first: int
    last: int | None
    kernel: MatchedKernel | None

    def __str__(self) -> str:
        if self.last is None:
            sizes = f"{self.first} and more"
        else:
            sizes = str(self.first) if self.last == self.first else f"{self.first} to {self.last}"
        return f"m {sizes}: {_name(self.kernel)}"


@dataclass(frozen=True, kw_only=True)
class DispatchedSizes:
    """Dispatch for a GEMM at every number of rows in A, with measurements.

    Attributes:
        request: GEMM at the operands' m, with their layout.
        facts: Operands' device.
        decided: Table, kernels and measurements.
    """

    request: Request
    facts: DeviceFacts
    decided: Dispatch

    @property
    def segments(self) -> tuple[DispatchSegment, ...]:
        """Segments by ascending m, from 1."""
        table, kernels = self.decided.table, self.decided.measured
        starts = (1, *table.bounds)
        ends = (*(bound - 1 for bound in table.bounds), None)
        return tuple(
            DispatchSegment(first=first, last=last, kernel=kernels.get(kernel_id))
            for first, last, kernel_id in zip(starts, ends, table.kernels)
            if last is None or first <= last
        )

    def __str__(self) -> str:
        problem, measured = self.request.problem, self.decided.measured
        count = problem.batch * problem.groups
        groups = f", {count} groups"
        op = problem.signature.op
        count_text = groups if op.has_groups else f", batch {count}" if op is Op.BMM else ""
        lines = [
            f"{problem.signature.key}, n {problem.n}, k {problem.k}{count_text}, "
            f"on {self.facts.name}",
            *(f"  {segment}" for segment in self.segments),
        ]
        for size in self.decided.sizes:
            times = [
                f"{_name(measured.get(id_), id_)} {contender.timing.time_ns / 1e3:.1f} us"
                for id_, contender in size.kernels.items()
            ]
            times_text = ", ".join([*times, f"ATen {size.aten.time_ns / 1e3:.1f} us"])
            lines.append(f"  measured at m {size.m}: {times_text}{_gains_too_little(size)}")
        lines += [
            f"  not used at m {m}: {reason}" for m, reason in self.decided.open_reasons.items()
        ]
        if self.decided.to_confirm:
            lines.append(f"  {CONFIRM_STEP}")
        if not self.decided.sizes and not self.decided.open_reasons:
            lines.append("  no bundle that serves this device declares this n and k")
        return "\n".join(lines)


def _gains_too_little(size: MeasuredSize) -> str:
    """Describes why ATen computes although a kernel was faster; empty otherwise."""
    is_faster = any(
        contender.timing.time_ns < size.aten.time_ns for contender in size.kernels.values()
    )
    if beating_aten(size) or not is_faster:
        return ""
    return f" (a gain of less than {size.least_gain:.0%} does not count)"


def _name(kernel: MatchedKernel | None, kernel_id: str = ATEN) -> str:
    if kernel is not None:
        return f"{kernel.kernel.id[:12]} {kernel.kernel.operator}"
    return kernel_id[:12] or "ATen"


def dispatch_table(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    extras: ExtraOperands = NO_EXTRAS,
    *,
    measured_once: bool = False,
) -> DispatchedSizes:
    """Returns the measured dispatch for ``a @ b`` at every number of rows in ``a``.

    The result prints as a table. torch.compile uses it without max-autotune; for a gated product,
    only if ``NVGEMM_AOT_FUSE`` allows it. ATen's time is then that of the separate operations, with
    the bundles' kernels for the product.

    Args:
        a: Matrix [m, k], or a batch.
        b: Matrix [k, n], or a batch.
        out_dtype: Result dtype; by default A's, but int32 for integers and bfloat16 for fp8.
        extras: Scales, offsets and addend, see `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.
        measured_once: True to count each measurement without doubts, not only those that default
            mode accepts.

    Raises:
        TypeError: If an operand is not a tensor.
        ValueError: If the operands cannot be multiplied, or are not plain strided tensors.
        NoKernelError: If no kernel can have such dtypes, strides or extents.
    """
    import torch

    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, torch.Tensor):
            raise TypeError(
                f"dispatch_table: {name} is of type {type(operand).__name__}, must be a tensor"
            )
    op = operation_of(a, b, extras)
    check_kinds(op, a, b)
    readings = requests(op, a, b, out_dtype, extras=extras)
    facts = facts_of(a)
    evidence = Evidence.ONCE if measured_once else None
    product = None
    if extras.gated is not None and extras.gated.form is GateForm.JOINED:
        alone = requests(op, a, b, out_dtype, extras=extras._replace(gated=None))
        _, product = find_dispatch(alone, facts, evidence=evidence)
    request, dispatch = find_dispatch(readings, facts, evidence=evidence, product=product)
    return DispatchedSizes(request=request, facts=facts, decided=dispatch)
