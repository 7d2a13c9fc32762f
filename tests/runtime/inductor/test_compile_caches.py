"""Compile caches that outlive what made them: wheels and nvgemm-aot removed, upgraded, put back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import cpu_provider
import recording_kernels
from fresh_processes import Home, Ran, pip_install
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache

KERNELS = ["Cpu_16x16", "Cpu_16x16"]
"""What the program's two GEMMs launch when kernels won."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One cache directory for every process of these tests."""
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def site(recording_bundle: BuiltBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where version 1.0 of a kernel wheel is installed."""
    return pip_install(recording_bundle.path, "1.0", tmp_path_factory.mktemp("wheels") / "site")


@pytest.fixture(scope="module")
def upgraded_site(
    site: Path, kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Where version 2.0 has replaced it: other kernels, and one problem fewer."""
    directory = tmp_path_factory.mktemp("upgraded")
    other = recording_kernels.build_recording(
        [cpu_provider.problem()], directory / "bundle", kernel_cache, recording_kernels.Sleeping()
    )
    shutil.copytree(site, directory / "site")
    return pip_install(other.path, "2.0", directory / "site")


@pytest.fixture(scope="module")
def artifacts(home: Home) -> Path:
    """What the first process saves of its caches, for other machines."""
    return home.directory / "artifacts"


@pytest.fixture(scope="module")
def cold(home: Home, site: Path, artifacts: Path) -> Ran:
    """The first process, in which kernels win."""
    save = f"open({str(artifacts)!r}, 'wb').write(torch.compiler.save_cache_artifacts()[0])"
    return home.run(site, slow_aten=True, after=save)


@pytest.mark.slow
def test_a_cold_start_compiles_with_kernels(cold: Ran, home: Home) -> None:
    assert cold.right == [True, True]
    assert (cold.hits, cold.misses) == (0, 1)
    assert cold.launched == KERNELS
    assert len(home.modules()) == 1
    assert "nvgemm-kernels-model 1.0" in home.modules()[0].read_text()


@pytest.mark.slow
def test_with_the_wheel_upgraded_its_other_kernels_are_asked(
    home: Home, cold: Ran, upgraded_site: Path
) -> None:
    upgraded = home.run(upgraded_site)
    assert upgraded.right == [True, True]
    assert (upgraded.hits, upgraded.misses) == (0, 1)
    assert upgraded.launched == []
    assert "AUTOTUNE" in upgraded.said


@pytest.mark.slow
def test_a_warm_start_runs_the_kernels_from_the_cache(home: Home, site: Path, cold: Ran) -> None:
    """The program does not name nvgemm-aot."""
    warm = home.run(site)
    assert warm.right == [True, True]
    assert (warm.hits, warm.misses) == (1, 0)
    assert warm.launched == KERNELS
    assert warm.count("nvgemm") == 0


@pytest.mark.slow
def test_saved_caches_run_kernels_on_another_machine(
    site: Path, cold: Ran, artifacts: Path, tmp_path: Path
) -> None:
    load = (
        f"import torch; torch.compiler.load_cache_artifacts(open({str(artifacts)!r}, 'rb').read())"
    )
    run = Home(tmp_path / "other").run(site, before=load)
    assert run.right == [True, True]
    assert (run.hits, run.misses) == (1, 0)
    assert run.launched == KERNELS
    assert run.count("nvgemm") == 0


RUN_CACHED = """
import runpy
def run_cached():
    for path in {paths!r}:
        module = runpy.run_path(path)
        for call in range(2):
            module["call"](list(module["get_args"]()))
        results = module["call"](order(module, [a, b, c]))
        right.append(all(map(torch.equal, results, model(a, b, c))))
def order(module, arguments):
    def lies(x):
        return x.shape, x.stride()
    return [next(x for x in arguments if lies(x) == lies(y)) for y in module["get_args"]()]
"""


@pytest.mark.slow
def test_a_cached_graph_whose_kernels_are_gone_says_so_once_and_is_right(
    home: Home, cold: Ran, upgraded_site: Path, tmp_path: Path
) -> None:
    """The same module twice is two graphs; without our package: `test_default_mode_caches`."""
    (module,) = home.modules()
    copies = [tmp_path / name for name in ("first.py", "second.py")]
    for copy in copies:
        copy.write_text(module.read_text())
    code = RUN_CACHED.format(paths=[str(path) for path in copies])
    gone = Home(tmp_path / "gone")
    run = gone.run(upgraded_site, compiles=False, after=f"{code}\nrun_cached()")
    assert run.right == [True, True]
    assert run.launched == []
    assert run.count("nvgemm-kernels-model 1.0") == 1, run.said
    assert run.count("run on ATen") + run.count("on ATen instead of") == 1, run.said
