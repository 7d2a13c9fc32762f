"""Compiles quack's GEMM with a gated epilogue: two product columns give one result column.

The library's kernel object leaves the epilogue to its class. This class joins pairs of accumulators
in fp32 and passes them to the library's store for half tiles, which rounds them once. Weights in
halves are not rearranged: their tensor is described as pairs of columns, n / 2 columns apart, and
TMA loads both into neighbouring columns of a tile.

Kernels that keep the product store it too, rounded separately: interleaved as a whole, in halves as
gates and ups, each by its own store for half tiles, because no TMA store splits a tile's columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, STREAM, WORKSPACE
from nvgemm_runtime.gemm.epilogues import Gate, GateForm, WeightOrder
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.types import DType

from .activation_functions import FUNCTIONS, sigmoid
from .designs import Design
from .designs import designs as plain_designs
from .entry import (
    ALIGNMENT_BYTES,
    calling_convention,
    compile_launch,
    cute_type,
    import_library,
    kernel_options,
    scheduler_options,
)
from .families import SM90, MmaFamily, family_of
from .gathered_groups import gathering, gathers, options_of
from .grouped import arguments_of_groups, compile_for_groups, scheduled_by_groups
from .grouped import designs as designs_of_groups

_HOPPER_FEW_ROWS = (
    *(Design(tile=(64, width), cluster=(1, 1)) for width in (32, 64, 96, 192, 224)),
    *(Design(tile=(64, width), cluster=(1, 1), pingpong=True) for width in (64, 96)),
)
"""For a small m, in which reading the weights takes all the time: tiles so narrow that 132 thread
blocks get about equally many, or, with 192 and 224 columns, that 24576 or 28672 columns give 128
thread blocks one tile each. Offered for 16-bit operands without groups."""


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """Returns the designs that can have a gate, in a fixed order: ungated ones, and a few more.

    A swapped design would have pairs along its m. A split k has no whole sums to join. The store
    for half tiles takes whole blocks of 16 result columns. With accumulators in registers, a kernel
    that keeps an interleaved product spills 24 to 40 bytes if a thread has 192 of them.
    """
    without_gate = designs_of_groups if signature.op.groups_rows else plain_designs
    keeps_pairs = signature.form is GateForm.KEPT and not has_halves(signature)
    spills = keeps_pairs and family_of(arch).registers_hold_sums
    is_joined = signature.op is Op.MM and signature.form is GateForm.JOINED
    few_rows = is_joined and family_of(arch) is SM90 and not signature.a.is_fp8
    return tuple(
        one
        for one in (*without_gate(arch, signature), *(_HOPPER_FEW_ROWS if few_rows else ()))
        if not one.swapped and one.splits == 1 and one.tile[1] % 32 == 0 and one.tile_k_blocks == 1
        if not spills or one.sums_of_a_thread < 192
    )


def compile_gated(design: Design, signature: Signature, arch: str) -> Any:
    """Compiles one design for a gated signature; arguments are as in `entry.compile_entry`.

    The function takes ``(a, b, out, stream)``, or ``(a, b, addend, out, stream)`` with a bias; on
    Hopper ``clusters`` before the stream, and ``workspace`` before that with a dynamic schedule.
    With groups, it takes ``offsets`` after ``b``, and the bias has a row for each group.
    """
    import_library()
    from quack import layout_utils

    gemm = _gemm_object(design, signature, arch)
    parameters = calling_convention(design, signature, arch).parameters
    in_groups = signature.op.groups_rows

    def launch(**given: Any) -> None:
        product, epilogue = _results(signature, given)
        if Role.ADDEND.value in given:
            bias = given[Role.ADDEND.value]
            epilogue["bias"] = bias if in_groups else layout_utils.expand(bias, 0, 1)
        scheduler = scheduler_options(given.get(CLUSTERS), given.get(WORKSPACE))
        gemm(
            given["a"], given["b"], product, None, gemm.EpilogueArguments(**epilogue),
            scheduler, arguments_of_groups(given) if in_groups else None,
            given[STREAM], None, None,
        )  # fmt: skip

    if in_groups:
        return compile_for_groups(launch, design, signature, arch)
    assert signature.epilogue is not None
    tensors = _sample_tensors(signature, adds=signature.epilogue.addend is not None)
    return compile_launch(launch, _NAMES, tensors, parameters, arch)


def _results(signature: Signature, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the tensor that the library stores, and those that the epilogue stores, by name."""
    from cutlass import cute

    out = given[Role.OUT.value]
    if signature.form is GateForm.JOINED:
        return None, {"joined": out}
    n = cute.size(given[Role.B.value], mode=[2])
    half = n // 2
    joined = columns_of(out, n, half)
    if has_halves(signature):
        gates, ups = columns_of(out, 0, half), columns_of(out, half, half)
        return None, {"gates": gates, "ups": ups, "joined": joined}
    return columns_of(out, 0, n), {"joined": joined}


