"""Compiles quack's grouped GEMM with a gate's gradient.

The product is the gradient of a gate's result. For each of its columns, the epilogue reads the gate
and up values that the forward kernel stored, and stores both gradients, computed in fp32 and
rounded once. In halves, gates and ups are two matrices, loaded and stored side by side.
Interleaved, a gate and its up are one element of 32 bits, which the library loads as its C and
stores as its D.

For row sums, the epilogue also computes the gate's result and multiplies it by its gradient before
rounding. Each tile stores the sum for each of its rows, in fp32.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Optional

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, STREAM
from nvgemm_runtime.gemm.epilogues import Gate
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import SUMMED_COLUMNS, Role, has_sums

from .activation_functions import FUNCTIONS, sigmoid
from .designs import Design
from .entry import ALIGNMENT_BYTES, cute_type, import_library, scheduler_options
from .families import MmaFamily, family_of
from .gated import columns_of, cuts, has_halves
from .grouped import arguments_of_groups, compile_for_groups, gemm_of_groups
from .grouped import designs as designs_of_groups

_MOST_SUMS = 192
"""Most accumulators per thread on Hopper: with 208, kernels spill 8 to 24 bytes, whatever the step.
"""

MOST_SUMS_IN_WIDE_STEPS = 128
"""Most accumulators per thread for the library's step of 32 columns, with its loads and stores:
with 160, kernels spill 16 to 104 bytes, with 192 up to 208."""

_MOST_BESIDE_SUMS_OF_ROWS = 160
"""The same with row sums: with 192, kernels spill 16 to 32 bytes in narrow steps."""

_MOST_BESIDE_SUMS_IN_WIDE_STEPS = 96
"""The same with row sums: with 128, kernels spill 8 bytes in wide steps."""

_SPILLING_BLOCK = (128, 192)
"""Rows and columns in a thread block's part of a tile, on Blackwell."""

_NARROW_STEP = 16
"""Columns per step in kernels with more accumulators."""


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """Returns the grouped designs that spill no registers, in a fixed order.

    On Hopper, accumulators stay in registers while gates and ups come and go. On Blackwell, kernels
    with gates and ups in halves spill 8 to 16 bytes for one of the library's steps. Tiles in
    kernels with row sums are at least `SUMMED_COLUMNS` wide.
    """
    offered = designs_of_groups(arch, signature)
    if has_sums(signature):
        offered = tuple(one for one in offered if one.block_tile(arch)[1] >= SUMMED_COLUMNS)
    if family_of(arch).registers_hold_sums:
        most = _MOST_BESIDE_SUMS_OF_ROWS if has_sums(signature) else _MOST_SUMS
        return tuple(one for one in offered if one.sums_of_a_thread <= most)
    return tuple(
        one
        for one in offered
        if not (has_halves(signature) and one.block_tile(arch) == _SPILLING_BLOCK)
    )


def compile_gate_gradient(design: Design, signature: Signature, arch: str) -> Any:
    """Compiles one design for a gate's gradient; arguments are as in `entry.compile_entry`.

    The function takes ``(a, b, offsets, addend, out, stream)``, on Hopper ``clusters`` before the
    stream. ``addend`` holds gates and ups; ``out`` holds their gradients in the same order. With
    row sums, ``sums`` follows ``addend``: each tile writes the column with its number.
    """
    import_library()
    from cutlass import cute

    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    in_halves = has_halves(signature)
    family, gate = family_of(arch), signature.epilogue.gate
    with_sums = has_sums(signature)
    kind = (
        _class_for_halves(family, gate, with_sums)
        if in_halves
        else _class_for_pairs(family, gate, cute_type(signature.out), with_sums)
    )
    most_wide = _MOST_BESIDE_SUMS_IN_WIDE_STEPS if with_sums else MOST_SUMS_IN_WIDE_STEPS
    if family.registers_hold_sums and design.sums_of_a_thread > most_wide:
        kind = in_narrow_steps(kind)
    gemm = gemm_of_groups(kind, f"{kind.__name__}_groups", design, signature, arch)

    def launch(**given: Any) -> None:
        kept, out = given[Role.ADDEND.value], given[Role.OUT.value]
        epilogue: dict[str, Any] = {}
        stored = loaded = None
        if in_halves:
            n = cute.size(given[Role.B.value], mode=[2])
            for place, part in ((0, "gates"), (n, "ups")):
                epilogue[f"kept_{part}"] = columns_of(kept, place, n)
                epilogue[part] = columns_of(out, place, n)
        else:
            loaded, stored = _pairs_of(kept), _pairs_of(out)
        if with_sums:
            epilogue["row_sums"] = given[Role.SUMS.value]
        gemm(
            given["a"], given["b"], stored, loaded, gemm.EpilogueArguments(**epilogue),
            scheduler_options(given.get(CLUSTERS)),
            arguments_of_groups(given), given[STREAM], None, None,
        )  # fmt: skip

    return compile_for_groups(launch, design, signature, arch)


