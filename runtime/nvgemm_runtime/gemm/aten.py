"""ATen's operators that multiply matrices: what each takes, and what that is to a kernel.

The one table to extend for another operator. It knows operators by name alone; torch is imported
only to read its settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import one_line
from .extra_operands import NO_EXTRAS, ExtraOperands
from .operands import torch_dtype
from .problem import Op, Signature
from .roles import Role, roles
from .types import DType, ScaleRecipe

if TYPE_CHECKING:
    from .epilogues import Activation, Epilogue
    from .operands import Operand


@dataclass(frozen=True, kw_only=True)
class AtenGemm:
    """A GEMM that ATen is asked for.

    Attributes:
        op: ATen's name of the operator, such as ``mm`` or ``addmm``; or `GATHERED`, or
            `GATHERED_GROUPED`.
        a: Operand of shape [m, k], with a leading batch for batches.
        b: Operand of shape [k, n], with a leading batch or groups.
        out: Result of shape [m, n], with a leading batch for batches; [m, n / 2] with a gate.
        extras: What else it takes.
        obstacle: Why no kernel computes it, whatever the operands; None where one may.
        is_precise: Whether ATen is asked to sum fp8 without its fast accumulation, which takes it
            longer. Kernels sum as they do.
    """

    op: str
    a: Operand
    b: Operand
    out: Operand
    extras: ExtraOperands = NO_EXTRAS
    obstacle: str | None = None
    is_precise: bool = False


@dataclass(frozen=True, kw_only=True)
class ServedOperator:
    """An operator of ATen that kernels may compute.

    Attributes:
        op: The operation of such kernels.
        op_of_matrices: Their operation where A and B are matrices, if that is another.
        tensors: Its tensors by their names in the schema, in the schema's order.
        stock_call: What generated Python calls where a kernel cannot compute, with the tensors, the
            options and ``out``. It is an expression, for it stands in a module that must do without
            this package.
        has_cpp_call: Whether a stock line of generated C++ calls it with a result that is there.
        product: For a sum: the operator of its product alone.
        inductor_names: What Inductor calls its choices for it besides.
    """

    op: Op
    tensors: Mapping[str, Role]
    stock_call: str
    op_of_matrices: Op | None = None
    has_cpp_call: bool = True
    product: str | None = None
    inductor_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnservedOperator:
    """An operator that multiplies matrices, and that no kernel computes.

    Attributes:
        reason: Why not.
        inductor_names: What Inductor calls its choices for it besides.
        adds_first: Whether its first tensor is added, and not multiplied.
    """

    reason: str
    inductor_names: tuple[str, ...] = ()
    adds_first: bool = False


_PRODUCT = {"self": Role.A, "mat2": Role.B}
_SCALED = {**_PRODUCT, "scale_a": Role.SCALE_A, "scale_b": Role.SCALE_B, "bias": Role.ADDEND}

BIAS_ADDMM = "bias_addmm"
"""Inductor's second choice of ATen's for addmm, beside ``addmm`` itself."""

GATHERED = "gathered_mm"
"""Stands in `AtenGemm` for sums of gathered rows. No operator of ATen's computes them with weights
in fp32 (``embedding_bag`` takes them in the matrix' type), so it is not among `OPERATORS`."""

GATHERED_GROUPED = "gathered_grouped_mm"
"""Stands there for products of groups of rows that indices name, which ATen computes of a copy."""

OPERATORS = {
    "mm": ServedOperator(
        op=Op.MM, tensors=_PRODUCT, stock_call="torch.mm", inductor_names=("mm_dtype",)
    ),
    "bmm": ServedOperator(
        op=Op.BMM, tensors=_PRODUCT, stock_call="torch.bmm", inductor_names=("bmm_dtype",)
    ),
    "addmm": ServedOperator(
        op=Op.MM,
        tensors={"self": Role.ADDEND, "mat1": Role.A, "mat2": Role.B},
        stock_call="torch.addmm",
        product="mm",
        inductor_names=(BIAS_ADDMM,),
    ),
    "baddbmm": ServedOperator(
        op=Op.BMM,
        tensors={"self": Role.ADDEND, "batch1": Role.A, "batch2": Role.B},
        stock_call="torch.baddbmm",
        product="bmm",
    ),
    "_int_mm": ServedOperator(op=Op.MM, tensors=_PRODUCT, stock_call="torch._int_mm"),
    "_scaled_mm": ServedOperator(op=Op.MM, tensors=_SCALED, stock_call="torch._scaled_mm"),
    "_scaled_mm_v2": ServedOperator(
        op=Op.MM,
        tensors=_SCALED,
        stock_call=(
            "lambda a, b, s, t, c=None, *, recipe_a, swizzle_a, recipe_b, swizzle_b, out_dtype, "
            "use_fast_accum, out: torch.ops.aten._scaled_mm_v2.out(a, b, [s], [recipe_a], "
            "[swizzle_a], [t], [recipe_b], [swizzle_b], c, out_dtype, [], use_fast_accum, out=out)"
        ),
        has_cpp_call=False,
    ),
    "_grouped_mm": ServedOperator(
        op=Op.GROUPED_MM,
        op_of_matrices=Op.K_GROUPED_MM,
        tensors={**_PRODUCT, "offs": Role.OFFSETS, "bias": Role.ADDEND},
        stock_call="lambda *a, out, **o: out.copy_(torch._grouped_mm(*a, **o))",
        has_cpp_call=False,
    ),
    "_scaled_grouped_mm": ServedOperator(
        op=Op.GROUPED_MM,
        tensors={
            **_PRODUCT,
            "scale_a": Role.SCALE_A,
            "scale_b": Role.SCALE_B,
            "offs": Role.OFFSETS,
            "bias": Role.ADDEND,
        },
        stock_call="lambda *a, out, **o: out.copy_(torch._scaled_grouped_mm(*a, **o))",
        has_cpp_call=False,
    ),
}
"""By ATen's name: the operators that kernels may compute."""

UNSERVED = {
    "addbmm": UnservedOperator(reason="no bundled kernel sums over a batch", adds_first=True),
    "_addmm_activation": UnservedOperator(
        reason="no bundled kernel is offered for _addmm_activation; compiled graphs call addmm and "
        "the activation",
        adds_first=True,
    ),
    "_scaled_grouped_mm_v2": UnservedOperator(
        reason="no bundled kernel is offered for _scaled_grouped_mm_v2; _scaled_grouped_mm has some"
    ),
    "mm_plus_mm": UnservedOperator(
        reason="no bundled kernel adds two products", inductor_names=("_mm_plus_mm",)
    ),
    "scaled_mm_with_output_scale": UnservedOperator(reason="no bundled kernel scales its result"),
}
"""By ATen's name, or Inductor's of a choice: the operators that no kernel computes."""

GEMMS = frozenset({*OPERATORS, *UNSERVED})
"""Every operator that multiplies matrices."""

_ATEN_NAMES = {
    theirs: name
    for table in (OPERATORS, UNSERVED)
    for name, row in table.items()
    for theirs in row.inductor_names
}


def aten_name(inductor_name: str) -> str:
    """ATen's name of the operator that Inductor's choice of a name calls."""
    return _ATEN_NAMES.get(inductor_name, inductor_name)


def operation_of(gemm: AtenGemm) -> Op:
    """The operation of kernels that may compute a call of an operator that they have."""
    if gemm.op in (GATHERED, GATHERED_GROUPED):
        return Op(gemm.op)
    row = OPERATORS[gemm.op]
    if row.op_of_matrices is not None and (gemm.a.dim(), gemm.b.dim()) == (2, 2):
        return row.op_of_matrices
    return row.op


def operator_for(signature: Signature) -> str:
    """ATen's name of the operator that takes a signature's tensors, and as few others as any.

    None has a second result, such as sums of rows.
    """
    if signature.op.is_gathered:
        return signature.op.value
    needed = {role for role in roles(signature) if role not in (Role.OUT, Role.SUMS)}
    return next(
        name
        for name, row in OPERATORS.items()
        if signature.op in (row.op, row.op_of_matrices) and needed.issubset(row.tensors.values())
    )


def product_of_sum(gemm: AtenGemm) -> AtenGemm | None:
    """The product of a sum by itself, into fp32; None where a GEMM is no plain sum.

    Where no kernel adds, torch.compile may have a kernel compute that, and add to it.
    """
    op = OPERATORS[gemm.op].product if gemm.op in OPERATORS else None
    extras = gemm.extras
    if op is None or gemm.obstacle is not None or extras.activation or extras.gated:
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
    op: str,
    arguments: Mapping[str, Any],
    out: Operand,
    activation: Activation | None = None,
    gated: Epilogue | None = None,
) -> AtenGemm:
    """Read a call of an operator of `OPERATORS`; what ``arguments`` lack has its default.

    An activation or a gate may follow, to which ``out`` then belongs.
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
        extras=ExtraOperands(
            scale_a=given.get(Role.SCALE_A),
            scale_b=given.get(Role.SCALE_B),
            recipe=recipe,
            offsets=given.get(Role.OFFSETS),
            addend=given.get(Role.ADDEND),
            activation=activation,
            gated=gated,
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
    gated: Epilogue | None = None,
) -> AtenGemm:
    """Read a call whose tensors are given in the schema's order, each that is there.

    Where scales have several ``levels``, an option says how many, and the first are given.
    """
    arguments = {**options, **dict(zip(OPERATORS[op].tensors, tensors))}
    return read_call(op, arguments, out, activation, gated)


def named_arguments(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Callable[[Any], Any]
) -> dict[str, Any]:
    """A call's arguments by their names in the schema; what is missing is left out."""

    def read_all(value: Any) -> Any:
        return [read(one) for one in value] if isinstance(value, (list, tuple)) else read(value)

    names = (argument.name for argument in overload._schema.arguments)
    given = {**dict(zip(names, args)), **kwargs}
    return {name: read_all(value) for name, value in given.items()}


