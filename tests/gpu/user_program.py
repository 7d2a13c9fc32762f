"""A user's program: it imports torch, compiles a model and trains it. Tests run it as a process.

It prints one line of JSON: how far results are from eager fp32, compared with eager in the model's
own type; what torch's caches said; how often ATen computed a GEMM; whether the plug-in was there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

ERROR_FACTOR = 1.5
"""How much further from fp32 than eager a compiled result may be: another order of summation."""

STEPS = 4
"""Under CUDA graphs: a warm-up, a recording, and replays on new data."""


class GatedMlp(nn.Module):
    """Two Linears, as decoder layers have them."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


ATEN_GEMMS = (
    "mm", "bmm", "mm_dtype", "bmm_dtype", "addmm", "bias_addmm", "baddbmm", "_int_mm", "_scaled_mm",
    "_grouped_mm", "_scaled_grouped_mm",
)  # fmt: skip
"""Inductor's names of ATen's functions for them."""


def slow_down_aten(device: str) -> None:
    """Make ATen's GEMMs take milliseconds where Inductor calls them, so that any other wins."""
    from torch._inductor.kernel import bmm, mm, mm_grouped  # noqa: F401  they name the functions
    from torch._inductor.select_algorithm import extern_kernels

    def slow(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if device == "cuda":
                torch.cuda._sleep(4_000_000)  # cycles: 2 ms
            else:
                time.sleep(0.1)
            return function(*args, **kwargs)

        return call

    for name in ATEN_GEMMS:
        setattr(extern_kernels, name, slow(getattr(extern_kernels, name)))


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.detach().float() - exact).norm() / exact.norm())


def step(model: Any, module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Result, and gradients of the input and of all weights."""
    x = x.detach().requires_grad_()
    result = model(x)
    gradients = torch.autograd.grad(result, [x, *module.parameters()], grad)
    return [result.detach().clone(), *(one.clone() for one in gradients)]


def steps(args: argparse.Namespace, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    device = args.device
    torch.manual_seed(0)
    hidden, intermediate = args.hidden, 2 * args.hidden
    with torch.device(device):
        exact = GatedMlp(hidden, intermediate)
        model = GatedMlp(hidden, intermediate).to(dtype)
    for copied, original in zip(exact.parameters(), model.parameters()):
        copied.data.copy_(original.data)
    compiled = torch.compile(model, mode=args.mode)
    for number in range(STEPS):
        x, grad = (torch.randn(args.tokens, hidden, device=device).to(dtype) for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            results = step(compiled, model, x, grad)
        aten = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::bmm"))
        eager = step(model, model, x, grad)
        right = step(exact, exact, x.float(), grad.float())
        yield {
            "errors": [relative_error(*pair) for pair in zip(results, right)],
            "eager_errors": [relative_error(*pair) for pair in zip(eager, right)],
            "aten_gemms": None if number == 0 else aten,  # at first while choosing
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--mode", default="max-autotune")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--slow-aten", action="store_true")
    args = parser.parse_args()
    if args.slow_aten:
        slow_down_aten(args.device)
    runs = {name: list(steps(args, getattr(torch, name))) for name in args.dtypes.split(",")}
    counters = torch._dynamo.utils.counters
    report = {
        "runs": runs,
        "hits": counters["inductor"]["fxgraph_cache_hit"]
        + counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"]
        + counters["aot_autograd"]["autograd_cache_miss"],
        "hooked": "nvgemm_runtime.inductor.hook" in sys.modules,
    }
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
