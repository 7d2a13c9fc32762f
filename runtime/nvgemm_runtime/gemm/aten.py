"""Table of ATen's matrix-multiplication operators and their kernel operations.

To support another operator, extend this table. It knows operators by name only and imports torch
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
    """One GEMM call as ATen receives it.

    Attributes:
        op: ATen's operator name, such as ``mm`` or ``addmm``; or `GATHERED`, or `GATHERED_GROUPED`.
        a: Operand [m, k], with a leading batch for batched operators.
        b: Operand [k, n], with a leading batch or groups.
        out: Result [m, n], with a leading batch for batched operators; [m, n / 2] with a gate.
        extras: Further operands.
        obstacle: Reason why no kernel computes this call, whatever its operands; None otherwise.
        is_precise: True if ATen must sum fp8 without its fast accumulation, which is slower.
            Kernels ignore this.
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
    """ATen operator that kernels may compute.

    Attributes:
        op: Kernel operation.
        op_of_matrices: Kernel operation if A and B are both matrices, where that is a different
            one.
        tensors: Role by schema name, in schema order.
        stock_call: Expression that generated Python calls when a kernel cannot compute, with the
            tensors, the options and ``out``. It must work in a module that does not import this
            package.
        has_cpp_call: True if generated C++ has an ATen call that writes into an existing result.
        product: For a sum, the operator that computes only its product.
        inductor_names: Further names that Inductor gives its choices for this operator.
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
    """Matrix-multiplication operator that no kernel computes.

    Attributes:
        reason: Reason for the miss.
        inductor_names: Further names that Inductor gives its choices for this operator.
        adds_first: True if the first tensor is the addend.
    """

    reason: str
    inductor_names: tuple[str, ...] = ()
    adds_first: bool = False


_PRODUCT = {"self": Role.A, "mat2": Role.B}
_SCALED = {**_PRODUCT, "scale_a": Role.SCALE_A, "scale_b": Role.SCALE_B, "bias": Role.ADDEND}

BIAS_ADDMM = "bias_addmm"
"""Inductor's second ATen choice for addmm, next to ``addmm`` itself."""

GATHERED = "gathered_mm"
"""`AtenGemm.op` for sums over gathered rows. ATen has no operator for them with fp32 weights
(``embedding_bag`` takes weights in the matrix dtype), so `OPERATORS` has no row for it."""

GATHERED_GROUPED = "gathered_grouped_mm"
"""`AtenGemm.op` for grouped products with gathered rows. ATen computes them from a copy."""

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
"""Operators that kernels may compute, by ATen name."""

UNSERVED = {
    "addbmm": UnservedOperator(reason="no bundled kernel sums over a batch", adds_first=True),
    "_addmm_activation": UnservedOperator(
        reason="no bundled kernel is offered for _addmm_activation; compiled graphs call addmm and "
        "the activation",
        adds_first=True,
    ),
    "_scaled_grouped_mm_v2": UnservedOperator(
        reason="no bundled kernel is offered for _scaled_grouped_mm_v2; call _scaled_grouped_mm"
    ),
    "mm_plus_mm": UnservedOperator(
        reason="no bundled kernel adds two products", inductor_names=("_mm_plus_mm",)
    ),
    "scaled_mm_with_output_scale": UnservedOperator(reason="no bundled kernel scales its result"),
}
"""Operators that no kernel computes, by ATen name or by Inductor's choice name."""

GEMMS = frozenset({*OPERATORS, *UNSERVED})
"""All operators that multiply matrices."""

_ATEN_NAMES = {
    inductor_name: name
    for table in (OPERATORS, UNSERVED)
    for name, row in table.items()
    for inductor_name in row.inductor_names
}


def aten_name(inductor_name: str) -> str:
    """Returns the ATen operator that an Inductor choice calls."""
    return _ATEN_NAMES.get(inductor_name, inductor_name)


def operation_of(gemm: AtenGemm) -> Op:
    """Returns the kernel operation for a call to a served operator."""
    if gemm.op in (GATHERED, GATHERED_GROUPED):
        return Op(gemm.op)
    row = OPERATORS[gemm.op]
    if row.op_of_matrices is not None and (gemm.a.dim(), gemm.b.dim()) == (2, 2):
        return row.op_of_matrices
    return row.op


