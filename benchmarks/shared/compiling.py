"""Fresh processes that compile a model, for the benchmarks of torch.compile.

A worker is the benchmark started again. It answers in JSON lines; torch's output goes to a log in
the worker's directory, which also holds Inductor's and Triton's caches.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.resuming import nvidia_smi
from nvgemm_runtime.settings import BUNDLES_VARIABLE, COMPILE_OPTION, Mode

ROOT = Path(__file__).parents[2]
"""Repository root, from which benchmarks are imported."""

WITHOUT_BUNDLES = {COMPILE_OPTION: Mode.OFF.value}
"""torch.compile options that disable nvgemm-aot."""

_GEMM_CALLS = {
    "nvgemm": re.compile(r"\bnvgemm_\w+_[0-9a-f]{12}\("),
    "aten": re.compile(r"\bextern_kernels\.\w*mm\w*\("),
    "triton": re.compile(r"\btriton_tem_\w+\.run\("),
}
"""Patterns for GEMM calls in generated code, by who computes them."""

_ERROR_FACTOR = 1.5
"""Largest error over eager's, against fp32; the summation order differs."""


def fresh_environment(directory: Path, **variables: str | None) -> dict[str, str]:
    """Returns a process environment with empty caches and these settings of torch and nvgemm-aot.

    Args:
        directory: Cache directory.
        variables: Variables to set, or to unset if None. Of this process' settings, only bundles
            stay.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name == BUNDLES_VARIABLE or not name.startswith(("NVGEMM_AOT", "TORCHINDUCTOR_"))
    }
    changed = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "NVGEMM_AOT_CACHE": str(directory / "nvgemm-aot"),
        **variables,
    }
    for name, value in changed.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


class Worker:
    """Process that runs a part of a benchmark and answers questions, a JSON line each."""

    def __init__(
        self, module: str, arguments: Iterable[str], directory: Path, environment: dict[str, str]
    ) -> None:
        self._log = directory / "log"
        path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**environment, "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, question: Any) -> Any:
        """Sends a line and reads a line."""
        self.tell(question)
        return self.answer()

    def tell(self, question: Any) -> None:
        """Sends a line; `answer` reads the reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the worker has ended; its log has the reason

    def answer(self) -> Any:
        """Reads a line; see `ask`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
            command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
            raise click.ClickException(f"{command} ended with status {code}:\n{tail}")
        return json.loads(line)

    def close(self, patience_s: float = 60) -> None:
        """Ends the worker; kills it after so many seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self.close(patience_s=60 if failure is None else 1)


def answering() -> Callable[[Any], None]:
    """Returns, in a worker, the function that sends an answer. Prints go to stderr from then on."""
    answers, sys.stdout = sys.stdout, sys.stderr

    def send(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return send


def read_from_disk(*more: str) -> None:
    """Imports what workers import, and more modules, which puts them into the page cache."""
    for modules in (
        *more,
        "torch._dynamo, torch._inductor.compile_fx, torch._inductor.select_algorithm",
        "triton.compiler",
        "nvgemm_aot.jit.server, cutlass.cute",
    ):
        command = [sys.executable, "-c", f"import {modules}"]
        subprocess.run(command, check=False, capture_output=True)


def gemm_calls(code: str) -> Counter[str]:
    """Counts the GEMMs that a generated module calls, by call name."""
    calls: Counter[str] = Counter()
    for pattern in _GEMM_CALLS.values():
        calls.update(call.rstrip("(") for call in pattern.findall(code))
    return calls


def generated_gemms(directory: Path) -> dict[str, int]:
    """Counts the GEMMs that generated code calls.

    Returns:
        Calls by name, e.g. ``nvgemm_mm_0123456789ab``, ``extern_kernels.mm``.
    """
    calls: Counter[str] = Counter()
    for path in sorted(directory.glob("inductor/**/*.py")):
        text = path.read_text(errors="replace")
        if "AsyncCompile()" in text:  # a module that calls kernels, not a kernel
            calls += gemm_calls(text)
    return dict(calls)


def count_gemms(calls: dict[str, int]) -> dict[str, int]:
    """Sums `generated_gemms`' counts by who computes them: nvgemm, aten, triton."""
    return {
        who: sum(count for call, count in calls.items() if pattern.match(f"{call}("))
        for who, pattern in _GEMM_CALLS.items()
    }


def check_results(results: Any, eager: Any, exact: Any) -> dict[str, float]:
    """Compares compiled results with eager ones; both are bf16.

    Returns:
        The largest relative error of each, the difference's norm over the norm.
    """

    def error(result: Any, reference: Any) -> float:
        return float((result.float() - reference).norm() / reference.norm())

    errors = [
        (error(result, reference), error(usual, reference))
        for result, usual, reference in zip(results, eager, exact)
    ]
    for compiled, usual in errors:
        if not compiled <= usual * _ERROR_FACTOR + 1e-4:  # NaN fails too
            raise click.ClickException(
                f"a compiled result is wrong: relative error to fp32 {compiled:.2e}, "
                f"eager bf16 {usual:.2e}"
            )
    return {"compiled": max(one for one, _ in errors), "eager": max(one for _, one in errors)}


@functools.cache  # the driver takes about a second to answer
def versions() -> dict[str, Any]:
    """Returns versions and serving bundles. Opens the bundles, so call it after measuring."""
    import torch

    import nvgemm_runtime
    from nvgemm_runtime.matching.device import device_facts

    facts = device_facts("cuda" if torch.cuda.is_available() else "cpu", 0)
    return {
        "device": facts.name,
        "driver": ", ".join(nvidia_smi("driver_version")),
        "torch": torch.__version__,
        "nvgemm-aot": nvgemm_runtime.__version__,
        "bundles": sorted(
            f"{found.origin}: {found.path.name}, sha256 {sha256(found.path)[:16]}"
            for found in nvgemm_runtime.bundles()
            if found.refusal(facts) is None
        ),
    }


def plugin_stats() -> dict[str, Any]:
    """Returns the plug-in's counters and its milliseconds by activity."""
    import nvgemm_runtime

    found = nvgemm_runtime.stats()
    return {
        "declared": found.declared,
        "signature": found.signature,
        "jit": found.jit,
        "jit_kernels": found.jit_kernels,
        "missed": found.missed,
        "milliseconds": dict(found.milliseconds),
    }


def sha256(path: Path) -> str:
    """Returns a file's digest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_of(allowed: Collection[str]) -> Callable[[click.Context, click.Parameter, str], Any]:
    """Returns a reader for an option's comma-separated names."""

    def read(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
        parts = tuple(value.split(","))
        unknown = [part for part in parts if part not in allowed]
        if unknown:
            raise click.BadParameter(f"must be of {', '.join(allowed)} (got {unknown[0]!r})")
        return parts

    return read


def numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Reads an option's comma-separated positive numbers, each once."""
    if value is None:
        return ()
    parts = value.split(",")
    found = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    if 0 in found or len(set(found)) < len(found):
        raise click.BadParameter(
            f"must be different positive numbers, with commas between (got {value!r})"
        )
    return found
