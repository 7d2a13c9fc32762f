"""Programs for `test_every_command.py`, run by ``explain`` and by ``record --fake``.

``explained_rows.py ARCH KEYS`` reports what bundles offer for tensors of each problem on that
architecture's usual GPU, as Inductor's hook does; ``explained_rows.py calls KEYS`` calls ATen for
each. KEYS is a file of problems, a line each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from repository import TESTS

sys.path.insert(0, str(TESTS / "gpu"))

from gemm_arguments import exact_arguments

from nvgemm_runtime.gemm.aten import AtenGemm
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.operands import Operand, torch_dtype
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape, roles


def aten_name(served: Signature) -> str:
    if served.scales is not None:
        return "_scaled_grouped_mm" if served.op.has_groups else "_scaled_mm"
    if served.op.has_groups:
        return "_grouped_mm"
    if served.epilogue is not None and served.epilogue.addend is not None:
        return "addmm" if served.op is Op.MM else "baddbmm"
    is_int_mm = served.a.is_integer and served.op is Op.MM
    return "_int_mm" if is_int_mm else served.op.value


def is_called_by_aten(served: Signature) -> bool:
    """Whether torch has a call, of `call_aten`, that computes such a thing."""
    if served.epilogue is not None and served.epilogue.activation is not None:
        return False
    if served.scales is not None:
        is_bf16 = not served.op.has_groups or served.out is DType.BF16
        return not served.scales.is_swizzled and served.a is DType.FP8_E4M3 and is_bf16
    if served.a.is_integer:
        return served.op is Op.MM and (served.a, served.out) == (DType.INT8, DType.INT32)
    if served.op.has_groups:
        return (served.a, served.out) == (DType.BF16, DType.BF16)
    return served.a.bits == 16 and served.out is served.a


def call_aten(problem: Problem) -> None:
    """Call torch for tensors of a problem."""
    served = problem.signature
    tensors = {}
    for role in roles(served):
        shape, dtype = role_shape(problem, role), torch_dtype(role_dtype(served, role))
        is_transposed = (role is Role.A and not served.layout.a_row_major) or (
            role is Role.B and not served.layout.b_row_major
        )
        if is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        tensor = torch.empty(shape, dtype=dtype, device="cuda")
        tensors[role] = tensor.mT if is_transposed else tensor
    a, b = tensors[Role.A], tensors[Role.B]
    if served.scales is not None and served.op.has_groups:
        torch._scaled_grouped_mm(
            a,
            b,
            tensors[Role.SCALE_A],
            tensors[Role.SCALE_B],
            offs=tensors[Role.OFFSETS],
            out_dtype=torch_dtype(served.out),
        )
    elif served.scales is not None:
        torch._scaled_mm(
            a,
            b,
            tensors[Role.SCALE_A],
            tensors[Role.SCALE_B],
            bias=tensors.get(Role.ADDEND),
            out_dtype=torch_dtype(served.out),
        )
    elif served.op.has_groups:
        torch._grouped_mm(a, b, offs=tensors[Role.OFFSETS])
    elif served.epilogue is not None:
        getattr(torch, aten_name(served))(tensors[Role.ADDEND], a, b)
    else:
        getattr(torch, aten_name(served))(a, b)


def report_offers(arch: str, problems: list[Problem]) -> None:
    """What `hook` does with a GEMM, without the choices."""
    from nvgemm_aot.targets import build_target
    from nvgemm_aot.workload.coverage import gpu_facts
    from nvgemm_runtime.inductor import offers, report
    from nvgemm_runtime.installed.registry import INSTALLATION
    from nvgemm_runtime.matching.matches import BundleView

    views = [
        BundleView(name=one.name, header=one.bundle.header)
        for one in INSTALLATION.shipped_bundles()
        if one.bundle is not None
    ]
    facts = gpu_facts(build_target(arch), views)
    offers.device_facts = lambda *_: facts
    for problem in problems:
        gemm = _gemm(problem)
        found = offers.find_offers(gemm, 4, may_split=True)
        offered = {str(place): one.kernel.operator for place, one in enumerate(found.kernels)}
        if found.is_split:
            offered = {"bundled": "split"}
        report.met(problem.key, basis=found.basis, reasons=found.reasons, offered=offered)


def _gemm(problem: Problem) -> AtenGemm:
    given = exact_arguments(problem, "meta")
    tensors = {role: _operand(tensor) for role, tensor in given.tensors.items()}
    return AtenGemm(
        op=aten_name(problem.signature),
        a=tensors[Role.A],
        b=tensors[Role.B],
        out=tensors[Role.OUT],
        extras=ExtraOperands.for_signature(problem.signature, tensors),
    )


def _operand(tensor: torch.Tensor) -> Any:
    return Operand(
        dtype=tensor.dtype,
        device=tensor.device,
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        address=0,
    )


if __name__ == "__main__":
    asked = [Problem.parse(key) for key in Path(sys.argv[2]).read_text().split()]
    if sys.argv[1] == "calls":
        for one in asked:
            call_aten(one)
    else:
        report_offers(sys.argv[1], asked)