def columns_of(matrix: Any, first: Any, count: Any) -> Any:
    """Returns columns of a row-major matrix; the first must be aligned to 16 bytes."""
    from cutlass import cute

    begin = cute.assume(first, divby=8 * ALIGNMENT_BYTES // matrix.element_type.width)
    layout = cute.make_layout((matrix.shape[0], count), stride=matrix.stride)
    return cute.make_tensor(matrix.iterator + begin, layout)


def has_halves(signature: Signature) -> bool:
    """Returns True if gates and ups are halves of a row, not neighbours."""
    assert signature.epilogue is not None
    return signature.epilogue.order is WeightOrder.HALVES


_NAMES = {
    "a b out stream": "call",
    "a b out clusters stream": "call_told",
    "a b out workspace clusters stream": "call_dynamic",
    "a b addend out stream": "call_with_bias",
    "a b addend out clusters stream": "call_with_bias_told",
    "a b addend out workspace clusters stream": "call_with_bias_dynamic",
}
"""Names of entry functions by their parameters, as in `entry`."""


def _gemm_object(design: Design, signature: Signature, arch: str) -> Any:
    """Builds the kernel for A as (m, k), and B as (k, n) or one per group."""
    import cutlass

    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    in_halves = has_halves(signature)
    family = family_of(arch)
    kind = _gated_class(family, signature.epilogue.gate, in_halves, signature.form is GateForm.KEPT)
    if gathers(signature):
        kind = gathering(kind, family)
    if signature.op.groups_rows:
        kind = scheduled_by_groups(kind, f"{kind.__name__}_groups")
    gemm = kind(
        cutlass.Float32, cute_type(signature.a), design.tile, (*design.cluster, 1),
        concat_layout=("B", "bias") if in_halves else None, **kernel_options(design, arch),
        **options_of(signature, arch),
    )  # fmt: skip
    gemm.b_transposed = True  # the library expects B as (n, k)
    return gemm


@functools.cache
def _gated_class(family: MmaFamily, gate: Gate, in_halves: bool, keeps: bool) -> Any:
    """Returns the library's GEMM with a gated epilogue."""
    import cutlass
    from cutlass import cute
    from quack import layout_utils
    from quack.cute_dsl_utils import mlir_namedtuple
    from quack.epilogue.mixin import ComposableEpiMixin
    from quack.epilogue.ops import RowVecLoad, TileStore
    from quack.rounding import RoundingMode

    class PairedRow(RowVecLoad):  # type: ignore[misc]
        """Row whose pairs are n / 2 elements apart; the library copies only neighbours."""

        @cute.jit  # type: ignore[untyped-decorator]
        def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
            row = self._get_gmem_vec(param, ctx)
            first, columns = ctx.tile_coord_mnkl[1] * ctx.tile_N, cute.size(row)
            for turn in cutlass.range(-(-ctx.tile_N // ctx.num_epi_threads), unroll_full=True):
                at = turn * ctx.num_epi_threads + ctx.tidx
                if at < ctx.tile_N and first + at < columns:
                    smem_tensor[at] = row[first + at]
            tile = cute.make_layout((ctx.tile_M, ctx.tile_N), stride=(0, 1))
            mine = ctx.partition_for_epilogue_fn(cute.make_tensor(smem_tensor.iterator, tile))
            if cutlass.const_expr(ctx.tiled_copy_t2r is not None):
                mine = ctx.tiled_copy_r2s.retile(mine)
            part = cute.group_modes(mine, 3, cute.rank(mine))[None, None, None, 0]
            return [mine, cute.make_rmem_tensor(part.layout, gemm.acc_dtype)]

    join = joined(gate)
    tensor = Optional[cute.Tensor]  # noqa: UP045  the DSL reads the type off the field

    class Joined(NamedTuple):
        bias: tensor = None
        joined: tensor = None

    class Kept(NamedTuple):
        bias: tensor = None
        gates: tensor = None
        ups: tensor = None
        joined: tensor = None

    stores_parts = keeps and in_halves

    class Gated(ComposableEpiMixin):  # type: ignore[misc]
        _epi_ops = (
            (PairedRow if in_halves else RowVecLoad)("bias"),
            *(TileStore(part, gated=True) for part in ("gates", "ups") if stores_parts),
            TileStore("joined", gated=True),
        )
        EpilogueArguments = mlir_namedtuple(Kept if stores_parts else Joined)

        def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
            self.rounding_mode = RoundingMode.RN
            given = self._epi_ops_to_params_dict(args)
            if "bias" in given and "bias" in self.concat_layout:
                given["bias"] = layout_utils.concat_to_interleave(given["bias"], 1)
            return self.EpilogueParams(**given)

        @cute.jit  # type: ignore[untyped-decorator]
        def epi_visit_subtile(
            self, params: Any, epi_loop_tensors: Any, sums: Any, matrix: Any = None
        ) -> Any:
            bias = epi_loop_tensors.get("bias")
            if cutlass.const_expr(bias is not None):
                for i in cutlass.range(cute.size(sums), unroll_full=True):
                    sums[i] = sums[i] + bias[i]
            half = cute.recast_layout(2, 1, sums.layout).shape
            joined = cute.make_rmem_tensor(half, self.acc_dtype)
            for i in cutlass.range(cute.size(joined), unroll_full=True):
                joined[i] = join(sums[2 * i], sums[2 * i + 1])
            if cutlass.const_expr(not stores_parts):
                return (joined,)
            parts = [cute.make_rmem_tensor(half, self.acc_dtype) for _ in range(2)]
            for i in cutlass.range(cute.size(joined), unroll_full=True):
                parts[0][i], parts[1][i] = sums[2 * i], sums[2 * i + 1]
            return (*parts, joined)

    name = f"GemmGated{'Kept' if keeps else ''}{family.name}_{gate.value}"
    name += "_halves" if in_halves else ""
    return type(name, (Gated, family.gemm()), {})


def joined(gate: Gate) -> Any:
    """Returns the gate's function of a pair (gate, up) in fp32; NaN gives NaN, as in torch."""
    alpha = gate.row.alpha
    cut_above, cut_below = cuts(gate)

    def clamped(gate: Any, up: Any) -> Any:
        gate, up = cut_above(gate), cut_below(cut_above(up))
        return gate * sigmoid(alpha * gate) * (up + 1.0)

    if gate.row.limit is not None:
        return clamped
    activation = FUNCTIONS[gate.row.activation].of_gate
    assert activation is not None
    return lambda gate, up: activation(gate) * up


def cuts(gate: Gate) -> tuple[Any, Any]:
    """Returns functions that clamp one fp32 value above and below at a gate's limit."""
    from cutlass import Float32, cute

    limit = gate.row.limit or math.inf

    @cute.jit  # type: ignore[untyped-decorator]
    def cut_above(x: Float32) -> Float32:
        return limit if x > limit else x

    @cute.jit  # type: ignore[untyped-decorator]
    def cut_below(x: Float32) -> Float32:
        return -limit if x < -limit else x

    return cut_above, cut_below


def _sample_tensors(signature: Signature, *, adds: bool) -> tuple[Any, ...]:
    """Builds sample tensors for a, b, addend and out, with dynamic extents."""
    from cutlass import cute

    m, n, k, half = (cute.sym_int() for _ in range(4))
    layout = signature.layout

    def matrix(dtype: DType, shape: tuple[Any, Any], row_major: bool) -> Any:
        stride = cute.sym_int64(divisibility=8 * ALIGNMENT_BYTES // dtype.bits)
        return cute.runtime.make_fake_tensor(
            cute_type(dtype), shape, (stride, 1) if row_major else (1, stride),
            assumed_align=ALIGNMENT_BYTES,
        )  # fmt: skip

    tensors = [
        matrix(signature.a, (m, k), layout.a_row_major),
        matrix(signature.b, (k, n), layout.b_row_major),
        matrix(signature.out, (m, half), True),
    ]
    if adds:
        row = cute.runtime.make_fake_tensor(
            cute_type(signature.out), (n,), (1,), assumed_align=ALIGNMENT_BYTES
        )
        tensors.insert(2, row)
    return tuple(tensors)
