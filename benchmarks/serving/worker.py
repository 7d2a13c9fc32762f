"""A process that starts an engine and measures everything of its mode."""

from __future__ import annotations

import functools
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.serving.digests import digest, gemms_below, reductions_below
from benchmarks.serving.engines import ENGINES, Engine, Tokens, sequences
from benchmarks.serving.kernels import KernelTime, profiled
from benchmarks.serving.reference import log_probabilities
from benchmarks.serving.workload import MODELS, Workload, prompts
from benchmarks.shared.compiling import answering, count_gemms, plugin_stats, versions
from benchmarks.shared.kernel_intervals import start_tracing

PROFILED_STEPS = 16
"""Tokens that each sequence decodes in a profile."""

PROFILES = 2
"""Profiles of each size; kernel times vary little."""

COMPARED = (16, 8)
"""Sequences, and generated tokens of each, that are compared with fp32."""

Profile = Callable[[Callable[[], object], int], KernelTime]
"""Profiles a call of so many steps."""


def work(workload: Workload, directory: Path) -> None:
    """Measures the workload in this process, whose caches lie below a directory."""
    _keep_answers_apart()
    send = answering()
    begin = time.perf_counter()
    import torch

    torch_s = time.perf_counter() - begin
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        start_tracing()
    kind = ENGINES[workload.engine]
    said = Said()
    logging.getLogger(f"{workload.engine}.nvgemm_aot").addFilter(said)
    begin = time.perf_counter()
    engine = kind.start(workload, directory)
    engine_s = time.perf_counter() - begin
    begin = time.perf_counter()
    engine.generate(prompts(1, workload.prompt), 2)
    first_s = time.perf_counter() - begin
    started = plugin_stats()
    result = {
        "seconds": {
            "import": torch_s,
            "engine": engine_s,
            "first request": first_s,
            "start": torch_s + engine_s + first_s,
        },
        "memory_mb": _used_mb() if has_gpu else None,
        **measured(engine, workload, profiled if has_gpu else None),
    }
    calls = gemms_below(directory)
    result |= {
        "gemms": calls,
        "count": count_gemms(calls),
        "stats": {
            **started,
            "while_serving_ms": _spent_ms(plugin_stats()) - _spent_ms(started),
            "failed": failures(),
            "said": said.lines,
        },
        "versions": {
            **versions(),
            "CUDA": torch.version.cuda,
            "engine": kind.version,
        },
    }
    result["digests"] |= {
        "choices": digest([calls, result["stats"]["failed"]]),
        "reductions": digest(reductions_below(directory)),
    }
    send(result)


class Said(logging.Filter):
    """Keeps what the plug-in for an engine logs.

    A filter, because engines configure logging at their start, which removes handlers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps a message and lets it pass."""
        self.lines.append(record.getMessage())
        return True


def _keep_answers_apart() -> None:
    """Sends what libraries write to file descriptor 1, as Gloo does, to stderr."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def measured(engine: Engine, workload: Workload, profile: Profile | None) -> dict[str, Any]:
    """Times decoding and prefilling, compares with fp32, and takes digests of tokens."""
    decode = {batch: _timed_decode(engine, workload, batch) for batch in workload.batches}
    prefill = {length: _timed_prefill(engine, workload, length) for length in workload.prefills}
    generated = {batch: row.pop("tokens") for batch, row in decode.items()}
    if profile is not None:
        _add_kernels(engine, decode, prefill, profile)
    return {
        "decode": {str(batch): row for batch, row in decode.items()},
        "prefill": {str(length): row for length, row in prefill.items()},
        "digests": {
            "tokens": digest(generated),
            "tokens by batch": {str(batch): digest(rows) for batch, rows in generated.items()},
        },
        "accuracy": _accuracy(engine, workload),
    }


def _timed_decode(engine: Engine, workload: Workload, batch: int) -> dict[str, Any]:
    """Returns tokens a second: the time of many tokens less that of the first."""
    texts = prompts(batch, workload.prompt)
    engine.generate(texts, 8)
    rates, generated = [], Tokens()
    for _ in range(workload.repeats):
        first = _seconds(lambda: engine.generate(texts, 1))
        begin = time.perf_counter()
        generated = engine.generate(texts, workload.tokens + 1)
        rest = time.perf_counter() - begin - first
        rates.append(batch * workload.tokens / rest)
    return {"rates": [round(rate, 1) for rate in rates], "tokens": generated}


def _timed_prefill(engine: Engine, workload: Workload, length: int) -> dict[str, Any]:
    """Returns tokens a second of one prompt, with its first token."""
    texts = prompts(1, length)
    engine.generate(texts, 1)
    times = [_seconds(lambda: engine.generate(texts, 1)) for _ in range(workload.repeats)]
    return {"rates": [round(length / one, 1) for one in times]}


def _add_kernels(
    engine: Engine,
    decode: dict[int, dict[str, Any]],
    prefill: dict[int, dict[str, Any]],
    profile: Profile,
) -> None:
    """Adds kernels' time of a step to each size.

    A prompt of one token decodes from its first step on, so that a profile holds nothing else.
    """
    shapes = [
        *((row, prompts(batch, 1), PROFILED_STEPS) for batch, row in decode.items()),
        *((row, prompts(1, length), 1) for length, row in prefill.items()),
    ]

    def warm_up() -> None:  # the first profile of a graph takes longer
        for _, texts, steps in shapes:
            engine.generate(texts, min(steps, 2))

    if shapes:
        profile(warm_up, 1)
    for row, texts, steps in shapes:
        call = functools.partial(engine.generate, texts, steps)
        row["kernels"] = [profile(call, steps).to_json() for _ in range(PROFILES)]


def _accuracy(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Compares log probabilities of the tokens generated first with those in fp32.

    Returns:
        Root mean square and largest difference in nats, over the prefill's token and over those
        that were decoded; and the log probabilities.
    """
    count, tokens = COMPARED
    texts = prompts(min(count, max(workload.batches, default=1)), workload.prompt)
    generated, found = engine.log_probabilities(texts, tokens)
    exact = log_probabilities(
        MODELS[workload.model],
        workload.layers,
        engine.weight,
        sequences(texts, generated),
        tokens,
    ).tolist()
    parts = {"prefill": slice(0, 1), "decode": slice(1, None)}
    return {
        part: _differences(
            [own - other for row, of_row in zip(found, exact, strict=True)
             for own, other in zip(row[where], of_row[where], strict=True)]
        )
        for part, where in parts.items()
    }  # fmt: skip


def _differences(errors: list[float]) -> dict[str, float]:
    squares = statistics.fmean(error * error for error in errors)
    return {"rms": squares**0.5, "most": max(map(abs, errors))}


def _spent_ms(stats: dict[str, Any]) -> float:
    return float(sum(stats["milliseconds"].values()))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _used_mb() -> int:
    """Returns megabytes of GPU memory in use, by all of the machine."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e6)


def failures() -> dict[str, str]:
    """Returns the reasons for which kernels were left to ATen, by kernel."""
    import nvgemm_runtime

    return dict(nvgemm_runtime.stats().failed)
