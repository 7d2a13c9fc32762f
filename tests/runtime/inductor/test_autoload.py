"""What ``import torch`` brings, and that it works however broken nvgemm-aot is."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import torch

from fresh_processes import Home, Ran
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.inductor import autoload

AT_IMPORT = {
    "nvgemm_aot_autoload",
    "nvgemm_runtime",
    "nvgemm_runtime._version",
    "nvgemm_runtime.inductor",
    "nvgemm_runtime.inductor.autoload",
    "nvgemm_runtime.settings",
}

RAISES = """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise RuntimeError("broken on purpose")
sys.meta_path.insert(0, Broken())
"""

SAYS = "nvgemm-aot is disabled in torch.compile"


WAYS: dict[str, dict[str, Any]] = {
    "without": {"variables": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}},
    "off": {"variables": {"NVGEMM_AOT": "off"}},
    "settings raise": {"before": RAISES.format(name="nvgemm_runtime.settings")},
}
"""Ways to have torch compile without nvgemm-aot."""


@pytest.fixture(scope="module")
def run_so(
    recording_bundle: BuiltBundle, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Ran]:
    """Runs a program in each of `WAYS` once, "without" first, over one cache directory."""
    home = Home(tmp_path_factory.mktemp("home"))

    @functools.cache
    def run_so(way: str) -> Ran:
        if way != "without":
            run_so("without")
        options = WAYS[way]
        bundles = {"NVGEMM_AOT_BUNDLES": str(recording_bundle.path)}
        return home.run(**{**options, "variables": bundles | options.get("variables", {})})

    return run_so


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_torch_compiles_without_nvgemm_aot(run_so: Callable[[str], Ran], way: str) -> None:
    assert run_so(way).right == [True, True]
    assert run_so(way).launched == []


@pytest.mark.slow
def test_autoloading_can_be_turned_off(run_so: Callable[[str], Ran]) -> None:
    without = run_so("without")
    assert not any(name.startswith("nvgemm") for name in without.at_end)
    assert (without.hits, without.misses) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["off", "settings raise"])
def test_cache_keys_are_those_that_torch_has_without_us(
    run_so: Callable[[str], Ran], way: str
) -> None:
    assert (run_so(way).hits, run_so(way).misses) == (1, 0)


@pytest.mark.slow
def test_off_is_off_in_silence(run_so: Callable[[str], Ran]) -> None:
    off = run_so("off")
    assert {name for name in off.at_end if name.startswith("nvgemm")} <= AT_IMPORT
    assert off.count("nvgemm") == run_so("without").count("nvgemm") == 0


@pytest.mark.slow
def test_what_is_broken_is_said_once(run_so: Callable[[str], Ran]) -> None:
    """`test_broken_install` breaks more."""
    run = run_so("settings raise")
    assert run.count(SAYS) == 1, run.said
    assert run.count("broken on purpose") == 1, run.said


def test_importing_torch_imports_no_inductor_and_opens_no_bundle(
    recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    places = os.pathsep.join([str(recording_bundle.path), str(tmp_path / "missing")])
    run = Home(tmp_path).run(compiles=False, variables={"NVGEMM_AOT_BUNDLES": places})
    assert set(run.at_import) == AT_IMPORT
    assert run.opened_at_import == []
    assert run.count("nvgemm") == 0


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0a0+git1234567", "3.0.0"])
def test_a_torch_that_was_never_run_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    waited: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(autoload, "after_import", waited.__setitem__)
    autoload.activate()
    assert caplog.messages == [], "it matters to nobody who does not compile"
    assert list(waited) == ["torch._inductor.select_algorithm"]
    waited["torch._inductor.select_algorithm"]()
    (said,) = caplog.messages
    assert version in said
    assert "supported is 2.11 to 2.15" in said


def test_a_torch_in_the_supported_range_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(autoload, "after_import", lambda name, _: waited.append(name))
    for version in ("2.11.0", "2.13.0+cpu", "2.15.1a0+git1234567"):
        monkeypatch.setattr(torch, "__version__", version)
        autoload.activate()
    assert waited.count("torch._inductor.codegen.common") == 3
    assert waited.count("torch._inductor.select_algorithm") == 3
    assert caplog.messages == []


def test_a_module_that_is_looked_for_before_it_is_imported_is_waited_for_still(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "nvgemm_test_looked_for"
    (tmp_path / f"{name}.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, calls = list(sys.meta_path), []
    autoload.after_import(name, lambda: calls.append(sys.modules[name].VALUE))
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(name) == "VALUE = 7\n"
    assert calls == []
    module = importlib.import_module(name)
    assert calls == [7]
    assert sys.meta_path == before
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__.loader is module.__loader__
    autoload.after_import(name, lambda: calls.append(8))
    assert calls == [7, 8]
    monkeypatch.delitem(sys.modules, name)


def test_a_failed_import_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "nvgemm_test_fails_first"
    (tmp_path / f"{name}.py").write_text("raise OSError('on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[int] = []
    autoload.after_import(name, lambda: calls.append(1))
    with pytest.raises(OSError, match="on purpose"):
        importlib.import_module(name)
    assert calls == []
    (tmp_path / f"{name}.py").write_text("mended_and_longer = True\n")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert calls == [1]
    monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("mode", "off"), [("off", True), ("auto", False), ("required", False), ("on", False)]
)
def test_the_variable_says_whether_to_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, off: bool
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", mode)
    waited: list[str] = []
    monkeypatch.setattr(autoload, "after_import", lambda name, _: waited.append(name))
    for _ in range(2):
        autoload.activate()
    assert (not waited) is off
    assert caplog.messages == [], "the first GEMM is an error where it is no mode"
