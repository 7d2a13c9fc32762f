"""ATen's operators that multiply matrices: what each takes, and what that is to a kernel.

The one table to extend for another operator. It knows operators by name alone, and imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .extras import NOTHING, Extras
from .operands import torch_dtype
from .problem import DType, Op
from .roles import Role
from .scales import ScaleRecipe

if TYPE_CHECKING:
    from .epilogue import Activation
    from .operand import Operand


@dataclass(frozen=True, kw_only=True)
class AtenGemm:
    """A GEMM that ATen is asked for.

    Attributes:
        op: ATen's name of the operator, such as ``mm`` or ``addmm``.
        a: Operand of shape [m, k], with a leading batch for batches.
        b: Operand of shape [k, n], with a leading batch or groups.
        out: Result of shape [m, n], with a leading batch for batches.
        extras: What else it takes.
        obstacle: Why no kernel computes it, whatever the operands; None where one may.
        is_precise: Whether ATen is asked to sum fp8 without its fast accumulation, which takes it
            longer. Kernels sum as they do.
    """

    op: str
    a: Operand
    b: Operand
    out: Operand
    extras: Extras = NOTHING
    obstacle: str | None = None
    is_precise: bool = False


@dataclass(frozen=True, kw_only=True)
class _Operator:
    """An operator: ours that computes it, and its tensors by their names in the schema."""

    op: Op
    tensors: Mapping[str, Role]


_PRODUCT = {"self": Role.A, "mat2": Role.B}
_SUM = {"self": Role.ADDEND, "mat1": Role.A, "mat2": Role.B}
_BATCH_SUM = {"self": Role.ADDEND, "batch1": Role.A, "batch2": Role.B}
_SCALED = {**_PRODUCT, "scale_a": Role.SCALE_A, "scale_b": Role.SCALE_B, "bias": Role.ADDEND}

OPERATORS = {
    "mm": _Operator(op=Op.MM, tensors=_PRODUCT),
    "bmm": _Operator(op=Op.BMM, tensors=_PRODUCT),
    "addmm": _Operator(op=Op.MM, tensors=_SUM),
    "baddbmm": _Operator(op=Op.BMM, tensors=_BATCH_SUM),
    "_int_mm": _Operator(op=Op.MM, tensors=_PRODUCT),
    "_scaled_mm": _Operator(op=Op.MM, tensors=_SCALED),
    "_scaled_mm_v2": _Operator(op=Op.MM, tensors=_SCALED),
    "_grouped_mm": _Operator(op=Op.GROUPED_MM, tensors={**_PRODUCT, "offs": Role.OFFSETS}),
}
"""By ATen's name: the operators that kernels may compute."""

_GROUPS = "no bundled kernel scales groups"
_TWO_PRODUCTS = "no bundled kernel adds two products"

UNSERVED = {
    "addbmm": "no bundled kernel sums over a batch",
    "_addmm_activation": "no bundled kernel is offered for _addmm_activation; compiled graphs call "
    "addmm and the activation",
    "_scaled_grouped_mm": _GROUPS,
    "_scaled_grouped_mm_v2": _GROUPS,
    "mm_plus_mm": _TWO_PRODUCTS,
    "_mm_plus_mm": _TWO_PRODUCTS,
    "scaled_mm_with_output_scale": "no bundled kernel scales its result",
}
"""By name of an ATen operator, or of Inductor's choice for it: why a GEMM is not served."""

GEMMS = frozenset({*OPERATORS, *UNSERVED})
"""Every operator that multiplies matrices."""

UNREAD_ADDENDS = ("addbmm", "_addmm_activation")
"""Unserved operators whose first tensor is not multiplied."""


_PRODUCT_OF = {"addmm": "mm", "baddbmm": "bmm"}


def product_of_sum(gemm: AtenGemm) -> AtenGemm | None:
    """The product of a sum by itself, into fp32; None where a GEMM is no plain sum.

    Where no kernel adds, torch.compile may have a kernel compute that, and add to it.
    """
    op = _PRODUCT_OF.get(gemm.op)
    if op is None or gemm.obstacle is not None or gemm.extras.activation is not None:
        return None
    if gemm.a.dtype.itemsize == 1:
        return None  # torch's sums take nothing of 8 bits, so none of them is met
    strides, step = [], 1
    for extent in reversed(gemm.out.shape):
        strides.append(step)
        step *= extent
    out = replace(
        gemm.out, dtype=torch_dtype(DType.FP32), strides=tuple(reversed(strides)), address=0
    )
    return AtenGemm(op=op, a=gemm.a, b=gemm.b, out=out)


