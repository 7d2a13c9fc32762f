"""The tensors of any problem of the support table: exact or random ones, on any device.

Exact ones hold -1, 0 and 1 (0 and 255 where there is no sign), few enough for every sum to have an
exact value in the result's type.
Their scales are powers of two: one for each row of A, one for each column of B, and for block
scales another for each block of k, which A's multiplies by what B's divides by. So a product is
exact only where every scale is read from its own place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from draws import Draws, TorchDraws
from microscaling import encode_e8m0, encode_fp4, quantise, swizzle

from nvgemm_aot.tuning.correctness.exact_operands import shapes_with_k_last
from nvgemm_runtime.gemm.epilogues import ADD, Addend, GateForm
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles, role_dtype, role_shape
from nvgemm_runtime.gemm.types import ScaleRecipe

EXACT_LIMIT = {
    DType.FP32: 2**24,
    DType.FP16: 2048,
    DType.BF16: 256,
    DType.FP8_E4M3: 16,
    DType.FP8_E5M2: 8,
    DType.INT32: 2**31,
    DType.INT8: 128,
    DType.UINT8: 256,
}
"""By output type: whole numbers up to here have an exact value (2 to the mantissa's bits)."""


_UNSIGNED = {DType.INT32: (255, 255), DType.FP32: (255, 1)}
"""By output type, for uint8: what stands in A and B in place of 1. Read as signed it is -1."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The tensors of a problem, by role; the result is poisoned.

    Attributes:
        has_exact_sums: Whether every sum of products has an exact value in any accumulator.
    """

    problem: Problem
    tensors: dict[Role, torch.Tensor]
    has_exact_sums: bool

    @property
    def a(self) -> torch.Tensor:
        return self.tensors[Role.A]

    @property
    def b(self) -> torch.Tensor:
        return self.tensors[Role.B]

    @property
    def out(self) -> torch.Tensor:
        return self.tensors[Role.OUT]

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        """What a launch takes behind A, B and the result."""
        return tuple(self.tensors[role] for role in extra_roles(self.problem.signature))

    @property
    def extras(self) -> ExtraOperands:
        """The same as `nvgemm_runtime.gemm.operands.requests` takes it."""
        return ExtraOperands.for_signature(self.problem.signature, self.tensors)

    def first_rows(self, count: int) -> Arguments:
        """The problem of the first rows of the result alone; all of A where rows are gathered."""
        signature = self.problem.signature
        of_rows = {Role.ROWS, Role.SUMS, Role.OUT}
        if not signature.op.is_gathered:
            of_rows.add(Role.A)
        if signature.epilogue is not None and signature.epilogue.addend_has_rows:
            of_rows.add(Role.ADDEND)
        tensors = {r: one[:count] if r in of_rows else one for r, one in self.tensors.items()}
        return replace(self, problem=replace(self.problem, m=count), tensors=tensors)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.a, self.b, self.out

    @property
    def has_operator(self) -> bool:
        """Whether `torch.ops.nvgemm_aot` has an operator for it; a function there is for all."""
        signature = self.problem.signature
        if signature.op.has_groups and signature.epilogue is ADD:
            return False
        return signature.form in (None, GateForm.JOINED)

    def operator_call(self) -> tuple[str, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Name of the operator of ``torch.ops.nvgemm_aot``, its tensors and its keywords.

        The kernel's id comes behind the tensors.
        """
        signature, others = self.problem.signature, self.others
        if signature.scales is not None:
            bias = {"bias": self.tensors[Role.ADDEND]} if signature.epilogue else {}
            if signature.op is Op.GROUPED_MM:
                return "scaled_grouped_mm", (self.a, self.b, *others), {}
            return "scaled_mm", (self.a, self.b, *others[:2]), bias
        if signature.op in (Op.K_GROUPED_MM, Op.GATHERED_MM):
            return signature.op.value, (self.a, self.b, *others), {}
        if signature.op.groups_rows:
            name = signature.op.value
            if signature.is_gated:
                name = f"{name.removesuffix('mm')}gated_mm"
            count = 2 if signature.op.is_gathered else 1
            added = {"bias": others[count]} if Role.ADDEND in self.tensors else {}
            return name, (self.a, self.b, *others[:count]), added
        if signature.is_gated:
            return "gated_mm", (self.a, self.b), {"bias": others[0]} if others else {}
        if signature.epilogue is not None:
            name = "addmm" if signature.op is Op.MM else "baddbmm"
            return name, (*others, self.a, self.b), {}
        return signature.op.value, (self.a, self.b), {}

    def function_call(self) -> tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]:
        """The same for the function of nvgemm_runtime, which takes the kernel as a keyword."""
        name, tensors, keywords = self.operator_call()
        signature = self.problem.signature
        named: dict[str, Any] = dict(keywords)
        if signature.op.groups_rows:
            name = signature.op.value if signature.scales is None else "scaled_grouped_mm"
        if signature.op.has_groups and signature.epilogue is ADD:
            named["addend"] = named.pop("bias")
        if signature.is_gated:
            named["epilogue"] = signature.epilogue
            read = {Addend.PRODUCT: "product", Addend.GATES: "gates"}
            if signature.epilogue is not None and signature.epilogue.addend in read:
                named[read[signature.epilogue.addend]] = named.pop("bias")
            if Role.SUMS in self.tensors:
                named["sums"] = self.tensors[Role.SUMS]
        elif signature.epilogue is not None and signature.epilogue.activation is not None:
            named["activation"] = signature.epilogue.activation
        if signature.scales is not None and signature.op is Op.MM:
            named["recipe"] = signature.scales
        return name, tensors, named


def exact_arguments(
    problem: Problem, device: str = "cuda", draws: Draws | None = None
) -> Arguments:
    """Tensors whose result has no rounding, but for the curved activations' and gates'."""
    draws = draws or TorchDraws(device)
    signature = problem.signature
    rows_a, rows_b = shapes_with_k_last(problem)
    density = min(0.5, math.sqrt(EXACT_LIMIT[signature.out] / (4 * problem.k)))

    def sparse(shape: tuple[int, ...], unsigned: int) -> torch.Tensor:
        chosen = draws.uniform(shape) < density
        if signature.a is DType.UINT8:
            return chosen * float(unsigned)
        return chosen * (draws.integers(0, 2, shape) * 2.0 - 1)

    largest_a, largest_b = _UNSIGNED.get(signature.out, (1, 1))
    tensors = {
        Role.A: _encode(sparse(rows_a, largest_a), signature.a),
        Role.B: _encode(sparse(rows_b, largest_b), signature.b),
        **_exact_scales(problem, device, draws),
    }
    if Role.ADDEND in extra_roles(signature):
        shape = role_shape(problem, Role.ADDEND)
        added = draws.integers(-1, 2, shape) * _times(signature)
        tensors[Role.ADDEND] = _encode(added, role_dtype(signature, Role.ADDEND))
    return _complete(problem, tensors, device, draws, has_exact_sums=True)


def random_arguments(
    problem: Problem, device: str = "cuda", draws: Draws | None = None
) -> Arguments:
    """Tensors of normally distributed numbers, quantised where there are block scales.

    Of A, few in each row are not zero, so that little can go wrong in sums, and what does shows.
    Whole numbers are as sparse as exact ones.
    """
    draws = draws or TorchDraws(device)
    signature = problem.signature
    if signature.a.is_integer:
        return exact_arguments(problem, device, draws)
    normal_a, normal_b = map(draws.normal, shapes_with_k_last(problem))
    scales = signature.scales
    tensors = {}
    if scales is not None and scales.block is not None:
        types = torch_dtype(signature.a), torch_dtype(scales.dtype)
        tensors[Role.A], scale_a = quantise(normal_a, *types, scales.block)
        tensors[Role.B], scale_b = quantise(normal_b, *types, scales.block)
        tensors[Role.SCALE_A], tensors[Role.SCALE_B] = swizzle(scale_a), swizzle(scale_b)
    else:
        tensors[Role.A] = _encode(normal_a, signature.a)
        tensors[Role.B] = _encode(normal_b, signature.b)
    tensors[Role.A] = _few_of_each_row(tensors[Role.A], draws)
    if scales is not None and scales.block is None:
        for role in (Role.SCALE_A, Role.SCALE_B):
            tensors[role] = draws.uniform(role_shape(problem, role)) + 0.5
    if Role.ADDEND in extra_roles(signature):
        added = draws.normal(role_shape(problem, Role.ADDEND)) * _times(signature)
        tensors[Role.ADDEND] = _encode(added, role_dtype(signature, Role.ADDEND))
    return _complete(problem, tensors, device, draws, has_exact_sums=False)


def _times(signature: Signature) -> int:
    """Gates and ups that a gradient reads pass their limit here and there."""
    return 5 if signature.is_gradient else 1


FEW = 4
"""Elements of a row of A that are not zero in random arguments."""


def _few_of_each_row(encoded: torch.Tensor, draws: Draws) -> torch.Tensor:
    codes = encoded.view(torch.uint8 if encoded.element_size() == 1 else torch.int16)
    places = draws.integers(0, codes.shape[-1], (*codes.shape[:-1], FEW))
    few = torch.zeros_like(codes).scatter_(-1, places, codes.gather(-1, places))
    return few.view(encoded.dtype)


def poisoned(shape: tuple[int, ...], dtype: DType, device: str = "cuda") -> torch.Tensor:
    """An output in which every byte is 0xFF: NaN, or -1."""
    out = torch.empty(shape, dtype=torch_dtype(dtype), device=device)
    out.view(torch.uint8).fill_(0xFF)
    return out


def _encode(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    return encode_fp4(values) if dtype is DType.FP4_E2M1 else values.to(torch_dtype(dtype))


def _exact_scales(problem: Problem, device: str, draws: Draws) -> dict[Role, torch.Tensor]:
    scales = problem.signature.scales
    if scales is None:
        return {}
    if scales is ScaleRecipe.FP32_TENSOR:
        values = {Role.SCALE_A: 4.0, Role.SCALE_B: 0.125}
        return {role: torch.tensor([value], device=device) for role, value in values.items()}

    def exponents(rows: int, columns: int, most: int) -> torch.Tensor:
        return draws.integers(-most, most + 1, (rows, columns))

    if scales is ScaleRecipe.FP32_ROW:
        return {
            role: torch.exp2(draws.integers(-1, 2, role_shape(problem, role)).float())
            for role in (Role.SCALE_A, Role.SCALE_B)
        }
    assert scales.block is not None
    of_a, of_b = exponents(problem.m, 1, 1), exponents(problem.n, 1, 1)
    of_k = exponents(1, -(-problem.k // scales.block), 2)
    powers = {Role.SCALE_A: of_a + of_k, Role.SCALE_B: of_b - of_k}
    return {
        role: swizzle(_encode_scale(torch.exp2(power.float()), scales.dtype))
        for role, power in powers.items()
    }


def _encode_scale(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    return encode_e8m0(values) if dtype is DType.FP8_E8M0 else values.to(torch_dtype(dtype))


def _complete(
    problem: Problem,
    tensors: dict[Role, torch.Tensor],
    device: str,
    draws: Draws,
    *,
    has_exact_sums: bool,
) -> Arguments:
    """Lay A and B out as the signature says, and add the ends of groups and the result."""
    layout = problem.signature.layout
    a, b = tensors[Role.A], tensors[Role.B]
    tensors[Role.A] = a if layout.a_row_major else a.mT.contiguous().mT
    tensors[Role.B] = b.mT.contiguous() if layout.b_row_major else b.mT
    if problem.signature.op.has_groups:
        is_along_k = problem.signature.op is Op.K_GROUPED_MM
        shared = problem.k if is_along_k else problem.m
        tensors[Role.OFFSETS] = group_ends(shared, problem.groups, draws)
    if Role.ROWS in extra_roles(problem.signature):
        tensors[Role.ROWS] = named_rows(problem, draws)
    if Role.SUMS in extra_roles(problem.signature):
        tensors[Role.SUMS] = torch.zeros(role_shape(problem, Role.SUMS), device=device)
    tensors[Role.OUT] = poisoned(role_shape(problem, Role.OUT), problem.signature.out, device)
    return Arguments(problem=problem, tensors=tensors, has_exact_sums=has_exact_sums)


def named_rows(problem: Problem, draws: Draws) -> torch.Tensor:
    """Any rows of B, some of them several times, and some that are just outside of it.

    Of groups, any rows of A.
    """
    if problem.signature.op.has_groups:
        return draws.integers(0, problem.m, (problem.m,)).to(torch.int32)
    count = role_shape(problem, Role.B)[0]
    drawn = draws.integers(-2, count + 2, role_shape(problem, Role.ROWS))
    return drawn.to(torch.int32)


def group_ends(shared: int, groups: int, draws: Draws) -> torch.Tensor:
    """Where groups of any sizes end, the last at ``shared``; of three, the second is empty."""
    ends = draws.integers(0, shared + 1, (groups,)).sort().values
    ends[-1] = shared
    if groups > 2:
        ends[1] = ends[0]
    return ends.to(torch.int32)
