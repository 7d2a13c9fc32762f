"""Graphs of experts in torch's compile caches, with kernels that come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expert_kernels import build_kernels
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import Epilogue

pytestmark = pytest.mark.slow

KERNELS: dict[str, list[Epilogue | None]] = {
    "tn": [None, Epilogue.parse("swiglu_halves"), Epilogue.parse("swiglu_halves_kept")],
    "tt": [None, Epilogue.parse("swiglu_halves_gradient")],
}

_PROGRAM = """
import gc, json, os, warnings
gc.disable()  # as in `fresh_processes`
import torch
gc.freeze(); gc.enable()
from nvgemm_runtime.launch.loading.loader import LoadedKernel
from nvgemm_runtime.moe import experts

warnings.simplefilter("ignore")  # torch computes what no kernel serves
launched = []
attribute = LoadedKernel.__getattribute__

def watched(kernel, name):
    if name == "launch":
        epilogue = attribute(kernel, "kernel").signature.epilogue
        launched.append(epilogue and epilogue.name)
    return attribute(kernel, name)

LoadedKernel.__getattribute__ = watched
torch.manual_seed(0)
given = [
    torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
    for shape in ((18, 32), (4, 64, 32), (4, 32, 32))
]
offsets = torch.tensor([5, 5, 6, 18], dtype=torch.int32)

def step(function):
    if not os.environ["TEST_GRADIENTS"]:
        with torch.no_grad():
            return [function(*given, offsets)]
    out = function(*given, offsets)
    return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]

wanted = step(experts)
launched.clear()
found = step(torch.compile(experts, fullgraph=True))
counters = torch._dynamo.utils.counters
print(json.dumps({
    "launched": launched,
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "joint_hits": counters["aot_autograd"]["autograd_cache_hit"],
    "error": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted)),
}))
gc.freeze()
"""


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache directory for every process of these tests."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernels(KERNELS, (), tmp_path_factory.mktemp("bundle"), kernel_cache)


def ran(
    caches: Path, bundle: Path | None = None, *, gradients: bool = True, **variables: str
) -> dict[str, Any]:
    """What a step gives in a process of its own, or its forward without gradients."""
    own = {name: one for name, one in os.environ.items() if not name.startswith("NVGEMM_AOT")}
    own |= {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    own |= {"TEST_GRADIENTS": "yes" if gradients else ""}
    own |= {"NVGEMM_AOT_BUNDLES": "" if bundle is None else str(bundle), **variables}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer.pop("error") <= 2**-5
    return answer


GATED = ["swiglu_halves_kept", None, "swiglu_halves_gradient", None]


@pytest.fixture(scope="module")
def cold(caches: Path, bundle: Path) -> dict[str, Any]:
    """The first process."""
    return ran(caches, bundle)


def test_a_cold_start_compiles_both_graphs(cold: dict[str, Any]) -> None:
    assert cold == {"launched": GATED, "hits": 0, "misses": 2, "joint_hits": 0}


def test_a_warm_start_runs_the_kernels_from_the_cache(
    cold: dict[str, Any], caches: Path, bundle: Path
) -> None:
    warm = ran(caches, bundle)
    assert warm["launched"] == GATED
    assert (warm["misses"], warm["joint_hits"]) == (0, 1)  # the latter by AOTAutograd


def test_with_the_bundle_removed_they_are_other_graphs(cold: dict[str, Any], caches: Path) -> None:
    assert ran(caches) == {"launched": [], "hits": 0, "misses": 2, "joint_hits": 0}


def test_turned_off_they_are_other_graphs(cold: dict[str, Any], caches: Path, bundle: Path) -> None:
    """Products by themselves are launched by their operators, which are no part of the mode."""
    found = ran(caches, bundle, NVGEMM_AOT="off")
    assert found == {"launched": [None] * 4, "hits": 0, "misses": 2, "joint_hits": 0}


def test_a_graph_without_gradients_is_cached_before_kernels_are_chosen(
    caches: Path, bundle: Path
) -> None:
    """By AOTAutograd, too."""
    gated = ["swiglu_halves", None]
    for hits, with_kernels, launched in ((0, True, gated), (1, True, gated), (0, False, [])):
        found = ran(caches, bundle if with_kernels else None, gradients=False)
        seen = {"launched": launched, "hits": hits, "misses": 1 - hits, "joint_hits": hits}
        assert found == seen
