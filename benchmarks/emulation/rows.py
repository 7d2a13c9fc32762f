"""Kernels that stand for every row of the support matrix: bounded, and each design class once.

A row is a provider, an operation, a kind of operands, scales and an epilogue. Of each row, kernels
are emulated for one usual signature and for every signature that differs from it in one property:
the dtypes of A and B, the result's dtype, or the layout. The usual signature of each form (plain,
with an addend, with a gate...) has a kernel of every design class; other signatures take one class
each, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.providers import PROVIDERS, Candidate, Provider, load_provider
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the support matrix, as one provider serves it."""

    provider: str
    op: Op
    operands: str
    scales: ScaleRecipe | None
    epilogue: Epilogue | None

    @classmethod
    def of(cls, provider: str, signature: Signature) -> Row:
        """Returns the row that a signature belongs to."""
        return cls(
            provider=provider,
            op=signature.op,
            operands=_operands(signature),
            scales=signature.scales,
            epilogue=signature.epilogue,
        )

    @property
    def name(self) -> str:
        """Name in records, e.g. ``quack mm fp8 bias_relu``."""
        parts = (
            self.provider,
            self.op.value,
            None if self.operands == _USUAL_OPERANDS else self.operands,
            None if self.scales is None else self.scales.value,
            None if self.epilogue is None else self.epilogue.name,
        )
        return " ".join(part for part in parts if part)

    @property
    def form(self) -> tuple[object, ...]:
        """The part of a row that decides which designs its kernels can have."""
        epilogue = self.epilogue
        kind = None if epilogue is None else (epilogue.form, epilogue.addend)
        scaled = None if self.scales is None else (self.operands, self.scales)
        return self.provider, self.op, scaled, kind


@dataclass(frozen=True, kw_only=True)
class RowKernel:
    """A kernel that stands for a row, for a design class, or for another signature in its row."""

    row: Row
    candidate: Candidate
    stands_for: str


ROW, DESIGN_CLASS, SIGNATURE = STANDS_FOR = "row", "design class", "signature"
"""Values of `RowKernel.stands_for`, in the order in which kernels are listed."""


def design_class(candidate: Candidate) -> tuple[object, ...]:
    """Returns the facts that make kernels of one class run different code: all but sizes."""
    design = candidate.design
    m, n = design.cluster
    rows = candidate.block_shape.tile[0]
    return (
        candidate.operator.partition("_")[0],
        design.scheduler,
        design.ctas_per_tile,
        m * n > design.ctas_per_tile,
        design.fallback_cluster is not None,
        design.swapped,
        design.splits > 1,
        candidate.is_deterministic,
        rows < 128,
    )


def row_kernels(target: BuildTarget) -> list[RowKernel]:
    """Lists the kernels of a target in the order of `STANDS_FOR`."""
    providers = {name: load_provider(name) for name in PROVIDERS}
    turns = itertools.count()
    seen_forms: set[tuple[object, ...]] = set()
    listed: list[RowKernel] = []
    for row, signatures in _rows().items():
        served = _served(signatures, providers[row.provider], target)
        for i, (_, candidates) in enumerate(served):
            representatives = list(_smallest_by_class(candidates).values())
            first = representatives[next(turns) % len(representatives)]
            kind = SIGNATURE if i else ROW
            listed.append(RowKernel(row=row, candidate=first, stands_for=kind))
            if i == 0 and row.form not in seen_forms:
                seen_forms.add(row.form)
                listed += (
                    RowKernel(row=row, candidate=one, stands_for=DESIGN_CLASS)
                    for one in representatives
                    if one != first
                )
    return sorted(listed, key=lambda kernel: STANDS_FOR.index(kernel.stands_for))


def _smallest_by_class(candidates: Sequence[Candidate]) -> dict[tuple[object, ...], Candidate]:
    """Returns a class's kernel with the least work for a tile, which is emulated soonest."""

    def work(candidate: Candidate) -> tuple[int, str]:
        m, n, _ = candidate.design.tile
        a, b = candidate.design.cluster
        return m * n * a * b, candidate.operator

    by_class: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(candidates, key=work):
        by_class.setdefault(design_class(candidate), candidate)
    return by_class


def _served(
    signatures: Sequence[Signature], provider: Provider, target: BuildTarget
) -> Iterator[tuple[Signature, tuple[Candidate, ...]]]:
    """Yields the usual signature that a provider serves, then those that differ in one property."""
    usual: Signature | None = None
    for signature in sorted(signatures, key=_unusualness):
        if usual is not None and _differences(signature, usual) > 1:
            continue
        candidates = provider.enumerate(signature, target).candidates
        if candidates:
            usual = usual or signature
            yield signature, candidates


def _differences(one: Signature, other: Signature) -> int:
    return (
        ((one.a, one.b) != (other.a, other.b))
        + (one.out != _usual_out_like(one, other))
        + (one.layout != other.layout)
    )


def _usual_out_like(one: Signature, other: Signature) -> DType:
    """Returns the output that goes with a change of A's dtype alone."""
    return other.out if one.a is other.a else one.a.usual_out


def _unusualness(signature: Signature) -> tuple[object, ...]:
    return (
        signature.layout is not Layout.TN,
        signature.a is not DType.BF16,
        signature.a is not signature.b,
        signature.out is not signature.a.usual_out,
        signature.key,
    )


_USUAL_OPERANDS = "16 bits"


def _operands(signature: Signature) -> str:
    """Returns the kind of operands that a row of the support matrix names."""
    dtype = signature.b  # A of gathered sums is fp32
    if dtype.is_integer:
        return dtype.value
    return {4: "fp4", 8: "fp8", 16: _USUAL_OPERANDS}[dtype.bits]


def _rows() -> dict[Row, list[Signature]]:
    rows: dict[Row, list[Signature]] = {}
    for signature in EVERY_SIGNATURE:
        for provider in PROVIDERS:
            row = Row.of(provider, signature)
            rows.setdefault(row, []).append(signature)
    return rows
