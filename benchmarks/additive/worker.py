"""Worker process that compiles models with bundles and without, and times both.

Questions and answers are JSON lines. ``{"compile": [MODEL, BATCH], "first": SIDE}`` is answered by
a report for each side, ``{"time": [MODEL, BATCH], "mode": MODE, "rounds": N, "window_ms": T}`` by
microseconds a call, and ``{"forget": true}`` frees compiled models. If a model fails, the answer is
``{"failure": TEXT}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import click

from benchmarks.additive.kernel_time import kernel_times_us
from benchmarks.additive.models import MODELS, build
from benchmarks.additive.table import SIDES
from benchmarks.shared.compiling import answering, check_results, count_gemms, gemm_calls
from benchmarks.shared.kernel_intervals import start_tracing
from nvgemm_runtime.settings import serves_default_mode

if TYPE_CHECKING:
    import torch

CALLS, GRAPHS, KERNELS = "calls", "graphs", "kernels"
"""Timing modes: calls from Python, CUDA graph replays, and kernels within replays."""

FAILURE = "failure"
"""Answer key with a failure's reason."""

CALLS_OF_GRAPH = 10
"""Calls in a graph, as a server's graph holds many layers. The smallest models take no longer than
the host takes to start a graph."""

PROFILES = 3
"""Profiles a side; kernel times vary little."""

Results = list["torch.Tensor"]
Ways = dict[str, Callable[[], object]]
"""A compiled model's calls, by mode."""


def modes_on(device: str) -> list[str]:
    """Returns the modes that a device supports."""
    return [CALLS, GRAPHS, KERNELS] if device == "cuda" else [CALLS]


def work(device: str, lock: Path) -> None:
    """Answers questions until the input ends."""
    send = answering()
    import torch
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 1_000  # one compilation per batch
    torch._dynamo.config.accumulated_recompile_limit = 1_000
    if device == "cuda":
        start_tracing()
    gpu = _Lock(lock)
    _benchmark_alone(gpu)
    compiled: dict[tuple[str, int], dict[str, Ways]] = {}
    for line in sys.stdin:
        try:
            send(_answer(json.loads(line), compiled, device, gpu))
        except (RuntimeError, click.ClickException) as error:  # torch's errors are RuntimeErrors
            send({FAILURE: f"{type(error).__name__}: {error}"})


def _answer(
    question: dict[str, Any],
    compiled: dict[tuple[str, int], dict[str, Ways]],
    device: str,
    gpu: _Lock,
) -> dict[str, Any]:
    if "compile" in question:
        name, batch = question["compile"]
        compiled[name, batch], reports = _compile(name, batch, device, question["first"], gpu)
        return reports
    if "time" in question:
        name, batch = question["time"]
        mode = question["mode"]
        way = CALLS if mode == CALLS else GRAPHS
        calls = {side: ways[way] for side, ways in compiled[name, batch].items()}
        if mode == KERNELS:
            times = kernel_times_us(calls, PROFILES)
        else:
            times = _times_us(calls, question["rounds"], question["window_ms"], device)
        at_once = CALLS_OF_GRAPH if way == GRAPHS else 1
        return {side: [one / at_once for one in found] for side, found in times.items()}
    import torch

    compiled.clear()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return {}


