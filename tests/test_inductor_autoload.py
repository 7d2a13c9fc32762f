"""What ``import torch`` brings, and that it works however broken we are."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fresh_processes import Home, Ran
from nvgemm_aot.pipeline import BuiltBundle

AT_IMPORT = {
    "nvgemm_runtime",
    "nvgemm_runtime.inductor",
    "nvgemm_runtime.inductor.autoload",
    "nvgemm_runtime.inductor.settings",
}

RAISES = """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise RuntimeError("broken on purpose")
sys.meta_path.insert(0, Broken())
"""

SAYS = "nvgemm-aot stays out of torch.compile"


@pytest.fixture(scope="module")
def runs(recording_bundle: BuiltBundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Processes over one cache directory; the first of them is torch without us."""
    home = Home(tmp_path_factory.mktemp("home"))
    bundles = {"NVGEMM_AOT_BUNDLES": str(recording_bundle.path)}
    without = home.run(variables={**bundles, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    ways = {
        "off": {"variables": {**bundles, "NVGEMM_AOT": "off"}},
        "settings raise": {"before": RAISES.format(name="nvgemm_runtime.inductor.settings")},
        "hook raises": {"before": RAISES.format(name="nvgemm_runtime.inductor.hook")},
    }
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(home.run, **{"variables": bundles, **way})
            for name, way in ways.items()
        }
        return {"without": without, **{name: run.result() for name, run in started.items()}}


@pytest.mark.parametrize("way", ["without", "off", "settings raise", "hook raises"])
def test_torch_compiles_without_us(runs: dict[str, Ran], way: str) -> None:
    assert runs[way].right == [True, True]
    assert runs[way].launched == []


def test_autoloading_can_be_turned_off(runs: dict[str, Ran]) -> None:
    assert not any(name.startswith("nvgemm") for name in runs["without"].at_end)
    assert (runs["without"].hits, runs["without"].misses) == (0, 1)


@pytest.mark.parametrize("way", ["off", "settings raise"])
def test_cache_keys_are_those_that_torch_has_without_us(runs: dict[str, Ran], way: str) -> None:
    assert (runs[way].hits, runs[way].misses) == (1, 0)


def test_off_is_off_in_silence(runs: dict[str, Ran]) -> None:
    assert {name for name in runs["off"].at_end if name.startswith("nvgemm")} <= AT_IMPORT
    assert runs["off"].count("nvgemm") == runs["without"].count("nvgemm") == 0


def test_what_is_broken_is_said_once(runs: dict[str, Ran]) -> None:
    for way in ("settings raise", "hook raises"):
        assert runs[way].count(SAYS) == 1, runs[way].said
        assert runs[way].count("broken on purpose") == 1, runs[way].said


def test_importing_torch_imports_no_inductor_and_opens_no_bundle(
    recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    places = os.pathsep.join([str(recording_bundle.path), str(tmp_path / "missing")])
    run = Home(tmp_path).run(compiles=False, variables={"NVGEMM_AOT_BUNDLES": places})
    assert set(run.at_import) == AT_IMPORT
    assert run.opened_at_import == []
    assert run.count("nvgemm") == 0
