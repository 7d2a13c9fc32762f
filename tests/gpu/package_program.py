"""Makes a package of AOTInductor in which bundled kernels won, or loads one and runs it.

    python package_program.py make MODEL.pt2
    python package_program.py run MODEL.pt2

Prints one line of JSON: for each m whether the results were exact, and how often ATen computed a
GEMM. Making prints how many calls of bundled kernels the generated code has.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from user_program import slow_down_aten

HIDDEN, OUT, MS = 4096, 6144, (64, 37, 1000)


class Projections(nn.Module):
    """A Linear without a bias, and scores of 32 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(sparse(OUT, HIDDEN), requires_grad=False)

    def forward(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x @ self.weight.T), torch.bmm(q, q.mT)


def sparse(*shape: int) -> torch.Tensor:
    """Zeros and few ones, so that every sum is exact in bf16."""
    torch.manual_seed(sum(shape))
    return (torch.rand(*shape, device="cuda") < 0.05).to(torch.bfloat16)


def operands(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse(m, HIDDEN), sparse(32, 512, 128)


def make(path: Path) -> dict[str, Any]:
    slow_down_aten("cuda")
    m = torch.export.Dim("m", min=2, max=4096)
    program = torch.export.export(
        Projections(), operands(MS[0]), dynamic_shapes={"x": {0: m}, "q": None}
    )
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=settings
    )
    return {"made": path.stat().st_size}


def run(path: Path) -> dict[str, Any]:
    # Whatever the package, torch 2.11 crashes on an H200 unless CUDA is initialised and TVM-FFI was
    # imported. nvgemm-aot has no part in it: with NVGEMM_AOT=off all else stays out.
    importlib.import_module("tvm_ffi")
    reference = Projections()
    model = torch._inductor.aoti_load_package(str(path))
    exact, aten = [], 0
    for m in MS:
        x, q = operands(m)
        model(x, q)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            got = model(x, q)
            torch.cuda.synchronize()
        expected = torch.relu(x.double() @ reference.weight.double().T), q.double() @ q.mT.double()
        exact.append(all(torch.equal(g.double(), e) for g, e in zip(got, expected)))
        aten += sum(event.count for event in profile.key_averages() if _is_of_cublas(event.key))
    return {"exact": exact, "aten_gemms": aten}


def _is_of_cublas(kernel: str) -> bool:
    """Whether a kernel is a GEMM of cuBLAS, by its name."""
    return any(part in kernel for part in ("nvjet", "xmma", "cublas"))


if __name__ == "__main__":
    action, path = sys.argv[1:]
    sys.stdout.write(json.dumps({"make": make, "run": run}[action](Path(path))) + "\n")