class _Lock:
    """Lock that keeps the GPU to one process; the holder may enter it again."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._depth = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _benchmark_alone(gpu: _Lock) -> None:
    """Makes Inductor hold the lock while it times kernels."""
    from torch._inductor.runtime import benchmarking

    kind: Any = type(benchmarking.benchmarker)
    stock = kind.benchmark_gpu

    def benchmark_gpu(*args: Any, **options: Any) -> Any:
        with gpu.held():
            return stock(*args, **options)

    kind.benchmark_gpu = benchmark_gpu
    with contextlib.suppress(ImportError):
        from nvgemm_runtime.inductor.autotuning import gpu_times

        for name in ("measure_ms", "measure_in_turns_ms"):
            setattr(gpu_times, name, gpu.held()(getattr(gpu_times, name)))


def _compile(
    name: str, batch: int, device: str, first: str, gpu: _Lock
) -> tuple[dict[str, Ways], dict[str, Any]]:
    """Compiles a model on both sides and returns calls and reports."""
    training = MODELS[name].training
    with gpu.held():
        module, inputs = build(name, device, batch=batch)
        eager = run(module, module, inputs, training)
        exact_module, exact_inputs = build(name, device, batch=batch, exact=True)
        exact = run(exact_module, exact_module, exact_inputs, training)
        del exact_module, exact_inputs
        _synchronize(device)
    compiled, reports = {}, {}
    for side in sorted(SIDES, key=lambda side: side != first):
        call, codes, cold_s = _compile_side(SIDES[side], module, inputs, training, device)
        with gpu.held():
            error = check_results(call(), eager, exact)
            compiled[side] = {CALLS: call}
            if device == "cuda":
                graph, in_graph = _capture(call)
                graph.replay()
                check_results(in_graph, eager, exact)
                compiled[side][GRAPHS] = graph.replay
            _synchronize(device)
        gemms: Counter[str] = sum(map(gemm_calls, codes), Counter())
        reports[side] = {
            "cold_s": cold_s,
            "gemms": dict(gemms),
            "count": count_gemms(dict(gemms)),
            "error": error,
        }
    return compiled, reports


def _compile_side(
    mode: str, module: torch.nn.Module, inputs: Results, training: bool, device: str
) -> tuple[Callable[[], Results], list[str], float]:
    """Compiles a model in one plug-in mode; returns its call, generated code and seconds."""
    import torch
    from torch._inductor.graph import GraphLowering

    # Only max-autotune's GEMM choices: other kernels would be chosen anew on each side,
    # by timings that change a model's time by up to a tenth.
    autotunes = not serves_default_mode()
    options: dict[str, Any] = {"max_autotune_gemm": autotunes, "nvgemm_aot_mode": mode}
    model: Any = torch.compile(module, options=options, dynamic=False)
    codes: list[str] = []

    def call() -> Results:
        return run(model, module, inputs, training)

    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        begin = time.perf_counter()
        call()
        _synchronize(device)
        return call, codes, time.perf_counter() - begin


def _capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Captures calls in a CUDA graph; returns it and the last call's outputs."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_OF_GRAPH):
            results = call()
    return graph, results


def run(model: Any, module: torch.nn.Module, inputs: Results, training: bool) -> Results:
    """Calls once; returns results and, in training, all gradients."""
    import torch

    if not training:
        with torch.no_grad():
            result = model(*inputs)
        return [result]
    inputs = [one.detach().requires_grad_() for one in inputs]
    result = model(*inputs)
    leaves = [*inputs, *module.parameters()]
    # The loss is half the squared norm, whose gradient is the output.
    return [result.detach(), *torch.autograd.grad(result, leaves, result.detach())]


def _times_us(calls: Ways, rounds: int, window_ms: float, device: str) -> dict[str, list[float]]:
    """Returns microseconds a call on each side, from alternating windows."""
    gc.collect()
    gc.disable()  # a model keeps its graphs, so a collection is not its cost
    try:
        once_us = max(_window_us(call, 10, device) for call in calls.values())
        count = max(3, round(window_ms * 1e3 / once_us))
        times: dict[str, list[float]] = {side: [] for side in calls}
        for number in range(rounds):
            for side in sorted(calls, reverse=number % 2 == 1):
                times[side].append(_window_us(calls[side], count, device))
        return times
    finally:
        gc.enable()


def _window_us(call: Callable[[], object], calls: int, device: str) -> float:
    """Returns microseconds a call over a window, after a warm-up half as long."""
    import torch

    for _ in range(calls // 2 + 1):
        call()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls * 1e3


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
