"""What a GEMM's result must be, from the tensors it is given, and how far off it may be.

``out = round(f(scale_a * scale_b * (A @ B) + addend))``, in fp64, and rounded once. The formula is
written down here once more; how far off a sum may be is derived in
`nvgemm_aot.tuning.correctness.judgement`, for `nvgemm-aot tune` as for these tests.
"""

from __future__ import annotations

import torch
from gemm_arguments import Arguments
from microscaling import decode, dequantise, unswizzle

from nvgemm_aot.tuning.correctness.gate_results import row_sums
from nvgemm_aot.tuning.correctness.judgement import (
    CURVE_ERROR,
    activation_error,
    expect_between,
    find_fault,
    sum_error,
)
from nvgemm_runtime.gemm.epilogues import ADD, Activation, Epilogue, Gate, GateForm, WeightOrder
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_shape

CURVES = (Activation.GELU_TANH, Activation.SILU)
"""Activations whose values no number type has: only `assert_close` can judge results of theirs."""


def has_exact_results(signature: Signature) -> bool:
    """Whether `exact_arguments` have a result without rounding."""
    return signature.epilogue is None or signature.epilogue.activation not in CURVES


def reference(arguments: Arguments) -> torch.Tensor:
    """The result in fp64, before it is rounded to its type."""
    value = _before_activation(arguments)
    epilogue = arguments.problem.signature.epilogue
    if epilogue is not None and epilogue.gate is not None:
        return _stored(epilogue, value, arguments)
    return value if epilogue is None else _ACTIVATIONS[epilogue.activation](value)