def operator_for(signature: Signature) -> str:
    """Returns the ATen operator that takes a signature's tensors and the fewest others.

    ATen operators have no second result, so `Role.SUMS` is ignored.
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
    """Returns the product inside a plain sum, with an fp32 result; None for other GEMMs.

    If no kernel can add, torch.compile may let a kernel compute the product and add to it
    separately.
    """
    op = OPERATORS[gemm.op].product if gemm.op in OPERATORS else None
    extras = gemm.extras
    if op is None or gemm.obstacle is not None or extras.activation or extras.gated:
        return None
    if gemm.a.dtype.itemsize == 1:
        return None  # torch's sums reject 8-bit operands, so no such sum exists
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
    """Reads a call to one of `OPERATORS`; missing arguments have their defaults.

    With an activation or a gate, ``out`` is the result after it.
    """
    tensors = {
        role: _first_tensor(tensor)
        for name, role in OPERATORS[op].tensors.items()
        if (tensor := arguments.get(name)) is not None
    }
    recipe, obstacle = None, _obstacle(arguments)
    if op == "_scaled_mm_v2" and obstacle is None:
        recipe, obstacle = _read_recipe(arguments)
    return AtenGemm(
        op=op,
        a=tensors[Role.A],
        b=tensors[Role.B],
        out=out,
        extras=ExtraOperands(
            scale_a=tensors.get(Role.SCALE_A),
            scale_b=tensors.get(Role.SCALE_B),
            recipe=recipe,
            offsets=tensors.get(Role.OFFSETS),
            addend=tensors.get(Role.ADDEND),
            activation=activation,
            gated=gated,
        ),
        obstacle=obstacle,
        is_precise=Role.SCALE_A in tensors and not arguments.get("use_fast_accum", False),
    )


def read_inputs(
    op: str,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    out: Operand,
    activation: Activation | None = None,
    gated: Epilogue | None = None,
) -> AtenGemm:
    """Reads a call whose tensors come in schema order, without the absent ones.

    If scales have several levels, the option ``levels`` counts them, and ``tensors`` has the first.
    """
    arguments = {**options, **dict(zip(OPERATORS[op].tensors, tensors))}
    return read_call(op, arguments, out, activation, gated)


def named_arguments(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns a call's arguments by schema name, without missing ones."""

    def read_all(value: Any) -> Any:
        return (
            [read(element) for element in value]
            if isinstance(value, (list, tuple))
            else read(value)
        )

    names = (argument.name for argument in overload._schema.arguments)
    values = {**dict(zip(names, args)), **kwargs}
    return {name: read_all(value) for name, value in values.items()}


def kernel_order(op: str, count: int) -> tuple[int, ...]:
    """Returns the positions, among an operator's tensors, in kernel order: A, B, then extras."""
    present = list(OPERATORS[op].tensors.values())[:count]
    return tuple(present.index(role) for role in Role if role in present)


def _first_tensor(tensor: Any) -> Any:
    return tensor[0] if isinstance(tensor, (list, tuple)) else tensor


def _obstacle(arguments: Mapping[str, Any]) -> str | None:
    for name in ("alpha", "beta"):
        if (factor := arguments.get(name, 1)) != 1:
            return f"{name} is {factor}, must be 1: kernels add the unscaled product and addend"
    if (levels := arguments.get("levels", 1)) != 1:
        return f"scales have {levels} levels, kernels take 1"
    if arguments.get("scale_result") is not None:
        return UNSERVED["scaled_mm_with_output_scale"].reason
    if arguments.get("offs") is not None and arguments.get("bias") is not None:
        return "torch does not add a bias to grouped products, so no kernel is offered"
    return None


_NO_SWIZZLE, _SWIZZLE_32_4_4 = range(2)
"""Values from ``torch.nn.functional.SwizzleType``."""

_RECIPES = {
    (
        recipe.row.torch_scaling.value,
        _SWIZZLE_32_4_4 if recipe.is_swizzled else _NO_SWIZZLE,
        f"torch.{recipe.dtype.torch_name}",
    ): recipe
    for recipe in ScaleRecipe
}
"""Scale recipe by scaling type, swizzle and dtype, as ``_scaled_mm_v2`` takes them."""


