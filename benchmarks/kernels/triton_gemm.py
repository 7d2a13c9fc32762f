"""Inductor's Triton GEMM, autotuned for one size, as a launch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.compiling import count_gemms, gemm_calls
from benchmarks.shared.measuring import Launch, Operands
from benchmarks.shared.turns import compiling

OPTIONS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",  # the plug-in joins only where ATEN is named
    "fx_graph_cache": False,
    "autotune_num_choices_displayed": 0,
}
"""torch.compile options: Triton's templates alone, compiled in this process."""

_WRONG = 1e-2
"""Relative error from which a 16-bit product is wrong, in the norm."""


@dataclass(frozen=True, kw_only=True)
class TritonGemm:
    """Autotuning result over Triton's templates.

    Attributes:
        launch: Starts the best kernel; None if there is none.
        seconds: Time to compile and autotune.
        why_none: Reason why there is no kernel.
    """

    launch: Launch | None
    seconds: float
    why_none: str | None


def compile_triton(operands: Operands) -> TritonGemm:
    """Makes Inductor autotune a GEMM over its Triton templates."""
    import torch
    from torch._inductor.utils import run_and_get_code

    def multiply(a: Any, b: Any) -> Any:
        return torch.mm(a, b)

    a, b, out = operands
    begin = time.perf_counter()
    try:
        compiled = torch.compile(multiply, dynamic=False, options=OPTIONS)
        with compiling():
            result, codes = run_and_get_code(compiled, a, b)
        torch.cuda.synchronize()
    except Exception as error:  # any: Inductor raises several types if no template fits
        said = next(iter(str(error).strip().splitlines()), "")
        seconds = time.perf_counter() - begin
        return TritonGemm(launch=None, seconds=seconds, why_none=f"{type(error).__name__}: {said}")
    seconds = time.perf_counter() - begin
    why = why_not_triton("\n".join(codes))
    if why is None:
        expected = torch.mm(a, b, out=out).float()
        wrong_by = float((result.float() - expected).norm() / expected.norm())
        if not wrong_by < _WRONG:  # NaN is wrong too
            why = f"wrong by {wrong_by:.2e}"
    if why is not None:
        return TritonGemm(launch=None, seconds=seconds, why_none=why)
    results: dict[int, Any] = {}

    def launch(a: Any, b: Any, out: Any) -> None:
        results[out.data_ptr()] = compiled(a, b)  # own memory for each, as for other contenders

    return TritonGemm(launch=launch, seconds=seconds, why_none=None)


def why_not_triton(code: str) -> str | None:
    """Returns the reason why a generated module is not Triton's, or None."""
    calls = gemm_calls(code)
    counts = count_gemms(dict(calls))
    if counts["aten"] or counts["nvgemm"]:
        return f"Inductor calls {', '.join(calls)}"
    return None if "triton_" in code else "Inductor wrote no Triton kernel"


def triton_version() -> str:
    """Returns Triton's version."""
    import triton

    return str(triton.__version__)
