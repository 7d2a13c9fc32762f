"""The processes of additive.py: each compiles models as it is asked to, and times their calls.

Questions, a line of JSON each: ``{"compile": [MODEL, BATCH]}``, answered by what came of it, and
``{"time": [MODEL, BATCH], "mode": MODE, "calls": N}``, answered by microseconds a call.
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

from additive_models import MODELS, build
from compiling import answering, check_results, count_gemms, generated_gemms, versions

if TYPE_CHECKING:
    import torch

CALLS, GRAPHS = "calls", "graphs"
"""How a compiled model is called: from Python, or by replays of a CUDA graph of a call."""

Results = list["torch.Tensor"]


def work(device: str, directory: Path, lock: Path) -> None:
    """Answer questions until there are none.

    Args:
        device: ``cuda`` or ``cpu``.
        directory: Inductor's caches are there.
        lock: A file; who holds it has the GPU alone, of all workers.
    """
    send = answering()
    import torch
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 1_000  # a model is compiled for every batch
    torch._dynamo.config.accumulated_recompile_limit = 1_000
    gpu = _Lock(lock)
    _benchmark_alone(gpu)
    calls: dict[tuple[str, int], dict[str, Callable[[], object]]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "compile" in question:
            name, batch = question["compile"]
            calls[name, batch], report = _compile(name, batch, device, directory, gpu)
            send(report)
        else:
            name, batch = question["time"]
            call = calls[name, batch][question["mode"]]
            send(time_us(call, question["calls"], device))


class _Lock:
    """Keeps the GPU to one process; entering it again in the same process is allowed."""

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
    """Have Inductor hold the lock where it times kernels, in whatever way."""
    from torch._inductor.runtime import benchmarking

    kind: Any = type(benchmarking.benchmarker)
    stock = kind.benchmark_gpu

    def benchmark_gpu(*args: Any, **options: Any) -> Any:
        with gpu.held():
            return stock(*args, **options)

    kind.benchmark_gpu = benchmark_gpu
    with contextlib.suppress(ImportError):
        from nvgemm_runtime.inductor import gpu_time

        measure = gpu_time.measure_ms

        def measure_ms(*args: Any, **options: Any) -> float:
            with gpu.held():
                return measure(*args, **options)

        gpu_time.measure_ms = measure_ms


def _compile(
    name: str, batch: int, device: str, directory: Path, gpu: _Lock
) -> tuple[dict[str, Callable[[], object]], dict[str, Any]]:
    """Compile a model: its calls by mode, and what came of it."""
    import torch

    training = MODELS[name].training
    before = Counter(generated_gemms(directory))
    with gpu.held():
        module, inputs = build(name, device, batch=batch)
        _synchronize(device)
    compiled = torch.compile(module, mode="max-autotune-no-cudagraphs", dynamic=False)
    begin = time.perf_counter()
    results = run(compiled, module, inputs, training)
    _synchronize(device)
    cold_s = time.perf_counter() - begin
    calls: dict[str, Callable[[], object]] = {
        CALLS: lambda: run(compiled, module, inputs, training)
    }
    with gpu.held():
        eager = run(module, module, inputs, training)
        exact_module, exact_inputs = build(name, device, batch=batch, exact=True)
        exact = run(exact_module, exact_module, exact_inputs, training)
        error = check_results(results, eager, exact)
        del exact_module, exact_inputs
        if device == "cuda":
            graph, in_graph = _capture(calls[CALLS])
            graph.replay()
            check_results(in_graph, eager, exact)
            calls[GRAPHS] = graph.replay
        _synchronize(device)
    gemms = dict(Counter(generated_gemms(directory)) - before)
    return calls, {
        "cold_s": cold_s,
        "gemms": gemms,
        "count": count_gemms(gemms),
        "error": error,
        "versions": versions(),
    }


def _capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A CUDA graph of a call, and where its replays leave the results."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def run(model: Any, module: torch.nn.Module, inputs: Results, training: bool) -> Results:
    """One call: the results, or in training also the gradients of everything."""
    import torch

    if not training:
        with torch.no_grad():
            result = model(*inputs)
        return [result]
    inputs = [one.detach().requires_grad_() for one in inputs]
    result = model(*inputs)
    leaves = [*inputs, *module.parameters()]
    # Half the squared norm is the loss: its gradient is there already.
    return [result.detach(), *torch.autograd.grad(result, leaves, result.detach())]


def time_us(call: Callable[[], object], calls: int, device: str) -> float:
    """Microseconds a call, of so many in a row, behind a warm-up of half as many."""
    import torch

    gc.collect()
    gc.disable()  # a model keeps its graphs: what is collected is not the model's doing
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