def _stored(epilogue: Epilogue, value: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """What a gated epilogue stores; gradients are autograd's."""
    assert epilogue.gate is not None
    join = _GATES[epilogue.gate]
    if arguments.problem.signature.is_gradient:
        kept = arguments.tensors[Role.ADDEND].double().requires_grad_()
        with torch.enable_grad():
            given = join(*_pair(epilogue, kept))
        return torch.autograd.grad(given, kept, value)[0]
    if epilogue.form is GateForm.UPS:
        gates = arguments.tensors[Role.ADDEND].double()
        return torch.cat((value, join(gates, value)), -1)
    joined = join(*_pair(epilogue, value))
    return joined if epilogue.form is GateForm.JOINED else torch.cat((value, joined), -1)


def reference_sums(arguments: Arguments) -> torch.Tensor:
    """Of each row, the sum of what a gate gave times its gradient, in fp64."""
    epilogue = arguments.problem.signature.epilogue
    assert epilogue is not None
    assert epilogue.gate is not None
    kept = arguments.tensors[Role.ADDEND].double()
    return (_GATES[epilogue.gate](*_pair(epilogue, kept)) * _product(arguments)).sum(1)


def _pair(epilogue: Epilogue, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if epilogue.order is WeightOrder.HALVES:
        gate, up = columns.chunk(2, -1)
        return gate, up
    return columns[..., ::2], columns[..., 1::2]


def _before_activation(arguments: Arguments, *, of_magnitudes: bool = False) -> torch.Tensor:
    result = _product(arguments, of_magnitudes=of_magnitudes)
    addend = arguments.tensors.get(Role.ADDEND)
    signature = arguments.problem.signature
    if addend is None or (signature.epilogue is not None and signature.epilogue.reads_addend):
        return result
    if signature.op.groups_rows and signature.epilogue is not ADD:
        addend = _row_of_each(arguments.tensors[Role.OFFSETS], addend, len(result))
    return result + (addend.double().abs() if of_magnitudes else addend.double())


def _row_of_each(ends: torch.Tensor, rows: torch.Tensor, m: int) -> torch.Tensor:
    """The row of its group for each of m rows; of rows in no group, that of the last group."""
    groups = torch.searchsorted(ends.long(), torch.arange(m, device=ends.device), right=True)
    return rows[groups.clamp(max=len(ends) - 1)]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


_ACTIVATIONS = {
    None: lambda x: x,
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU: lambda x: x / (1 + torch.exp(-x)),
}


def cut_off(values: torch.Tensor, limit: float, *, below: bool) -> torch.Tensor:
    """Values cut off above a limit, and optionally below its negative.

    Those at a limit keep their gradient, as in kernels; ``clamp`` of torch gives 0 from 2.14 on.
    """
    cut = values.masked_fill(values > limit, limit)
    return cut.masked_fill(values < -limit, -limit) if below else cut


def _swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = cut_off(gate, 7.0, below=False), cut_off(up, 7.0, below=True)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


_GATES = {
    Gate.SWIGLU: lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
    Gate.GEGLU: lambda gate, up: _gelu_tanh(gate) * up,
    Gate.SWIGLU_OAI: _swiglu_oai,
}


def _product(arguments: Arguments, *, of_magnitudes: bool = False) -> torch.Tensor:
    problem, tensors = arguments.problem, arguments.tensors
    a, b = operand_values(problem, tensors, Role.A), operand_values(problem, tensors, Role.B)
    if of_magnitudes:
        a, b = a.abs(), b.abs()
    if problem.signature.op is Op.GATHERED_MM:
        named = tensors[Role.ROWS].long()
        inside = (named >= 0) & (named < b.shape[1])
        taken = b.mT[named.clamp(0, b.shape[1] - 1)] * inside[..., None]
        return (a[..., None] * taken).sum(1)
    if not problem.signature.op.has_groups:
        return a @ b.mT
    if problem.signature.op is Op.GATHERED_GROUPED_MM:
        a = a[tensors[Role.ROWS].long().clamp(0, len(a) - 1)]
    begin = 0
    if problem.signature.op is Op.K_GROUPED_MM:
        shape = role_shape(problem, Role.OUT)
        result = torch.empty(shape, dtype=torch.float64, device=a.device)
        for group, end in enumerate(tensors[Role.OFFSETS].tolist()):
            result[group] = a[:, begin:end] @ b[:, begin:end].mT
            begin = end
        return result
    result = torch.empty(problem.m, problem.n, dtype=torch.float64, device=a.device)
    for group, end in enumerate(tensors[Role.OFFSETS].tolist()):
        result[begin:end] = a[begin:end] @ b[group].mT
        begin = end
    return result


def operand_values(problem: Problem, tensors: dict[Role, torch.Tensor], role: Role) -> torch.Tensor:
    """A or B with its scales applied, in fp64: [..., m, k] or [..., n, k]."""
    scales = problem.signature.scales
    tensor, scale_role, rows = {
        Role.A: (tensors[Role.A], Role.SCALE_A, problem.m),
        Role.B: (tensors[Role.B].mT, Role.SCALE_B, problem.n),
    }[role]
    if scales is not None and scales.block is not None:
        blocks = -(-problem.k // scales.block)
        return dequantise(tensor, unswizzle(tensors[scale_role], rows, blocks), scales.block)
    values = decode(tensor) if problem.signature.a.is_fp8 else tensor.double()
    if scales is None:
        return values
    scale = tensors[scale_role].double()
    if problem.signature.op.has_groups:  # one for each row of A, and of each B's transposed matrix
        return values * scale[..., None]
    return values * (scale if role is Role.A else scale.mT if scale.dim() == 2 else scale)


def assert_exact(out: torch.Tensor, arguments: Arguments) -> None:
    """Equal to the reference; the few sums beyond the exact values round as torch rounds."""
    wanted = reference(arguments).to(out.dtype).double()
    assert torch.equal(out.double(), wanted), f"{(out.double() != wanted).sum()} elements differ"


def assert_close(out: torch.Tensor, arguments: Arguments) -> None:
    """Each element within what the accumulator may be off, and one rounding."""
    signature = arguments.problem.signature
    error = torch.zeros((), dtype=torch.float64, device=out.device)
    if not arguments.has_exact_sums:
        magnitude = _before_activation(arguments, of_magnitudes=True)
        values = operand_values(arguments.problem, arguments.tensors, Role.A)
        terms = int((values != 0).sum(-1).max())
        error = sum_error(magnitude, signature, terms=terms)
    stored = error
    if signature.epilogue is not None:
        kept = arguments.tensors.get(Role.ADDEND)  # read by gradients and ups alone
        product = _before_activation(arguments)
        stored = activation_error(error, product, signature, kept)
    wanted = expect_between(reference(arguments), stored, torch_dtype(signature.out))
    fault = find_fault(out, wanted)
    assert fault is None, fault
    if Role.SUMS in arguments.tensors:
        assert kept is not None
        _, off = row_sums(error, product, signature, kept, curve=CURVE_ERROR)
        wanted = expect_between(reference_sums(arguments), off, torch.float32)
        fault = find_fault(arguments.tensors[Role.SUMS].sum(1), wanted)
        assert fault is None, f"sums of rows: {fault}"
