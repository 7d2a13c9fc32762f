"""benchmarks/additive_models.py: what its models compute, and that additive.yaml declares it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmark_modules import BENCHMARKS, load
from nvgemm_aot.manifest import load_manifest
from nvgemm_runtime.element_types import DType
from nvgemm_runtime.problem import Problem

(models,) = load("additive_models")

# Fake tensors replace functions of torch for the rest of a process, so this runs in its own.
_COUNT_GEMMS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import additive, additive_models
from nvgemm_aot.fake_cuda import fake_tensors
from nvgemm_aot.gemm_calls import GemmCalls

found = {}
with fake_tensors():
    for name, model in additive_models.MODELS.items():
        for batch in additive_models.BATCHES:
            module, inputs = additive_models.build(name, "cuda", batch=batch)
            with GemmCalls() as calls:
                additive.run(module, module, inputs, model.training)
            assert not calls.others, calls.others
            found.setdefault(name, {})[batch] = [problem.key for problem in calls.problems]
print(json.dumps(found))
"""


@cache
def called() -> dict[str, dict[str, list[str]]]:
    """Keys of the GEMMs that each model calls, by its batch."""
    command = [sys.executable, "-c", _COUNT_GEMMS, str(BENCHMARKS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    return found


def as_served_on_hopper(problem: Problem) -> str:
    """sm_90a has no kernel with an epilogue: of a sum, a kernel computes the product in fp32."""
    signature = problem.signature
    if signature.epilogue is None:
        return problem.key
    return replace(problem, signature=replace(signature, epilogue=None, out=DType.FP32)).key


def test_manifest_declares_what_ten_models_compute_at_every_batch_and_nothing_else() -> None:
    assert len(called()) == 10
    manifest = load_manifest(BENCHMARKS / "additive.yaml")
    assert [target.target.arch for target in manifest.targets] == ["sm_90a"]
    declared = {entry.problem.key for entry in manifest.declared}
    needed = {
        as_served_on_hopper(Problem.parse(key))
        for batches in called().values()
        for keys in batches.values()
        for key in keys
    }
    assert needed - declared == set()
    assert declared - needed == set()


def test_six_linears_are_those_that_were_slower_under_cuda_graphs() -> None:
    sizes = [(5120, 2560), (7168, 5120), (5120, 7168), (2560, 5120), (13824, 2560), (2560, 13824)]
    assert called()["six_linears"]["24"] == [
        f"mm/tn/bf16xbf16/fp32/bf16/m24n{n}k{k}" for n, k in sizes
    ]


@pytest.mark.parametrize("name", models.MODELS)
def test_first_extent_of_the_inputs_grows_with_the_batch(name: str) -> None:
    _, one = models.build(name, "cpu", batch=1)
    module, three = models.build(name, "cpu", batch=3)
    for small, large in zip(one, three, strict=True):
        assert large.shape == (3 * small.shape[0], *small.shape[1:])
    assert module(*three).shape[0] == three[0].shape[0]


@pytest.mark.parametrize("name", models.MODELS)
def test_weights_and_inputs_are_the_same_each_time(name: str) -> None:
    module, inputs = models.build(name, "cpu", batch=2)
    again, same = models.build(name, "cpu", batch=2)
    _, exact = models.build(name, "cpu", batch=2, exact=True)
    assert all(map(torch.equal, inputs, same))
    assert all(map(torch.equal, module.state_dict().values(), again.state_dict().values()))
    assert all(torch.equal(one.float(), other) for one, other in zip(inputs, exact, strict=True))


def test_usual_batch_is_a_declared_one_and_an_empty_batch_is_refused() -> None:
    assert models.USUAL_BATCH in models.BATCHES
    with pytest.raises(ValueError, match="batch of decode must be 1 or more, not 0"):
        models.build("decode", "cpu", batch=0)
