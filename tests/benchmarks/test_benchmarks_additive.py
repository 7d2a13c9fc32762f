"""benchmarks/additive: its models, its manifest and its verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks.additive import __main__ as additive
from benchmarks.additive import models, pool
from benchmarks.additive import table as additive_table
from benchmarks.shared.compiling import count_gemms, gemm_calls
from benchmarks.shared.resuming import Results
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_runtime.gemm.epilogues import BIAS, Epilogue
from nvgemm_runtime.gemm.problem import Problem
from repository import ROOT

# Fake tensors replace functions of torch for the rest of a process, so this runs in its own.
_COUNT_GEMMS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.additive import models, worker
from nvgemm_aot.workload.fake_run import fake_tensors
from nvgemm_aot.workload.called_gemms import GemmCalls

found = {}
with fake_tensors():
    for name, model in models.MODELS.items():
        for batch in models.BATCHES:
            module, inputs = models.build(name, "cuda", batch=batch)
            with GemmCalls() as calls:
                worker.run(module, module, inputs, model.training)
            assert not calls.undeclarable, calls.undeclarable
            found.setdefault(name, {})[batch] = [problem.key for problem in calls.problems]
print(json.dumps(found))
"""


@cache
def called() -> dict[str, dict[str, list[str]]]:
    """Returns keys of the GEMMs that each model calls, by batch."""
    command = [sys.executable, "-c", _COUNT_GEMMS, str(ROOT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    return found


CALLED = {Epilogue.parse("bias_gelu_tanh"): BIAS, Epilogue.parse("swiglu_halves"): None}
"""Problem that a model calls in place of a kernel with this epilogue, before an activation."""


def as_called(problem: Problem) -> Problem:
    """Returns the GEMM that a model calls in place of a fused one."""
    epilogue = problem.signature.epilogue
    called_with = CALLED.get(epilogue, epilogue) if epilogue else None
    return replace(problem, signature=replace(problem.signature, epilogue=called_with))


@pytest.mark.slow
def test_manifest_declares_what_models_compute_at_every_batch_and_nothing_else() -> None:
    assert len(called()) == 13
    manifest = load_manifest(ROOT / "benchmarks/additive/manifest.yaml")
    assert {target.target.arch for target in manifest.targets} == {"sm_90a"}
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
    """Builds a case from each process' least time per side."""
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
        "reports": [{"with": report, "without": report}] * len(times),
    }


def test_a_model_that_is_slower_in_every_process_is_slower() -> None:
    """An H200's times while choices were timed with host time."""
    cases = [case([153.9, 162.7, 158.0], [136.8, 135.2, 136.0]), case([100.0] * 3, [100.0] * 3)]
    additive_table.judge(cases)
    assert [one["modes"]["graphs"]["slower"] for one in cases] == [True, False]
    text = "\n".join(additive_table.table(cases))
    assert "slower than 1% beyond noise: six_linears 24 (1 of 2)" in text
    assert "of 6 processes that call bundled kernels, 3 took over 2% longer, at most 1.2034" in text


def test_what_compiling_anew_changes_by_itself_is_no_verdict() -> None:
    cases = [case([100.0, 110.0, 120.0], [100.0, 112.0, 112.0])]
    additive_table.judge(cases)
    assert not cases[0]["modes"]["graphs"]["slower"]
    assert any("none (0 of 1)" in line for line in additive_table.table(cases))


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
    """Answers like a worker; may fail or end at a model."""

    def __init__(self, fails_at: str = "", ends_at: str = "") -> None:
        self.fails_at, self.ends_at = fails_at, ends_at
        self.has_ended = False
        self.compiled: list[tuple[str, int, str]] = []
        self.timed: list[tuple[str, int, str]] = []

    def ask(self, question: dict[str, Any]) -> Any:
        model, batch = question.get("time") or question["compile"]
        self.has_ended |= model == self.ends_at
        if self.has_ended:
            raise click.ClickException("ended")
        if model == self.fails_at:
            return {"failure": "a compiled result is wrong"}
        if "time" in question:
            self.timed.append((model, batch, question["mode"]))
            return {"with": [1.0], "without": [1.0]}
        self.compiled.append((model, batch, question["first"]))
        return {side: {"count": {}} for side in additive_table.SIDES}


def forever() -> pool.Deadline:
    return pool.Deadline(at_s=None, timing_s=1.0)


def pool_of(processes: list[Process]) -> pool.Pool:
    """Returns a pool with two draws."""
    return pool.Pool(cast(Any, processes), 2, ["calls", "graphs"])


CASES = [
    pool.Case(backends="ATEN", model=model, batch=batch)
    for batch in (1, 2)
    for model in ("lm_head", "decode", "attention")
]


def test_each_case_is_compiled_and_timed_by_as_many_processes_as_there_are_draws() -> None:
    processes = [Process() for _ in range(4)]
    those = pool_of(processes)
    found = those.compile(CASES, forever())
    assert list(found) == CASES
    for number, case in enumerate(CASES):
        entry = those.time(number, case, found[case], 2, 1.0)
        assert entry is not None
        assert [len(timed["times_us"]) for timed in entry["modes"].values()] == [2, 2]
        of_it = [
            one for p in processes for one in p.compiled if one[:2] == (case.model, case.batch)
        ]
        assert sorted(first for *_, first in of_it) == sorted(additive_table.SIDES)
    for process in processes:  # only what a process compiled can it time
        assert {one[:2] for one in process.timed} == {one[:2] for one in process.compiled}


def test_a_case_that_fails_is_left_out_and_the_others_go_on() -> None:
    processes = [Process(), Process(fails_at="decode"), Process()]
    those = pool_of(processes)
    found = those.compile(CASES, forever())
    assert set(those.failures) == {
        "ATEN/decode/1: a compiled result is wrong",
        "ATEN/decode/2: a compiled result is wrong",
    }
    assert list(found) == [case for case in CASES if case.model != "decode"]


def test_what_an_ended_process_compiled_is_not_timed() -> None:
    processes = [Process(), Process()]
    those = pool_of(processes)
    found = those.compile(CASES, forever())
    processes[1].has_ended = True
    assert [those.time(n, case, found[case], 2, 1.0) for n, case in enumerate(CASES)] == [None] * 6
    assert those.failures[0] == "ATEN/lm_head/1: ended"


def test_after_some_failures_nothing_new_begins() -> None:
    processes = [Process(ends_at="lm_head"), Process(ends_at="lm_head")]
    those = pool_of(processes)
    assert those.compile(CASES, forever()) == {}
    assert pool.MAX_FAILURES <= len(those.failures) <= pool.MAX_FAILURES + 1
    assert not processes[0].compiled


def test_a_case_is_compiled_only_if_there_is_time_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(pool.time, "monotonic", lambda: now[0])
    deadline = pool.Deadline(at_s=100.0, timing_s=2.0)
    first, second, third, *_ = CASES
    assert deadline.admit(first)
    deadline.note_compiled(first, 30.0)
    now[0] = 67.0  # 30 s to compile, at most, and 4 to time two
    assert not deadline.admit(second)
    now[0] = 65.0
    assert not deadline.admit(second), "what was said holds for all processes"
    assert deadline.admit(third)
    now[0] = 99.0
    assert deadline.admit(first), "another process has compiled it"
    deadline.note_compiled(third, 5.0)
    for case in (first, second, third):
        deadline.note_timed(case, 0.0)
    now[0] = 92.0
    again = pool.Case(backends="ATEN", model="attention", batch=2)
    assert deadline.admit(again), "a model is expected to take what it took"
    now[0] = 93.5
    assert not deadline.admit(pool.Case(backends="ATEN", model="attention", batch=8))
    deadline.note_timed(again, 4.0)  # twice as long as expected: so will others
    now[0] = 90.5
    assert deadline.admit(pool.Case(backends="ATEN", model="attention", batch=24))
    deadline.note_timed(pool.Case(backends="ATEN", model="attention", batch=24), 4.0)
    now[0] = 91.5
    assert not deadline.admit(pool.Case(backends="ATEN", model="attention", batch=96))


def test_a_thinned_choice_takes_every_model_and_as_many_at_each_batch() -> None:
    names, batches = list(models.MODELS), list(models.BATCHES)
    cases = additive.thinned("ATEN", names, batches, 3)
    assert {case.model for case in cases} == set(names)
    assert all(4 <= sum(case.batch == batch for case in cases) <= 5 for batch in batches)
    assert len(additive.thinned("ATEN", names, batches, 1)) == len(names) * len(batches)


@pytest.mark.slow
def test_it_goes_on_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on a CPU without any bundle, so both sides compute the same."""
    found = {**additive.environment(), "bundles": ["none"]}
    monkeypatch.setattr(additive, "environment", lambda: found)
    path = tmp_path / "a.json"
    options = "--device cpu --backends ATEN --batches 1 --draws 2 --processes 2 --rounds 2"

    def measure(models_: str, *more: str) -> str:
        arguments = ["measure", str(path), *options.split(), "--models", models_, *more]
        done = CliRunner().invoke(additive.main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    measure("bmm_attention")
    entries = Results.read(path, additive.WHAT).entries
    assert list(entries) == ["ATEN/bmm_attention/1"]
    assert len(entries["ATEN/bmm_attention/1"]["modes"]["calls"]["times_us"]) == 2
    output = measure("bmm_attention", "--resume", "--budget", "3600")
    assert "bmm_attention" in output
    assert "cases are left" not in output
    assert Results.read(path, additive.WHAT).entries == entries
