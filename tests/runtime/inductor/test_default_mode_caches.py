"""Compile caches of plain torch.compile that outlive what made them."""

from __future__ import annotations

from pathlib import Path

import pytest

import confirmed_kernels
import cpu_provider
import tuning_bench
from fresh_processes import Home, Ran, pip_install
from measured_bundles import ATEN, write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.confirming.confirmed_output import write_confirmations

pytestmark = pytest.mark.slow

SQUARE, WIDE, ONE = "Cpu_16x16", "Cpu_8x32", "Cpu_1x1"

TIMES = {
    8: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    16: {SQUARE: 300, WIDE: 500, ONE: 600, ATEN: 1000},
}

KERNELS = [WIDE, WIDE]
"""What the program's two GEMMs launch at the second call, of 8 rows."""

WHEEL = "nvgemm-kernels-model 1.0"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One cache directory for every process of these tests."""
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def site(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a wheel of measured kernels is installed."""
    directory = tmp_path_factory.mktemp("wheels")
    problems = [
        cpu_provider.problem(layout, sizes=(m, 32, 64)) for layout in ("tt", "tn") for m in TIMES
    ]
    built = tuning_bench.build(problems, directory / "built", kernel_cache)
    measured = write_measured(built, directory / "measured" / built.name, TIMES)
    return pip_install(measured, "1.0", directory / "site")


@pytest.fixture(scope="module")
def cold(home: Home, site: Path) -> Ran:
    """The first process."""
    return home.run(site, plain=True)


def test_a_cold_start_compiles_one_graph_with_kernels(cold: Ran, home: Home) -> None:
    assert cold.right == [True, True]
    assert (cold.hits, cold.misses) == (0, 1)
    assert cold.launched == KERNELS
    assert "AUTOTUNE" not in cold.said
    (module,) = home.modules()
    assert WHEEL in module.read_text()


def test_a_warm_start_runs_the_kernels_from_the_cache(home: Home, site: Path, cold: Ran) -> None:
    warm = home.run(site, plain=True)
    assert warm.right == [True, True]
    assert (warm.hits, warm.misses) == (1, 0)
    assert warm.launched == KERNELS
    assert warm.count("nvgemm") == 0


def test_turned_off_and_with_the_wheel_removed_it_is_another_graph(
    home: Home, site: Path, cold: Ran
) -> None:
    off = home.run(site, plain=True, variables={"NVGEMM_AOT_DEFAULT_MODE": "0"})
    assert off.right == [True, True]
    assert (off.hits, off.misses) == (0, 1)
    assert off.launched == []
    assert "tvm_ffi" not in off.at_end, "operators are loaded if they are called"
    removed = home.run(plain=True)
    assert removed.right == [True, True]
    assert (removed.hits, removed.misses) == (0, 1)
    assert removed.launched == []
    assert removed.count("nvgemm") == 0
    heavy = ("nvgemm_runtime.inductor.hook", "nvgemm_runtime.bundle.reader", "tvm_ffi")
    assert not set(heavy) & set(removed.at_end), (
        "nothing is imported for bundles that are not there"
    )


RUN_CACHED = """
import runpy
def run_cached():
    for path in {paths!r}:
        module = runpy.run_path(path)
        arguments = module["get_args"]()
        x, *weights = [one for one in arguments if isinstance(one, torch.Tensor)]
        results = module["call"](list(arguments))
        right.append(all(torch.allclose(y, x @ w, atol=1e-4) for y, w in zip(results, weights)))
def hide(name):
    for known in [known for known in sys.modules if known.split(".")[0] == name]:
        del sys.modules[known]
    sys.modules[name] = None
"""


def test_a_cached_graph_whose_kernels_are_gone_says_so_once_and_is_right(
    home: Home, cold: Ran, tmp_path: Path
) -> None:
    """The same module twice is two graphs. `test_compile_caches` has it with our package."""
    module = next(path for path in home.modules() if WHEEL in path.read_text())
    copies = [tmp_path / name for name in ("first.py", "second.py")]
    for copy in copies:
        copy.write_text(module.read_text())
    code = RUN_CACHED.format(paths=[str(path) for path in copies])
    code += "hide('nvgemm_runtime')\nrun_cached()"
    run = Home(tmp_path / "gone").run(compiles=False, after=code)
    assert run.right == [True, True]
    assert run.launched == []
    assert run.count(WHEEL) == 1, run.said
    assert run.count("run on ATen") + run.count("on ATen instead of") == 1, run.said