def kernel_order(op: str, count: int) -> tuple[int, ...]:
    """Where in an operator's tensors those are that kernels take: A, B, and then the others."""
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
        return UNSERVED["scaled_mm_with_output_scale"].reason
    if arguments.get("offs") is not None and arguments.get("bias") is not None:
        return "torch computes no bias of groups, so kernels are not offered for one"
    return None


_NO_SWIZZLE, _SWIZZLE_32_4_4 = range(2)
"""Values of ``torch.nn.functional.SwizzleType``."""

_RECIPES = {
    (
        recipe.row.torch_scaling.value,
        _SWIZZLE_32_4_4 if recipe.is_swizzled else _NO_SWIZZLE,
        f"torch.{recipe.dtype.torch_name}",
    ): recipe
    for recipe in ScaleRecipe
}
"""By what ``_scaled_mm_v2`` is told of scales."""


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


_USUAL_SETTINGS = {
    "allow_fp16_accumulation": ((False,), DType.FP16),
    "allow_fp16_reduced_precision_reduction": ((True,), DType.FP16),
    "allow_fp16_reduced_precision_reduction_split_k": ((True,), DType.FP16),
    "allow_bf16_reduced_precision_reduction": ((True,), DType.BF16),
    "allow_bf16_reduced_precision_reduction_split_k": ((True,), DType.BF16),
    "fp32_precision": (("none", "ieee"), DType.FP32),
}
"""By attribute of ``torch.backends.cuda.matmul``: what it is unless it is set, and the element type
of A that it concerns (read on torch 2.13). What another torch does not have is left out. That of
fp32 is what ``set_float32_matmul_precision`` and ``allow_tf32`` set."""

