"""Compiles quack's grouped GEMM for up projections whose gate has a separate weight.

The product is the ups. For each of its columns, the epilogue reads the gate value, which another
product has stored, and stores the up and the gate's result. The result uses the rounded gate and
the unrounded up, and is computed in fp32 and rounded once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, STREAM
from nvgemm_runtime.gemm.epilogues import Gate
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import Role

from .designs import Design
from .entry import import_library, scheduler_options
from .families import MmaFamily, family_of
from .gate_gradient import MOST_SUMS_IN_WIDE_STEPS, in_narrow_steps
from .gated import columns_of, joined
from .grouped import arguments_of_groups, compile_for_groups, gemm_of_groups
from .grouped import designs as designs_of_groups


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """Returns the grouped designs, none of which spills, in a fixed order."""
    return designs_of_groups(arch, signature)


def compile_gate_ups(design: Design, signature: Signature, arch: str) -> Any:
    """Compiles one design for a gate's ups; arguments are as in `entry.compile_entry`.

    The function takes ``(a, b, offsets, addend, out, stream)``, on Hopper ``clusters`` before the
    stream. ``addend`` holds gates [m, n]; ``out`` [m, 2 n] holds ups and the gate's result.
    """
    import_library()
    from cutlass import cute

    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    family = family_of(arch)
    kind = _class_for_ups(family, signature.epilogue.gate)
    if family.registers_hold_sums and design.sums_of_a_thread > MOST_SUMS_IN_WIDE_STEPS:
        kind = in_narrow_steps(kind)
    gemm = gemm_of_groups(kind, f"{kind.__name__}_groups", design, signature, arch)

    def launch(**given: Any) -> None:
        out, n = given[Role.OUT.value], cute.size(given[Role.B.value], mode=[2])
        epilogue = gemm.EpilogueArguments(
            gates=columns_of(given[Role.ADDEND.value], 0, n),
            ups=columns_of(out, 0, n),
            joined=columns_of(out, n, n),
        )
        gemm(
            given["a"], given["b"], None, None, epilogue, scheduler_options(given.get(CLUSTERS)),
            arguments_of_groups(given), given[STREAM], None, None,
        )  # fmt: skip

    return compile_for_groups(launch, design, signature, arch)


@functools.cache
def _class_for_ups(family: MmaFamily, gate: Gate) -> Any:
    """Returns the library's GEMM with matrices for gates, ups and the gate's result."""
    import cutlass
    from cutlass import Float32, cute
    from quack.cute_dsl_utils import mlir_namedtuple
    from quack.epilogue.mixin import ComposableEpiMixin
    from quack.epilogue.ops import TileLoad, TileStore
    from quack.rounding import RoundingMode

    join = joined(gate)
    tensor = Optional[cute.Tensor]  # noqa: UP045  the DSL reads the type off the field

    class Arguments(NamedTuple):
        gates: tensor = None
        ups: tensor = None
        joined: tensor = None

    class Ups(ComposableEpiMixin):  # type: ignore[misc]
        _epi_ops = (TileLoad("gates"), TileStore("ups"), TileStore("joined"))
        EpilogueArguments = mlir_namedtuple(Arguments)

        def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
            self.rounding_mode = RoundingMode.RN
            return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

        @cute.jit  # type: ignore[untyped-decorator]
        def epi_visit_subtile(self, params: Any, found: Any, sums: Any, matrix: Any = None) -> Any:
            gates = found["gates"]
            ups = cute.make_rmem_tensor(sums.layout.shape, self.acc_dtype)
            for i in cutlass.range(cute.size(sums), unroll_full=True):
                ups[i] = sums[i]
                sums[i] = join(gates[i].to(Float32), sums[i])
            return (ups, sums)

    return type(f"GemmGateUps{family.name}_{gate.value}", (Ups, family.gemm()), {})
