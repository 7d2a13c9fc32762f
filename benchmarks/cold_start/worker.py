"""`cold_start`'s process, which compiles the model and times it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cold_start.modes import BACKENDS
from benchmarks.shared.compiling import (
    answering,
    check_results,
    count_gemms,
    generated_gemms,
    plugin_stats,
    versions,
)
from benchmarks.shared.stacks import TimeWithin

PACKAGES = ("nvgemm_runtime", "nvgemm_aot", "nvgemm_aot_autoload", "tvm_ffi")
"""Packages that a process imports because nvgemm-aot is installed."""

WINDOWS = 30
WINDOW_CALLS = 10


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def times_us(call: Callable[[], object], device: str) -> list[float]:
    """Returns microseconds a call, window by window."""
    for _ in range(2 * WINDOW_CALLS):
        call()
    times = []
    for _ in range(WINDOWS):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(WINDOW_CALLS):
            call()
        synchronize(device)
        times.append((time.perf_counter() - begin) / WINDOW_CALLS * 1e6)
    return times


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Returns a call's CUDA graph replay; the call must have run before."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def work(mode: str, device: str, directory: Path, batches: tuple[int, ...]) -> None:
    """Measures one mode in this process."""
    send = answering()
    begin = time.perf_counter()
    import torch

    import_s = time.perf_counter() - begin
    from benchmarks.cold_start.model import build_model

    model, inputs = build_model(device, batches)
    synchronize(device)
    backends = BACKENDS[mode]
    options: dict[str, Any] = {}
    if backends is not None:
        options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": backends}

    def all_of(called: Callable[..., tuple[Any, ...]]) -> list[Any]:
        return [result for prefill, decode in inputs for result in called(prefill, decode)]

    with torch.no_grad():
        begin = time.perf_counter()
        with TimeWithin(PACKAGES) as within:
            compiled = torch.compile(model, dynamic=False, options=options)
            results = all_of(compiled)
            synchronize(device)
        first_s = time.perf_counter() - begin
        call_us = times_us(lambda: all_of(compiled), device)
        graph_us = []
        if device == "cuda":
            graph_us = times_us(replayed(lambda: all_of(compiled)), device)
        eager = all_of(model)
        inputs = [(None if one is None else one.float(), other.float()) for one, other in inputs]
        exact = all_of(model.float())
    calls = generated_gemms(directory)
    send(
        {
            "mode": mode,
            "import_s": import_s,
            "first_result_s": first_s,
            "within_s": within.seconds,
            "call_us": call_us,
            "graph_us": graph_us,
            "gemms": calls,
            "count": count_gemms(calls),
            "error": check_results(results, eager, exact),
            "stats": plugin_stats(),
            "versions": versions(),
        }
    )