def _pairs_of(matrix: Any) -> Any:
    """Views a row-major 16-bit matrix as pairs of neighbours, in 32-bit elements."""
    from cutlass import Float32, cute

    rows, columns = matrix.shape
    row = cute.assume(matrix.stride[0] // 2, divby=8 * ALIGNMENT_BYTES // Float32.width)
    return cute.make_tensor(
        cute.recast_ptr(matrix.iterator, dtype=Float32),
        cute.make_layout((rows, columns // 2), stride=(row, 1)),
    )


@functools.cache
def _class_for_halves(family: MmaFamily, gate: Gate, with_sums: bool) -> Any:
    """Returns the library's GEMM with separate matrices for gates and ups."""
    import cutlass
    from cutlass import Float32, cute
    from quack.cute_dsl_utils import mlir_namedtuple
    from quack.epilogue.mixin import ComposableEpiMixin
    from quack.epilogue.ops import ColVecReduce, TileLoad, TileStore
    from quack.rounding import RoundingMode

    gradients = _gradients(gate)
    tensor = Optional[cute.Tensor]  # noqa: UP045  the DSL reads the type off the field

    class Arguments(NamedTuple):
        kept_gates: tensor = None
        kept_ups: tensor = None
        gates: tensor = None
        ups: tensor = None
        row_sums: tensor = None

    class GradientOfHalves(ComposableEpiMixin):  # type: ignore[misc]
        _epi_ops = (
            TileLoad("kept_gates"), TileLoad("kept_ups"), TileStore("gates"), TileStore("ups"),
            *((ColVecReduce("row_sums"),) if with_sums else ()),
        )  # fmt: skip
        EpilogueArguments = mlir_namedtuple(Arguments)

        def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
            self.rounding_mode = RoundingMode.RN
            return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

        @cute.jit  # type: ignore[untyped-decorator]
        def epi_visit_subtile(self, params: Any, found: Any, sums: Any, matrix: Any = None) -> Any:
            kept_gates, kept_ups = found["kept_gates"], found["kept_ups"]
            gates = cute.make_rmem_tensor(sums.layout.shape, self.acc_dtype)
            ups = cute.make_rmem_tensor(sums.layout.shape, self.acc_dtype)
            for i in cutlass.range(cute.size(sums), unroll_full=True):
                gate, up = kept_gates[i].to(Float32), kept_ups[i].to(Float32)
                gates[i], ups[i], term = gradients(gate, up, sums[i])
                if cutlass.const_expr(with_sums):
                    found["row_sums"][i] += term
            return (gates, ups)

    rest = f"_halves{'_sums' if with_sums else ''}"
    return type(_class_name(family, gate, rest), (GradientOfHalves, family.gemm()), {})


@functools.cache
def _class_for_pairs(family: MmaFamily, gate: Gate, dtype: Any, with_sums: bool) -> Any:
    """Returns the library's GEMM with one matrix of 16-bit pairs."""
    import cutlass
    from cutlass import Float32, cute
    from quack.cute_dsl_utils import mlir_namedtuple
    from quack.epilogue.ops import ColVecReduce
    from quack.rounding import RoundingMode

    gradients = _gradients(gate)
    base = family.gemm_with_default_epilogue()

    class Arguments(NamedTuple):
        row_sums: Optional[cute.Tensor] = None  # noqa: UP045  the DSL reads the type off the field
        add_to_output: cutlass.Constexpr[bool] = False
        rounding_mode: cutlass.Constexpr[int] = RoundingMode.RN
        split_k_semaphore: Any = None
        split_k_workspace: Any = None

    class GradientOfPairs(base):  # type: ignore[misc, valid-type]
        if with_sums:
            _epi_ops = (ColVecReduce("row_sums"),)
            EpilogueArguments = mlir_namedtuple(Arguments)

        @cute.jit  # type: ignore[untyped-decorator]
        def epi_visit_subtile(self, params: Any, found: Any, sums: Any, matrix: Any = None) -> Any:
            kept = cute.recast_tensor(matrix, dtype)
            # Rounds each pair at once: all pairs in fp32 would take twice the registers.
            pair = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range(cute.size(sums), unroll_full=True):
                gate, up = kept[2 * i].to(Float32), kept[2 * i + 1].to(Float32)
                pair[0], pair[1], term = gradients(gate, up, sums[i])
                if cutlass.const_expr(with_sums):
                    found["row_sums"][i] += term
                sums[i] = cute.recast_tensor(pair.to(dtype), Float32)[0]
            return ()

    rest = f"_{dtype.__name__}{'_sums' if with_sums else ''}"
    return type(_class_name(family, gate, rest), (GradientOfPairs,), {})


@functools.cache
def in_narrow_steps(kind: Any) -> Any:
    """Returns a Hopper kernel class that processes fewer columns per step."""

    class Narrow(kind):  # type: ignore[misc]
        def _compute_tile_shape_or_override(self, *args: Any, **named: Any) -> tuple[int, int]:
            m, n = super()._compute_tile_shape_or_override(*args, **named)
            return m, math.gcd(n, _NARROW_STEP)

    return type(f"{kind.__name__}_narrow", (Narrow,), {})


def _class_name(family: MmaFamily, gate: Gate, rest: str) -> str:
    return f"GemmGateGradient{family.name}_{gate.value}{rest}"


def _gradients(gate: Gate) -> Any:
    """Returns a function for a gate's gradients in fp32, as `ActivationFunctions.gradients`."""
    from cutlass import Float32, cute

    alpha = gate.row.alpha
    cut_above, cut_below = cuts(gate)

    # Compares with the fp32 number that was cut off: compilers compare with a constant in 16 bits.
    @cute.jit  # type: ignore[untyped-decorator]
    def unless_above(x: Float32, cut: Float32, grad: Float32) -> Float32:
        return 0.0 if x > cut else grad

    @cute.jit  # type: ignore[untyped-decorator]
    def unless_below(x: Float32, cut: Float32, grad: Float32) -> Float32:
        return 0.0 if x < cut else grad

    def clamped(gate: Any, up: Any, grad: Any) -> tuple[Any, Any, Any]:
        cut_gate, cut_up = cut_above(gate), cut_below(cut_above(up))
        inner = alpha * cut_gate
        share = sigmoid(inner)
        of_gate = grad * (cut_up + 1.0) * share * (1.0 + inner * (1.0 - share))
        of_up = grad * cut_gate * share
        term = of_up * (cut_up + 1.0)
        of_up = unless_above(up, cut_up, unless_below(up, cut_up, of_up))
        return unless_above(gate, cut_gate, of_gate), of_up, term

    if gate.row.limit is not None:
        return clamped
    gradients = FUNCTIONS[gate.row.activation].gradients
    assert gradients is not None
    return gradients
