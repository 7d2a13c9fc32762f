"""Choices are compared by what they take on the GPU: a launch that is slow on the host is no loss.

Needs kernels for bf16 in the layout tn: manifests/quickstart.yaml, built for the GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import installed_kernels
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from user_program import ATEN_GEMMS

HOST_DELAY_MS = 2.0
"""What launches of ATen are delayed by; the kernels here take a hundredth of it."""


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that keeps the host busy first, and the GPU not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + HOST_DELAY_MS / 1e3
        while time.perf_counter() < end:
            pass
        return function(*args, **kwargs)

    return call


def test_a_slow_launch_is_not_part_of_the_time() -> None:
    from nvgemm_runtime.inductor.autotuning.gpu_times import measure_ms

    a = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = a @ b
    assert 0.0 < measure_ms(delayed(lambda: torch.mm(a, b, out=out))) < HOST_DELAY_MS / 4


def times_of_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backends: str, m: int, n: int
) -> dict[str, float]:
    """Compile a GEMM with a k of 4096; the times of its choices, by name, in milliseconds."""
    keys = {kernel.signature.key for _, kernel in installed_kernels()}
    if "mm/tn/bf16xbf16/fp32/bf16" not in keys:
        pytest.skip("no installed kernel for mm/tn in bf16; install the quickstart wheel")
    monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(tmp_path / "events"))
    x, weight = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    settings: dict[str, Any] = {"max_autotune_gemm_backends": backends, "compile_threads": 8}
    torch._dynamo.reset()
    with fresh_cache(), config.patch(settings):
        compiled = torch.compile(lambda x: x @ weight.T, options={"max_autotune_gemm": True})
        torch.testing.assert_close(compiled(x), x @ weight.T, rtol=2e-2, atol=1.0)
    events = list(map(json.loads, (tmp_path / "events").open()))
    (times,) = (event["times_ms"] for event in events if event["event"] == "timed")
    return dict(times)


@pytest.fixture
def slow_launches_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.kernel import bmm, mm, mm_grouped  # noqa: F401  it names ATen's functions
    from torch._inductor.select_algorithm import extern_kernels

    for name in ATEN_GEMMS:
        monkeypatch.setattr(extern_kernels, name, delayed(getattr(extern_kernels, name)))


@pytest.mark.usefixtures("slow_launches_of_aten")
@pytest.mark.parametrize("backends", ["ATEN", "ATEN,TRITON"])
def test_every_choice_of_a_gemm_is_timed_without_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backends: str
) -> None:
    """So it is where ATen alone competes, and where the program records CUDA graphs."""
    if "TRITON" in backends:
        monkeypatch.setenv("NVGEMM_AOT_CUDA_GRAPHS", "1")
    times = times_of_choices(tmp_path, monkeypatch, backends, 16, 4096)
    kinds = {name.partition("_")[0] for name in times}
    assert kinds >= ({"mm", "nvgemm", "triton"} if "TRITON" in backends else {"mm", "nvgemm"})
    slowest = max(times["mm"], *(one for name, one in times.items() if name.startswith("nvgemm")))
    assert slowest < HOST_DELAY_MS / 4


@pytest.mark.usefixtures("slow_launches_of_aten")
def test_beside_triton_a_slow_launch_counts_unless_graphs_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's own times decide among its choices; a kernel's stands between theirs."""
    times = times_of_choices(tmp_path, monkeypatch, "ATEN,TRITON", 16, 4096)
    assert times["mm"] > HOST_DELAY_MS / 2
    triton = min(one for name, one in times.items() if name.startswith("triton"))
    kernel = min(one for name, one in times.items() if name.startswith("nvgemm"))
    assert max(triton, kernel) < HOST_DELAY_MS / 4


def test_a_long_kernel_takes_turns_with_aten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of 481 GFLOP, for which a Hopper GPU needs over four times `LONG_MS`."""
    from nvgemm_runtime.inductor.autotuning import gpu_times

    compared: list[float] = []
    in_turns = gpu_times.measure_in_turns_ms

    def measure(*calls: Callable[[], object], **limits_ms: float) -> tuple[float, float]:
        own_ms, aten_ms = in_turns(*calls, **limits_ms)
        compared.append(own_ms / aten_ms)
        return own_ms, aten_ms

    monkeypatch.setattr(gpu_times, "measure_in_turns_ms", measure)
    times = times_of_choices(tmp_path, monkeypatch, "ATEN", 2048, 28672)
    told = [one / times["mm"] for name, one in times.items() if name.startswith("nvgemm")]
    assert told
    assert sorted(told) == pytest.approx(sorted(compared), rel=1e-3)