def read_call(
    op: str, arguments: Mapping[str, Any], out: Operand, activation: Activation | None = None
) -> AtenGemm:
    """Read a call of an operator.

    Args:
        op: ATen's name of it, one of `OPERATORS`.
        arguments: By their names in its schema, tensors as operands. What is missing has its
            default.
        out: The result.
        activation: What is applied to the result besides.
    """
    given = {
        role: _single(tensor)
        for name, role in OPERATORS[op].tensors.items()
        if (tensor := arguments.get(name)) is not None
    }
    recipe, obstacle = None, _obstacle(arguments)
    if op == "_scaled_mm_v2" and obstacle is None:
        recipe, obstacle = _read_recipe(arguments)
    return AtenGemm(
        op=op,
        a=given[Role.A],
        b=given[Role.B],
        out=out,
        extras=Extras(
            scale_a=given.get(Role.SCALE_A),
            scale_b=given.get(Role.SCALE_B),
            recipe=recipe,
            offsets=given.get(Role.OFFSETS),
            addend=given.get(Role.ADDEND),
            activation=activation,
        ),
        obstacle=obstacle,
        is_precise=Role.SCALE_A in given and not arguments.get("use_fast_accum", False),
    )


def read_inputs(
    op: str,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    out: Operand,
    activation: Activation | None = None,
) -> AtenGemm:
    """Read a call whose tensors are given in the schema's order, each that is there.

    Args:
        op: ATen's name of the operator.
        tensors: As operands.
        options: Its other arguments by name; ``levels`` where scales have several, of which the
            first are given.
        out: The result.
        activation: What is applied to the result besides.
    """
    return read_call(op, {**options, **dict(zip(OPERATORS[op].tensors, tensors))}, out, activation)


def named_arguments(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Callable[[Any], Any]
) -> dict[str, Any]:
    """A call's arguments by their names in the schema; what is missing is left out.

    Args:
        overload: The operator, as torch's ``OpOverload``.
        args: Given by place.
        kwargs: Given by name.
        read: Makes an operand of a tensor, and gives any other value as it is.
    """

    def read_all(value: Any) -> Any:
        return [read(one) for one in value] if isinstance(value, (list, tuple)) else read(value)

    names = (argument.name for argument in overload._schema.arguments)
    given = {**dict(zip(names, args)), **kwargs}
    return {name: read_all(value) for name, value in given.items()}


def kernel_order(op: str, count: int) -> tuple[int, ...]:
    """Where in an operator's tensors those are that kernels take: A, B, and then the others.

    Args:
        op: ATen's name of it.
        count: How many tensors there are.
    """
    given = list(OPERATORS[op].tensors.values())[:count]
    return tuple(given.index(role) for role in Role if role in given)


def _single(tensor: Any) -> Any:
    return tensor[0] if isinstance(tensor, (list, tuple)) else tensor


def _obstacle(arguments: Mapping[str, Any]) -> str | None:
    for name in ("alpha", "beta"):
        if (factor := arguments.get(name, 1)) != 1:
            return f"{name} is {factor}, must be 1: kernels add the product and the addend as are"
    if (levels := arguments.get("levels", 1)) != 1:
        return f"scales have {levels} levels, kernels take 1"
    if arguments.get("scale_result") is not None:
        return UNSERVED["scaled_mm_with_output_scale"]
    if arguments.get("offs") is not None and arguments.get("bias") is not None:
        return "no bundled kernel adds a bias to groups"
    return None


_TENSOR_WISE, _ROW_WISE, _BLOCKS_OF_16, _BLOCKS_OF_32 = range(4)
"""Values of ``torch.nn.functional.ScalingType``; those behind are scales of 128 values."""

_NO_SWIZZLE, _SWIZZLE_32_4_4 = range(2)
"""Values of ``torch.nn.functional.SwizzleType``."""

_RECIPES = {
    (_TENSOR_WISE, _NO_SWIZZLE, "torch.float32"): ScaleRecipe.FP32_TENSOR,
    (_ROW_WISE, _NO_SWIZZLE, "torch.float32"): ScaleRecipe.FP32_ROW,
    (_BLOCKS_OF_32, _SWIZZLE_32_4_4, "torch.float8_e8m0fnu"): ScaleRecipe.E8M0_1X32,
    (_BLOCKS_OF_16, _SWIZZLE_32_4_4, "torch.float8_e4m3fn"): ScaleRecipe.E4M3_1X16,
    (_BLOCKS_OF_16, _SWIZZLE_32_4_4, "torch.float8_e8m0fnu"): ScaleRecipe.E8M0_1X16,
}


def _read_recipe(arguments: Mapping[str, Any]) -> tuple[ScaleRecipe | None, str | None]:
    """What the scales of ``_scaled_mm_v2`` are, or why no kernel takes such."""
    if arguments.get("contraction_dim"):
        return None, f"contraction_dim is {list(arguments['contraction_dim'])}, must be empty"
    sides = []
    for side in ("a", "b"):
        scales, recipes = _listed(arguments[f"scale_{side}"]), _listed(arguments[f"recipe_{side}"])
        if len(scales) != 1:
            return None, f"scale_{side} has {len(scales)} levels, kernels take 1"
        swizzle = _listed(arguments.get(f"swizzle_{side}") or [_NO_SWIZZLE])[0]
        sides.append((int(recipes[0]), int(swizzle), str(scales[0].dtype)))
    if sides[0] != sides[1]:
        return None, "scales of A and B are of two kinds, must be of one"
    recipe = _RECIPES.get(sides[0])
    if recipe is None:
        scaling, swizzle, dtype = sides[0]
        return None, (
            f"no kernel scales by ScalingType({scaling}), SwizzleType({swizzle}) in {dtype}"
        )
    return recipe, None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
