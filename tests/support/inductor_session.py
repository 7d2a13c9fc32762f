"""Compiling with torch.compile in this process, with chosen bundles, and seeing what came of it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from recording_kernels import Record

HEADER = "from nvgemm_runtime.launch.compiled import gemm as nvgemm_aot_gemm"
"""The line of a generated module by which it finds bundled kernels again."""


ATEN_GEMMS = (
    "mm", "bmm", "addmm", "bias_addmm", "baddbmm", "_int_mm", "_scaled_mm", "_grouped_mm",
)  # fmt: skip
"""Inductor's names of the choices by which ATen computes GEMMs."""

_LOSER_SECONDS = 0.002
"""Time of a call that `InductorSession.lose` makes lose, for what times calls by itself."""

_LOSER_MS = 10_000.0
"""What Inductor measures of it besides."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A function that was compiled and called once.

    Attributes:
        function: It.
        result: What the call gave.
        code: The generated modules, in order.
        launched: The operators of bundled kernels that a second call launched, in order.
    """

    function: Callable[..., Any]
    result: Any
    code: tuple[str, ...]
    launched: tuple[str, ...]


class InductorSession:
    """Torch as a user has it, with some knobs turned; `conftest.inductor` makes one."""

    def __init__(self, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record = record
        self.monkeypatch = monkeypatch
        self._loses = False

    def use(self, *places: Path) -> None:
        """Make this process find these bundles and no others, as if it had just started."""
        # It has the plug-in imported, which comes in the wrong order without.
        importlib.import_module("torch._inductor.select_algorithm")

        from nvgemm_runtime.inductor.autotuning import choices
        from nvgemm_runtime.installed import digest
        from nvgemm_runtime.installed.registry import INSTALLATION, Installation
        from nvgemm_runtime.launch import compiled
        from nvgemm_runtime.launch.loading.loader import LOADER, KernelLoader
        from nvgemm_runtime.reporting.counters import COUNTERS

        self.monkeypatch.setenv("NVGEMM_AOT_BUNDLES", os.pathsep.join(map(str, places)))
        self.monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
        for kept, fresh in ((INSTALLATION, Installation()), (LOADER, KernelLoader())):
            for name, value in vars(fresh).items():
                self.monkeypatch.setattr(kept, name, value)
        self.monkeypatch.setattr(compiled, "_warned", set())
        self.monkeypatch.setattr(COUNTERS, "_failed", {})
        self.monkeypatch.setattr(choices, "_known_failures", set())
        digest.forget()

    def use_wheels(self, *wheels: Path) -> Path:
        """Likewise, with these wheels installed; returns where."""
        from installed_bundles import install_wheels

        self.use()
        site = Path(tempfile.mkdtemp(dir=self.record.path.parent))
        install_wheels(self.monkeypatch, site, *wheels)
        return site

    @contextlib.contextmanager
    def watch_choices(self) -> Iterator[list[list[str]]]:
        """As a user's own preprocessing function sees them: the choices for each GEMM, by name."""
        from torch._inductor.select_algorithm import (
            add_preprocessing_fn,
            get_algorithm_selector_cache,
        )

        seen: list[list[str]] = []

        def watch(choices: list[Any]) -> list[Any]:
            seen.append([choice.name for choice in choices])
            return choices

        add_preprocessing_fn(watch)
        try:
            yield seen
        finally:
            get_algorithm_selector_cache().preprocessing_fns.remove(watch)

    def watch_events(self, path: Path) -> Callable[[], list[dict[str, Any]]]:
        """From now on, what becomes of each GEMM, as the plug-in writes it to a file."""
        self.monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(path))
        return lambda: list(map(json.loads, path.open())) if path.exists() else []

    def slow_down_aten(self) -> None:
        """Make ATen lose, however busy this machine is."""
        from torch._inductor.select_algorithm import extern_kernels

        def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
            def slow(*arguments: Any, **options: Any) -> Any:
                self.lose()
                return function(*arguments, **options)

            return slow

        importlib.import_module("torch._inductor.kernel.mm")  # it names ATen's functions
        importlib.import_module("torch._inductor.kernel.mm_grouped")
        for name in ATEN_GEMMS:
            self.monkeypatch.setattr(extern_kernels, name, slowed(getattr(extern_kernels, name)))

    def lose(self) -> None:
        """Make the choice lose that is being timed, if one is: it takes a little, and counts more.

        The clock alone would let another win now and then where other programs run.
        """
        self._loses = True
        time.sleep(_LOSER_SECONDS)

    @contextlib.contextmanager
    def caches(self) -> Iterator[None]:
        """Empty caches, and settings that keep compiling in this process and quick."""
        import torch._dynamo
        from torch._inductor import config
        from torch._inductor.runtime.benchmarking import Benchmarker
        from torch._inductor.utils import fresh_cache

        from nvgemm_runtime.installed import digest

        thorough, session = Benchmarker.benchmark_cpu, self

        def quick(self: Benchmarker, call: Callable[[], Any], *_: Any, **__: Any) -> float:
            session._loses = False
            ms: float = thorough(self, call, warmup=5, rep=25)  # a quarter of the time
            return ms + _LOSER_MS if session._loses else ms

        self.monkeypatch.setattr(Benchmarker, "benchmark_cpu", quick)
        settings = {
            "max_autotune_gemm": True,
            "max_autotune_gemm_backends": "ATEN",
            "compile_threads": 1,
            "cpp.simdlen": 0,  # without vectors the C++ compiler takes two thirds of the time
        }
        torch._dynamo.reset()
        with fresh_cache(), config.patch(settings):
            yield
        torch._dynamo.reset()
        digest.forget()

    def compile(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Compiled:
        """Compile a function and call it; options are those of ``torch.compile``."""
        from torch._inductor.utils import run_and_get_code

        compiled = torch.compile(function, **{"dynamic": False, **options})
        result, code = run_and_get_code(compiled, *arguments)
        return Compiled(
            function=compiled,
            result=result,
            code=tuple(code),
            launched=self.launched(compiled, *arguments),
        )

    def launched(self, function: Callable[..., Any], *arguments: Any) -> tuple[str, ...]:
        """The operators of bundled kernels that a call launches, in order."""
        self.record.forget()
        function(*arguments)
        return tuple(self.record.lines())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What nvgemm-aot logged at level warning or above."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("nvgemm") and record.levelno >= logging.WARNING
    ]