ENGINE = """
import hashlib
from torch._inductor import CompiledArtifact, config, standalone_compile

def engine(graph, inputs):
    factors = str([config.save_config_portable()])
    path = os.path.join(os.environ["TEST_ENGINE"], hashlib.sha256(factors.encode()).hexdigest())
    found.append(os.path.exists(path))
    if found[-1]:
        artifact = CompiledArtifact.load(path=path, format="unpacked")
    else:
        artifact = standalone_compile(graph, inputs, dynamic_shapes="from_graph")
        artifact.save(path=path, format="unpacked")
    return artifact

found = []
b, c = torch.full((64, 32), 2.0), torch.full((32, 64), 3.0).t()
compiled = torch.compile(model, backend=engine)
for rows in (16, 8):
    os.truncate(os.environ["TEST_RECORD"], 0)
    a = torch.ones(rows, 64)
    torch._dynamo.mark_dynamic(a, 0)
    right.append(all(map(torch.equal, compiled(a, b, c), model(a, b, c))))
print(f"found={found}", file=sys.stderr)
"""
"""A program with a cache of its own, whose entries are named by Inductor's options, as vLLM's are.

Where it finds an entry it asks torch nothing more.
"""


def test_an_engine_whose_cache_is_keyed_by_options_compiles_anew_for_other_wheels(
    tmp_path: Path, site: Path, kernel_cache: Cache
) -> None:
    """Started without a wheel, with one, with it again, and with another in its place."""
    engine = Home(tmp_path / "engine")
    entries = tmp_path / "entries"
    entries.mkdir()

    def run(site: Path | None) -> tuple[bool, list[str]]:
        variables = {"TEST_ENGINE": str(entries)}
        ran = engine.run(site, compiles=False, after=ENGINE, variables=variables)
        assert ran.right == [True, True]
        assert ran.count("nvgemm") == 0, ran.said
        assert ran.count("found=[True]") + ran.count("found=[False]") == 1, ran.said
        return ran.count("found=[True]") == 1, ran.launched

    assert run(None) == (False, [])
    assert run(site) == (False, KERNELS)
    assert run(site) == (True, KERNELS)
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    built = tuning_bench.build(problems, tmp_path / "built", kernel_cache)
    measured = write_measured(built, tmp_path / "measured" / built.name, TIMES)
    replaced = pip_install(measured, "2.0", tmp_path / "site")
    assert run(replaced) == (False, KERNELS[:1])
    assert len(list(entries.iterdir())) == 3


def test_confirmations_that_come_change_and_go_make_other_graphs(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    """Two processes that have the same share one; a caller's rank changes nothing."""
    problems = [
        cpu_provider.problem(layout, sizes=(m, 32, 64)) for layout in ("tt", "tn") for m in TIMES
    ]
    built = tuning_bench.build(problems, tmp_path / "built", kernel_cache)
    measured = write_measured(
        built, tmp_path / "measured" / built.name, TIMES, torch=confirmed_kernels.OTHER_TORCH
    )
    site = pip_install(measured, "1.0", tmp_path / "site")
    home = Home(tmp_path / "home")

    def run(rank: int = 0) -> tuple[int, int, list[str]]:
        ran = home.run(site, plain=True, variables={"RANK": str(rank), "LOCAL_RANK": str(rank)})
        assert ran.right == [True, True]
        assert ran.count("nvgemm") == 0, ran.said
        return ran.hits, ran.misses, ran.launched

    assert run() == (0, 1, [])
    confirmations = confirmed_kernels.confirm_by(TIMES, measured).confirmations
    file = write_confirmations(confirmations, home.confirmed / "a.confirmed.json")
    assert run() == (0, 1, KERNELS)
    assert run(rank=1) == (1, 0, KERNELS)
    lost = {m: {**times, ATEN: 100} for m, times in TIMES.items()}
    write_confirmations(confirmed_kernels.confirm_by(lost, measured).confirmations, file)
    assert run() == (0, 1, [])
    write_confirmations(confirmations, file)
    assert run() == (1, 0, KERNELS)
    file.unlink()
    assert run() == (1, 0, [])
