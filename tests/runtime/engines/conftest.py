"""What tests of the plug-ins share: engines, and kernels for Linears that were measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cpu_kernels
import cpu_provider
import tuning_bench
from fake_engines import SGLANG, VLLM, FakeEngine
from inductor_session import InductorSession
from kernels_by_m import TIMES
from measured_bundles import write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.engines import seams
from nvgemm_runtime.launch import compiled, linear

N, K = 32, 64


@pytest.fixture(scope="session")
def measured(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels for a Linear without bias, n = 32 and k = 64, which win as `TIMES` says."""
    directory = tmp_path_factory.mktemp("linears")
    served = cpu_kernels.signature("tn")
    problems = [cpu_provider.problem_of(served, (m, N, K)) for m in TIMES]
    built = tuning_bench.build(problems, directory / "built", kernel_cache)
    return write_measured(built, directory / "measured" / "linears.nvgemm", TIMES)


@pytest.fixture
def session(inductor: InductorSession, measured: Path) -> InductorSession:
    """Finds these kernels alone, and has loaded none."""
    inductor.use(measured)
    inductor.monkeypatch.setattr(linear, "_plans", {})
    inductor.monkeypatch.setattr(compiled, "_origins", {})
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    return inductor


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As a process that has loaded no plug-in."""
    monkeypatch.setattr(seams, "_warned", set())
    monkeypatch.setattr(seams, "_extended", set())
    caplog.set_level(logging.INFO)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Makes a vLLM, of the newest release that the plug-in knows if no other is asked for."""
    made: list[FakeEngine] = []

    def make(version: str = "0.33.0", dispatch_parameters: str = "") -> FakeEngine:
        values = {"version": version, "dispatch_parameters": dispatch_parameters}
        made.append(FakeEngine(monkeypatch, tmp_path / "vllm-site", VLLM, **values))
        return made[-1]

    yield make
    for engine in made:
        engine.forget()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Makes an SGLang likewise."""
    made: list[FakeEngine] = []

    def make(version: str = "0.5.23") -> FakeEngine:
        made.append(FakeEngine(monkeypatch, tmp_path / "sglang-site", SGLANG, version=version))
        return made[-1]

    yield make
    for engine in made:
        engine.forget()
