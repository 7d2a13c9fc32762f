"""benchmarks/additive: what its models compute, that its manifest declares it, its verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from typing import Any, cast

import click
import pytest
import torch

from benchmarks.additive import __main__ as additive
from benchmarks.additive import models, pool
from benchmarks.additive import table as additive_table
from benchmarks.shared.compiling import count_gemms, gemm_calls
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.types import Epilogue
from repository import ROOT

# Fake tensors replace functions of torch for the rest of a process, so this runs in its own.
_COUNT_GEMMS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.additive import models, worker
from nvgemm_aot.workload.fake_run import fake_tensors
from nvgemm_aot.workload.dispatch import GemmCalls

found = {}
with fake_tensors():
    for name, model in models.MODELS.items():
        for batch in models.BATCHES:
            module, inputs = models.build(name, "cuda", batch=batch)
            with GemmCalls() as calls:
                worker.run(module, module, inputs, model.training)
            assert not calls.others, calls.others
            found.setdefault(name, {})[batch] = [problem.key for problem in calls.problems]
print(json.dumps(found))
"""


@cache
def called() -> dict[str, dict[str, list[str]]]:
    """Keys of the GEMMs that each model calls, by its batch."""
    command = [sys.executable, "-c", _COUNT_GEMMS, str(ROOT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    return found


CALLED = {Epilogue.BIAS_GELU_TANH: Epilogue.BIAS, Epilogue.SWIGLU_HALVES: None}
"""What a model calls for what a kernel with this epilogue computes, an activation behind it."""


def as_called(problem: Problem) -> Problem:
    """The GEMM that a model calls where a kernel computes it with what follows."""
    epilogue = problem.signature.epilogue
    called_with = CALLED.get(epilogue, epilogue) if epilogue else None
    return replace(problem, signature=replace(problem.signature, epilogue=called_with))


@pytest.mark.slow
def test_manifest_declares_what_models_compute_at_every_batch_and_nothing_else() -> None:
    assert len(called()) == 13
    manifest = load_manifest(ROOT / "benchmarks/additive/manifest.yaml")
    assert [target.target.arch for target in manifest.targets] == ["sm_90a"]
    declared = {entry.problem for entry in manifest.declared}
    needed = {
        Problem.parse(key)
        for batches in called().values()
        for keys in batches.values()
        for key in keys
    }
    assert needed <= declared
    assert {as_called(problem) for problem in declared} == needed


@pytest.mark.slow
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


def case(
    with_bundles: list[float], without_bundles: list[float], model: str = "six_linears"
) -> dict[str, Any]:
    """A model's times by process: the least that each process saw of each side."""
    report = {"count": {"nvgemm": 1, "aten": 2, "triton": 3}}
    times = [
        {"with": [one, one + 5], "without": [other + 5, other]}
        for one, other in zip(with_bundles, without_bundles, strict=True)
    ]
    return {
        "model": model,
        "batch": 24,
        "backends": "ATEN",
        "modes": {"graphs": {"times_us": times}},
        "reports": [{"with": report, "without": report}],
    }


def test_a_model_that_is_slower_in_every_process_is_slower() -> None:
    """What was seen on an H200 before choices were timed by the GPU's part alone."""
    cases = [case([153.9, 162.7, 158.0], [136.8, 135.2, 136.0]), case([100.0] * 3, [100.0] * 3)]
    additive_table.judge(cases)
    assert [one["modes"]["graphs"]["slower"] for one in cases] == [True, False]
    text = "\n".join(additive_table.table(cases))
    assert "slower than 1% beyond noise: six_linears 24 over ATEN (1 of 2)" in text


def test_what_compiling_anew_changes_by_itself_is_no_verdict() -> None:
    cases = [case([100.0, 110.0, 120.0], [100.0, 112.0, 112.0])]
    additive_table.judge(cases)
    assert not cases[0]["modes"]["graphs"]["slower"]
    assert "none (0 of 1)" in additive_table.table(cases)[-1]


def test_a_process_that_is_slower_on_both_sides_adds_no_noise() -> None:
    cases = [case([103.0, 206.0, 412.0], [100.0, 200.0, 400.0])]
    additive_table.judge(cases)
    assert cases[0]["modes"]["graphs"]["slower"]


def test_processes_that_agree_by_chance_do_not_hide_the_usual_noise() -> None:
    alike = case([103.0, 103.0, 103.0], [100.0, 100.0, 100.0])
    noisy = [case([100.0, 104.0, 108.0], [104.0, 100.0, 108.0]) for _ in range(5)]
    additive_table.judge([alike, *noisy])
    assert not alike["modes"]["graphs"]["slower"]
    additive_table.judge([alike])
    assert alike["modes"]["graphs"]["slower"]


def test_calls_of_bundled_kernels_are_counted_whatever_they_compute() -> None:
    code = """
nvgemm_mm_0123456789ab = nvgemm_aot_gemm(torch.mm, 'id', 'a wheel', (0, 1), False)
nvgemm_mm_0123456789ab(a, b, out=c)
nvgemm_mm_by_m_0123456789ab(a, b, out=c)
nvgemm_addmm_relu_0123456789ab(a, b, c, out=d)
extern_kernels.mm(a, b, out=c)
triton_tem_fused_mm_0.run(a, b, c)
"""
    assert count_gemms(dict(gemm_calls(code))) == {"nvgemm": 3, "aten": 1, "triton": 1}


class Process:
    """Answers as a worker does, and ends at a model if told so."""

    def __init__(self, ends_at: str = "") -> None:
        self.ends_at = ends_at
        self.compiled: list[tuple[str, int, str]] = []
        self.timed: list[tuple[str, int, str]] = []

    def ask(self, question: dict[str, Any]) -> Any:
        if "time" in question:
            self.timed.append((*question["time"], question["mode"]))
            return {"with": [1.0], "without": [1.0]}
        model, batch = question["compile"]
        if model == self.ends_at:
            raise click.ClickException("ended")
        self.compiled.append((model, batch, question["first"]))
        return {side: {"versions": {"device": "H"}, "count": {}} for side in additive_table.SIDES}


def compiled_by(
    processes: list[Process], cases: list[pool.Case], end: float | None
) -> tuple[pool.Pool, dict[pool.Case, list[Any]]]:
    """What a pool of two draws makes of cases."""
    those = pool.Pool(cast(Any, processes), 2)
    return those, those.compile(cases, pool.Deadline(end))


CASES = [
    pool.Case(backends="ATEN", model=model, batch=batch)
    for batch in (1, 2)
    for model in ("lm_head", "decode", "attention")
]


def test_each_case_is_compiled_and_timed_by_as_many_processes_as_there_are_draws() -> None:
    processes = [Process() for _ in range(4)]
    those, found = compiled_by(processes, CASES, None)
    assert list(found) == CASES
    for number, case in enumerate(CASES):
        entry = those.time(number, case, found[case], 2, 1.0)
        assert [len(timed["times_us"]) for timed in entry["modes"].values()] == [2, 2]
        of_it = [
            one for p in processes for one in p.compiled if one[:2] == (case.model, case.batch)
        ]
        assert sorted(first for *_, first in of_it) == sorted(additive_table.SIDES)
    for process in processes:  # only what a process compiled can it time
        assert {one[:2] for one in process.timed} == {one[:2] for one in process.compiled}


def test_what_there_is_no_time_for_is_left_out() -> None:
    processes = [Process() for _ in range(2)]
    those, found = compiled_by(processes, CASES, time.monotonic() - 1)
    assert not found
    assert not those.failures
    assert not any(process.compiled for process in processes)


def test_what_an_ended_process_compiled_is_not_timed() -> None:
    processes = [Process(), Process(ends_at="decode"), Process()]
    those, found = compiled_by(processes, CASES, None)
    assert those.failures == ["ATEN/decode/1: ended"]
    workers = {case: {those._worker(CASES.index(case), draw) for draw in (0, 1)} for case in found}
    assert all(processes[1] not in used for used in workers.values())


def test_a_thinned_choice_takes_every_model_and_as_many_at_each_batch() -> None:
    names, batches = list(models.MODELS), list(models.BATCHES)
    cases = additive.thinned("ATEN", names, batches, 3)
    assert {case.model for case in cases} == set(names)
    assert all(4 <= sum(case.batch == batch for case in cases) <= 5 for batch in batches)
    assert len(additive.thinned("ATEN", names, batches, 1)) == len(names) * len(batches)
