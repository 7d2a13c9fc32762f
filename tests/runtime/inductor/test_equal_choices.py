"""Ranks of a job choose alike, with caches of their own, with shared ones and without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_provider
import tuning_bench
from fresh_processes import pip_install
from measured_bundles import ATEN, write_measured
from nvgemm_aot.storage.build_cache import Cache

pytestmark = pytest.mark.slow

SQUARE, WIDE, ONE = "Cpu_16x16", "Cpu_8x32", "Cpu_1x1"

TIED = {
    8: {SQUARE: 500, WIDE: 500, ONE: 500, ATEN: 1000},
    16: {SQUARE: 300, WIDE: 300, ONE: 301, ATEN: 1000},
    32: {SQUARE: 300, WIDE: 500, ONE: 600, ATEN: 1000},
}
"""Nanoseconds by m; up to 16 only the ids tell kernels apart."""

OTHER = {8: {SQUARE: 500, WIDE: 500, ONE: 300, ATEN: 1000}}

_RANK = """
import json, os, sys
import torch
from torch import distributed
import nvgemm_runtime

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
weights = [torch.ones(64, 32), torch.ones(32, 64).t()]

@torch.compile
def products(x):
    return [x @ weight for weight in weights]

before = nvgemm_runtime.choices_digest()
x = torch.ones(16 + 8 * rank, 64)  # ranks meet sizes in an order of their own
torch._dynamo.mark_dynamic(x, 0)
results = products(x)
assert all(torch.equal(result, x @ weight) for result, weight in zip(results, weights))
digests = [None, None]
distributed.all_gather_object(digests, nvgemm_runtime.choices_digest())
distributed.destroy_process_group()
hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps({"before": before, "digests": digests, "hits": hits}), flush=True)
os._exit(0)  # gloo's threads may abort a process while Python ends: pytorch#179291
"""


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of kernels for two weights at three m, not measured."""
    problems = [
        cpu_provider.problem(layout, sizes=(m, 32, 64)) for layout in ("tt", "tn") for m in TIED
    ]
    return tuning_bench.build(problems, tmp_path_factory.mktemp("built"), kernel_cache)


@pytest.fixture(scope="module")
def site(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel in which kernels tie."""
    directory = tmp_path_factory.mktemp("tied")
    return pip_install(
        write_measured(built, directory / "measured" / built.name, TIED), "1.0", directory / "site"
    )


@pytest.fixture(scope="module")
def other_site(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's next version, with another winner at m 8."""
    directory = tmp_path_factory.mktemp("other")
    measured = write_measured(built, directory / "measured" / built.name, {**TIED, **OTHER})
    return pip_install(measured, "2.0", directory / "site")


def run_ranks(directory: Path, sites: tuple[Path, Path], caches: tuple[str, str]) -> list[dict]:
    """Returns what two ranks of one job print."""
    ranks = []
    for rank, (site, cache) in enumerate(zip(sites, caches)):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("NVGEMM_AOT")
        }
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(directory / cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": str(site),
            "PYTHONHASHSEED": str(rank + 1),
        }
        store = directory / f"store-{'-'.join(caches)}"
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(rank), str(store)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    answers = []
    for rank in ranks:
        out, errors = rank.communicate()
        assert rank.returncode == 0, errors
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def test_two_ranks_choose_alike_cold_and_warm(site: Path, tmp_path: Path) -> None:
    cold = run_ranks(tmp_path, (site, site), ("first", "second"))
    warm = run_ranks(tmp_path, (site, site), ("second", "new"))
    assert [answer["hits"] for answer in cold] == [0, 0]
    assert [answer["hits"] > 0 for answer in warm] == [True, False]
    digests = {digest for answer in (*cold, *warm) for digest in answer["digests"]}
    assert len(digests) == 1
    assert digests.isdisjoint({answer["before"] for answer in cold}), "kernels are in use"


def test_ranks_with_different_wheels_have_different_digests(
    site: Path, other_site: Path, tmp_path: Path
) -> None:
    for answer in run_ranks(tmp_path, (site, other_site), ("first", "second")):
        assert len(set(answer["digests"])) == 2