def _read_recipe(arguments: Mapping[str, Any]) -> tuple[ScaleRecipe | None, str | None]:
    """Returns the scale recipe for ``_scaled_mm_v2``, or the reason why no kernel takes it."""
    if arguments.get("contraction_dim"):
        return None, f"contraction_dim is {list(arguments['contraction_dim'])}, must be empty"
    sides = []
    for side in ("a", "b"):
        scales, recipes = (
            _as_list(arguments[f"scale_{side}"]),
            _as_list(arguments[f"recipe_{side}"]),
        )
        if len(scales) != 1:
            return None, f"scale_{side} has {len(scales)} levels, kernels take 1"
        swizzle = _as_list(arguments.get(f"swizzle_{side}") or [_NO_SWIZZLE])[0]
        sides.append((int(recipes[0]), int(swizzle), str(scales[0].dtype)))
    if sides[0] != sides[1]:
        return None, "scales of A and B have different recipes, must have the same"
    recipe = _RECIPES.get(sides[0])
    if recipe is None:
        scaling, swizzle, dtype = sides[0]
        return None, (
            f"no kernel scales by ScalingType({scaling}), SwizzleType({swizzle}) in {dtype}"
        )
    return recipe, None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


_USUAL_SETTINGS = {
    "allow_fp16_accumulation": ((False,), DType.FP16),
    "allow_fp16_reduced_precision_reduction": ((True,), DType.FP16),
    "allow_fp16_reduced_precision_reduction_split_k": ((True,), DType.FP16),
    "allow_bf16_reduced_precision_reduction": ((True,), DType.BF16),
    "allow_bf16_reduced_precision_reduction_split_k": ((True,), DType.BF16),
    "fp32_precision": (("none", "ieee"), DType.FP32),
}
"""Default values and affected dtype for A, by attribute under ``torch.backends.cuda.matmul`` (read
on torch 2.13). Attributes that a torch lacks count as default. ``set_float32_matmul_precision`` and
``allow_tf32`` set ``fp32_precision``."""

_USUAL_LIBRARIES = ("Default", "Cublas")
"""Usual values for ``preferred_blas_library``; torch treats "Default" as "Cublas"
(``Context.cpp``). TORCH_BLAS_PREFER_CUBLASLT=1 changes its initial value."""

_LIBRARY = "torch.backends.cuda.preferred_blas_library()"

_WITHOUT_LT = "DISABLE_ADDMM_CUDA_LT"
"""Environment variable. The value 1 disables cuBLASLt for ``addmm`` (``Blas.cpp``)."""


def unusual_setting(dtype: DType) -> str | None:
    """Describes the first non-default GEMM setting for a dtype; None if all are defaults."""
    library = _preferred_library()
    if library not in _USUAL_LIBRARIES:
        return f"{_LIBRARY} is {library}, usually Cublas"
    if os.environ.get(_WITHOUT_LT) == "1":
        return f"{_WITHOUT_LT} is 1, usually not set"
    for name, (defaults, affected) in _USUAL_SETTINGS.items():
        value = _setting(name)
        if affected is dtype and value not in defaults:
            return f"torch.backends.cuda.matmul.{name} is {value}, usually {defaults[0]}"
    return None


def settings_key() -> str:
    """Returns all settings that `unusual_setting` reads, for a cache key."""
    values = (_preferred_library(), os.environ.get(_WITHOUT_LT) == "1")
    return " ".join(map(str, (*values, *map(_setting, _USUAL_SETTINGS))))


def _preferred_library() -> str:
    """Returns torch's preferred BLAS library, or torch's error message if it has no name."""
    import torch

    preferred = getattr(torch.backends.cuda, "preferred_blas_library", None)
    if preferred is None:  # this torch supports only one library
        return _USUAL_LIBRARIES[0]
    try:
        return str(preferred().name)
    except RuntimeError as error:
        return f"unknown ({one_line(str(error))})"


def _setting(name: str) -> object:
    import torch

    return getattr(torch.backends.cuda.matmul, name, _USUAL_SETTINGS[name][0][0])