_USUAL_LIBRARIES = ("Default", "Cublas")
"""Names of ``preferred_blas_library``; torch takes the former for the latter (``Context.cpp``).
TORCH_BLAS_PREFER_CUBLASLT=1 sets what it is at first."""

_LIBRARY = "torch.backends.cuda.preferred_blas_library()"

_WITHOUT_LT = "DISABLE_ADDMM_CUDA_LT"
"""Variable that, if 1, takes cuBLASLt from ``addmm`` (``Blas.cpp``)."""


def unusual_setting(dtype: DType) -> str | None:
    """The first setting for GEMMs of an element type that is not as usual, in words, or None."""
    library = _preferred_library()
    if library not in _USUAL_LIBRARIES:
        return f"{_LIBRARY} is {library}, usually Cublas"
    if os.environ.get(_WITHOUT_LT) == "1":
        return f"{_WITHOUT_LT} is 1, usually not set"
    for name, (usual, concerned) in _USUAL_SETTINGS.items():
        value = _setting(name)
        if concerned is dtype and value not in usual:
            return f"torch.backends.cuda.matmul.{name} is {value}, usually {usual[0]}"
    return None


def settings_key() -> str:
    """Everything that `unusual_setting` looks at, as part of a cache's key."""
    values = (_preferred_library(), os.environ.get(_WITHOUT_LT) == "1")
    return " ".join(map(str, (*values, *map(_setting, _USUAL_SETTINGS))))


def _preferred_library() -> str:
    """Name of the BLAS library that torch prefers; what torch says, where it names none."""
    import torch

    preferred = getattr(torch.backends.cuda, "preferred_blas_library", None)
    if preferred is None:  # then there is one library alone
        return _USUAL_LIBRARIES[0]
    try:
        return str(preferred().name)
    except RuntimeError as error:
        return f"unknown ({one_line(str(error))})"


def _setting(name: str) -> object:
    import torch

    return getattr(torch.backends.cuda.matmul, name, _USUAL_SETTINGS[name][0][0])
