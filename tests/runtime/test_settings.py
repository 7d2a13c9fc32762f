"""Settings: what they take, and what is said of what they do not take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvgemm_runtime
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.jit import server
from nvgemm_aot.jit.eviction import limit_bytes
from nvgemm_aot.pipeline.compiler_limits import compile_limit_seconds
from nvgemm_aot.workload.decisions import explain_program
from nvgemm_aot.workload.record_program import record_program
from nvgemm_runtime import settings
from nvgemm_runtime.errors import RecordError, SettingError
from nvgemm_runtime.launch import select
from nvgemm_runtime.recording.recorder import Recorder, named_target
from nvgemm_runtime.reporting import events

NUMBERS: dict[str, Callable[[], float]] = {
    "NVGEMM_AOT_MAX_CHOICES": settings.max_choices,
    "NVGEMM_AOT_JIT_CANDIDATES": settings.jit_candidates,
    "NVGEMM_AOT_JIT_JOBS": server._jobs,
    "NVGEMM_AOT_CACHE_LIMIT": limit_bytes,
    "NVGEMM_AOT_COMPILE_TIMEOUT": compile_limit_seconds,
}


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    settings._warn_once.cache_clear()


@pytest.mark.parametrize("text", ["9" * 6000, "1" * 19, "soon" * 30_000], ids=len)
@pytest.mark.parametrize("variable", NUMBERS)
def test_a_number_that_is_absurd_counts_as_not_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, text: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    default = NUMBERS[variable]()
    monkeypatch.setenv(variable, text)
    assert NUMBERS[variable]() == default
    (said,) = caplog.messages
    assert said.startswith(f"{variable}={text[:19]}")
    assert "taken as" in said
    assert len(said) < 300


@pytest.mark.parametrize("variable", NUMBERS)
def test_a_number_of_18_digits_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    number = 10**8 if variable == "NVGEMM_AOT_COMPILE_TIMEOUT" else 10**17
    monkeypatch.setenv(variable, str(number))
    assert NUMBERS[variable]() == number
    assert caplog.messages == []


def test_a_path_is_shown_whole_unless_it_is_absurd() -> None:
    path = Path("/home/user") / ("d" * 200) / "bundle.nvgemm"
    assert settings.printable_path(path) == str(path)
    assert len(settings.printable_path("x" * 100_000)) < 600


def test_a_value_is_shown_in_one_line_and_cut() -> None:
    assert settings.printable("a\nb\x00") == "a b?"
    assert settings.printable("x" * 100_000) == f"{'x' * 100}… (99900 more characters)"


def test_switches_targets_and_files_are_cut_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = "x" * 100_000
    monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", long)
    settings.trusts_rankings()
    monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", long)
    events._warn_once.cache_clear()
    events.write({})
    with pytest.raises(Exception, match="no provider builds for this target") as caught:
        named_target({"NVGEMM_AOT_RECORD_TARGET": long})
    with pytest.raises(RecordError, match="cannot record GEMMs there") as unnamed:
        Recorder(Path(long)).check()
    messages = [*warnings_of(caplog), str(caught.value), str(unnamed.value)]
    assert len(messages) == 4
    assert all(len(message) < 700 for message in messages)


def test_a_mode_that_is_none_is_an_error_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "requird")
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird: allowed are auto, required, off"):
        settings.default_mode()
    assert not settings.is_off()
    with pytest.raises(SettingError) as caught:
        settings.checked_mode("x" * 100_000, "nvgemm_aot_mode")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("autotunes", [True, False])
@pytest.mark.parametrize("has_bundle", [True, False])
def test_a_misspelt_mode_ends_the_first_compilation(
    inductor: InductorSession, autotunes: bool, has_bundle: bool
) -> None:
    """As it was when torch was imported, which says nothing."""
    if not has_bundle:
        inductor.use()
    inductor.monkeypatch.setenv("NVGEMM_AOT", "requird")
    options = {"nvgemm_aot_mode": "requird", "max_autotune_gemm": autotunes}
    with pytest.raises(Exception, match="SettingError: NVGEMM_AOT=requird: allowed are"):
        inductor.compile(torch.mm, torch.randn(16, 64), torch.randn(64, 32), options=options)


def test_a_misspelt_mode_ends_the_first_launch(inductor: InductorSession) -> None:
    from nvgemm_runtime.launch import compiled

    inductor.monkeypatch.setattr(select, "_cache", {})
    inductor.monkeypatch.setenv("NVGEMM_AOT", "requird")
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird"):
        nvgemm_runtime.mm(a, b)
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird"):
        nvgemm_runtime.preload()
    gemm = compiled.gemm(torch.mm, "0f" * 32, "nvgemm-kernels-model 1.0")
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird"):
        gemm(a, b, out=torch.empty(16, 32))


def test_a_misspelt_mode_is_logged_for_generated_cpp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own error is another, of torch."""
    from nvgemm_runtime.launch import api

    monkeypatch.setenv("NVGEMM_AOT", "requird")
    with pytest.raises(SettingError):
        api._load_for_operator("0f" * 32, "nvgemm-kernels-model 1.0")
    assert warnings_of(caplog) == ["NVGEMM_AOT=requird: allowed are auto, required, off"]


def test_a_misspelt_mode_ends_commands_that_run_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("NVGEMM_AOT", "requird")
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird"):
        explain_program(["false"])
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird"):
        record_program(["false"], tmp_path / "recorded.yaml")
    assert warnings_of(caplog) == []
