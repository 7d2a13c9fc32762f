"""Plain torch.compile with measured kernels, for every row that torch has an operator for.

The kernels and the GPU are real; the times are made up, so that a kernel wins wherever one is
declared. One graph of a dynamic m runs it there, and ATen's operator at another m. Results are
exact. Needs the wheels of every_kind.yaml, hopper_rows.yaml and grouped.yaml; what they have
decides what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gemm_arguments import Arguments, exact_arguments
from gemm_reference import assert_exact
from installed import installed_kernels
from made_up_times import default_mode, measured_index, runs_aten

from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.matching.index import Index

Call = Callable[..., torch.Tensor]
"""Of A, B and the other operands of a signature."""


_INTEGERS = Op.MM, DType.INT8, DType.INT32


def operator_of(signature: Signature) -> tuple[str, Call] | None:
    """Name and call of ATen's operator that default mode replaces; None where there is none."""
    epilogue = signature.epilogue
    if signature.is_gated or (epilogue is not None and epilogue.activation is not None):
        return None
    if signature.op is Op.GROUPED_MM:
        # Of fp16, torch's operator runs, but torch 2.11 cannot compile it.
        is_served = epilogue is None and signature.scales is None
        is_served = is_served and signature.a is signature.out is DType.BF16
        return ("_grouped_mm", _grouped) if is_served else None
    if signature.op not in (Op.MM, Op.BMM):
        return None
    if signature.scales is not None:
        is_served = _is_scaled(signature)
        return ("_scaled_mm", _scaled(torch_dtype(signature.out))) if is_served else None
    if signature.a.is_integer:
        is_served = (signature.op, signature.a, signature.out) == _INTEGERS
        return ("_int_mm", torch._int_mm) if is_served else None
    if signature.a is not signature.out or signature.a.is_fp8:
        return None
    if epilogue is None:
        return signature.op.value, getattr(torch, signature.op.value)
    name = "addmm" if signature.op is Op.MM else "baddbmm"
    total = getattr(torch, name)
    return name, lambda a, b, addend: total(addend, a, b)


def _is_scaled(signature: Signature) -> bool:
    """Whether it is `torch._scaled_mm`'s, which refuses e5m2 by e5m2, and a bias into fp32."""
    assert signature.scales is not None
    if signature.op is not Op.MM or signature.scales.block is not None:
        return False
    if signature.a is signature.b is DType.FP8_E5M2:
        return False
    if signature.epilogue is BIAS:
        return signature.out is not DType.FP32
    return signature.epilogue is None


def _grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=offsets)


def _scaled(dtype: torch.dtype) -> Call:
    def call(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, *bias: torch.Tensor
    ) -> torch.Tensor:
        return torch._scaled_mm(
            a, b, scale_a, scale_b, bias=bias[0] if bias else None, out_dtype=dtype,
            use_fast_accum=True,
        )  # fmt: skip

    return call


def operands_of(arguments: Arguments) -> tuple[torch.Tensor, ...]:
    return arguments.a, arguments.b, *arguments.others


def make_rows_dynamic(arguments: Arguments) -> None:
    """Of all operands that have the rows of the result."""
    m = arguments.problem.m
    torch._dynamo.mark_dynamic(arguments.a, arguments.a.dim() - 2)
    for role in (Role.SCALE_A, Role.ADDEND):
        tensor = arguments.tensors.get(role)
        if tensor is not None and tensor.dim() > 1 and tensor.shape[-2] == m:
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2)


SIGNATURES = {
    kernel.signature.key: kernel.signature
    for _, kernel in installed_kernels()
    if kernel.is_deterministic and operator_of(kernel.signature) is not None
}
"""Of the installed kernels that default mode uses: those whose results do not depend on timing."""


@pytest.fixture(scope="module")
def index() -> Index:
    return measured_index(lambda problem: True)


@pytest.fixture(autouse=True)
def asked_for(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with default_mode(index, monkeypatch):
        yield


def declared_rows(index: Index, signature: Signature) -> list[Problem]:
    """The problems of one n, k and batch with the most m at which a kernel may be used."""
    rows: dict[Any, set[Problem]] = {}
    for view in index.bundles:
        for ranking in view.header.rankings:
            problem = ranking.problem
            kernels = [view.header.kernels[one.kernel] for one in ranking.kernels]
            is_used = any(kernel.is_deterministic for kernel in kernels)
            # torch.compile makes no size dynamic that is 0 or 1.
            if problem.signature == signature and problem.m > 1 and is_used:
                place = problem.n, problem.k, problem.batch, problem.groups
                rows.setdefault(place, set()).add(problem)
    return sorted(max(rows.values(), key=len, default=[]))


@pytest.mark.parametrize("key", sorted(SIGNATURES) or [pytest.param("", marks=pytest.mark.skip)])
def test_one_graph_runs_the_kernel_at_measured_sizes_and_aten_elsewhere(
    key: str, index: Index
) -> None:
    found = operator_of(SIGNATURES[key])
    assert found is not None
    name, call = found
    declared = declared_rows(index, SIGNATURES[key])
    assert declared, "the wheels declare no m over 1 for a kernel that default mode uses"
    beyond = exact_arguments(replace(declared[-1], m=2 * declared[-1].m))
    make_rows_dynamic(beyond)
    compiled = torch.compile(call, fullgraph=True)
    with torch.no_grad():
        assert_exact(compiled(*operands_of(beyond)), beyond)
        assert runs_aten(name, compiled, *operands_of(beyond))
        for problem in declared:
            arguments = exact_arguments(problem)
            assert_exact(compiled(*operands_of(arguments)), arguments)
            assert not runs_aten(name, compiled, *operands_of(arguments)), problem.key
