"""This project's epilogue in the language of quack's kernels.

``out = round(f(scale_a * scale_b * (A @ B) + addend))``, computed in fp32 and rounded once, when
the kernel stores. Scales and bias reach a kernel as vectors along its own m and n, which swapped
operands exchange. An added matrix is the kernel's C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nvgemm_runtime.gemm.epilogues import Activation, Addend
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles
from nvgemm_runtime.gemm.types import ScaleRecipe

from .activation_functions import FUNCTIONS

_VECTORS = {
    Role.SCALE_A: ("row_of_a", "column_of_a"),
    Role.SCALE_B: ("row_of_b", "column_of_b"),
    Role.ADDEND: ("row_added", "column_added"),
}
"""Vector names by role: along the kernel's n, and along its m."""


def has_own_epilogue(signature: Signature) -> bool:
    """Returns True if a signature's kernels do more than multiply."""
    return bool({*extra_roles(signature)} - {Role.OFFSETS, Role.ROWS})


def kernel_with_epilogue(kernel: type[Any], activation: Activation | None) -> type[Any]:
    """Returns a subclass of a quack kernel with this project's epilogue.

    Args:
        kernel: ``GemmDefaultSm90`` or ``GemmDefaultSm100``.
        activation: Activation after the sum.
    """
    import cutlass
    from cutlass import Constexpr, cute
    from quack.cute_dsl_utils import mlir_namedtuple
    from quack.epilogue.ops import ColVecLoad, RowVecLoad, Scalar
    from quack.rounding import RoundingMode

    apply = None if activation is None else FUNCTIONS[activation].of_sum

    class EpilogueArguments(NamedTuple):
        scalar_a: Any = None
        scalar_b: Any = None
        row_of_a: Any = None
        column_of_a: Any = None
        row_of_b: Any = None
        column_of_b: Any = None
        row_added: Any = None
        column_added: Any = None
        add_to_output: Any = False
        rounding_mode: Any = RoundingMode.RN
        split_k_semaphore: Any = None
        split_k_workspace: Any = None

    EpilogueArguments.__annotations__ |= {
        "add_to_output": Constexpr[bool],
        "rounding_mode": Constexpr[int],
    }

    class WithEpilogue(kernel):  # type: ignore[misc]
        _epi_ops = (
            Scalar("scalar_a"),
            Scalar("scalar_b"),
            *(
                load(name)
                for names in _VECTORS.values()
                for load, name in zip((RowVecLoad, ColVecLoad), names)
            ),
        )

        def epi_visit_subtile(
            self, params: Any, found: Any, product: Any, matrix: Any = None
        ) -> tuple[()]:
            """Applies the epilogue to a thread's part of the product, in place."""
            scalars = [found.get(name) for name in ("scalar_a", "scalar_b")]
            factors = [found.get(name) for role in _SCALES for name in _VECTORS[role]]
            added = [matrix, *(found.get(name) for name in _VECTORS[Role.ADDEND])]
            for i in range(cute.size(product)):
                value = product[i]
                for scalar in scalars:
                    value = value if scalar is None else value * scalar
                for factor in factors:
                    value = value if factor is None else value * factor[i]
                for addend in added:
                    value = value if addend is None else value + addend[i].to(cutlass.Float32)
                product[i] = value if apply is None else apply(value)
            return ()

    WithEpilogue.EpilogueArguments = mlir_namedtuple(EpilogueArguments)
    return WithEpilogue


_SCALES = (Role.SCALE_A, Role.SCALE_B)


def epilogue_arguments(
    signature: Signature, tensors: dict[Role, Any], *, swapped: bool
) -> tuple[dict[str, Any], Any]:
    """Returns the epilogue's arguments by name, and its C, from tensors by role."""
    from cutlass import cute

    given: dict[str, Any] = {}
    matrix = None
    epilogue = signature.epilogue
    if epilogue is not None and epilogue.addend is Addend.MATRIX:
        matrix = tensors[Role.ADDEND]
    elif epilogue is not None:
        # A bias lies along the problem's n.
        given[_VECTORS[Role.ADDEND][int(swapped)]] = tensors[Role.ADDEND]
    if signature.scales is ScaleRecipe.FP32_TENSOR:
        given["scalar_a"], given["scalar_b"] = (tensors[role].iterator for role in _SCALES)
    elif signature.scales is ScaleRecipe.FP32_ROW and signature.op is Op.GROUPED_MM:
        # The library reads a group's rows from the first, and the group's row from the second.
        given["column_of_a"], given["row_of_b"] = (tensors[role] for role in _SCALES)
    elif signature.scales is ScaleRecipe.FP32_ROW:
        for role, along in ((Role.SCALE_A, 0), (Role.SCALE_B, 1)):
            extent = tensors[role].shape[along]
            vector = cute.make_tensor(
                tensors[role].iterator, cute.make_layout((extent,), stride=(1,))
            )
            # A's scales lie along the problem's m, which is the kernel's n if operands are swapped.
            along_n = (role is Role.SCALE_B) != swapped
            given[_VECTORS[role][0 if along_n else 1]] = vector
    return given, matrix
