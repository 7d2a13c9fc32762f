"""benchmarks/emulation/mutants: changed kernels in child processes, on two problems each."""

from __future__ import annotations

import functools
import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.emulation.mutant_runs import FAULT, Job, RecordedKernel, load_kernels, run_job
from benchmarks.emulation.mutants import KILLED, main, mutants, removals, run_all, summary
from benchmarks.emulation.recorded_kernels import record_kernel, start_recording, two_problems
from deadly_launch import DeadlyLaunch
from fake_provider import candidate
from handwritten_kernels import aligned, module
from nvgemm_aot.emulator.checking.kernel_check import KernelTask
from nvgemm_aot.emulator.machine.global_memory import Region
from nvgemm_aot.emulator.machine.launch import Launch
from nvgemm_aot.emulator.mutants.changes import Kind
from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch, record
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.pipeline.workers import Workers
from nvgemm_runtime.gemm.problem import Signature
from repository import ROOT

BODY = """
ld.param.u64 %d1, [a0];
ld.param.u32 %r9, [a1];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
cvt.u64.u32 %d2, %r2;
add.u64 %d3, %d1, %d2;
bar.sync 0;
setp.lt.u32 %p1, %r1, %r9;
@%p1 st.global.b32 [%d3], %r1;
"""
"""Writes the numbers of as many threads as the second parameter says."""


def launch_of(count: int) -> RecordedLaunch:
    result = aligned(64, np.uint32)
    result[:] = 99
    parameters = result.ctypes.data.to_bytes(8, "little") + count.to_bytes(4, "little")
    return record(
        parse(module(BODY, ".param .u64 a0, .param .u32 a1")),
        Launch(grid=(1, 1, 1), block=(64, 1, 1), parameters=parameters),
        [Region(address=result.ctypes.data, data=result.view(np.uint8), name="c")],
    )


@pytest.fixture
def kernel() -> RecordedKernel:
    return RecordedKernel(name="numbers", launches=(launch_of(64), launch_of(40)))


def place_of(kernel: RecordedKernel, text: str) -> int:
    instructions = kernel.launches[0].program.instructions
    (place,) = (place for place, each in enumerate(instructions) if each.text.startswith(text))
    return place


def saved(directory: Path, *kernels: RecordedKernel) -> Path:
    path = directory / "kernels.pickle"
    path.write_bytes(pickle.dumps(list(kernels)))
    return path


def test_a_survivor_survives_both_problems(kernel: RecordedKernel, tmp_path: Path) -> None:
    """Without its predicate, the store is right for the first problem alone."""
    place = place_of(kernel, "st.global")
    jobs = [Job(0, place, Kind.PREDICATE, seed) for seed in range(20)]
    ends = []
    for launches in (kernel.launches[:1], kernel.launches):
        load_kernels(saved(tmp_path, RecordedKernel(name="numbers", launches=launches)))
        ends.append({run_job(job)["outcome"] for job in jobs})
    assert ends == [{"survived", "wrong result"}, {"wrong result"}]


def test_a_mutant_that_kills_its_process_is_recorded(
    kernel: RecordedKernel, tmp_path: Path
) -> None:
    launch = kernel.launches[0]
    deadly = RecordedKernel(name="deadly", launches=(DeadlyLaunch(**vars(launch)),))
    kernels = [kernel, deadly]
    jobs = [Job(0, 6), Job(1, 6), Job(0, 4, Kind.REMOVED)]
    records = list(run_all(saved(tmp_path, *kernels), kernels, jobs, processes=2))
    (killed,) = (each for each in records if each["kernel"] == "deadly")
    assert killed["outcome"] == KILLED
    assert "SIGABRT" in killed["message"]
    others = sorted(each["outcome"] for each in records if each is not killed)
    assert others == ["survived", "wrong result"]


def test_a_redundant_barrier_is_removed_and_explained(
    kernel: RecordedKernel, tmp_path: Path
) -> None:
    load_kernels(saved(tmp_path, kernel))
    (job,) = removals([kernel])
    found = run_job(job)
    assert found["instruction"] == "bar.sync 0"
    assert found["outcome"] == "survived"
    assert found["reason"] == "it orders nothing that is not ordered already"


def test_a_run_goes_on_with_its_own_verdicts(kernel: RecordedKernel, tmp_path: Path) -> None:
    """Verdicts on other changes stay in the file, and are not counted."""
    path, verdicts = saved(tmp_path, kernel), tmp_path / "verdicts.jsonl"
    other = {"kernel": "numbers", "line": 1, "outcome": "error"}
    verdicts.write_text(json.dumps(other) + "\n")
    options = ["--kernels", str(path), "--fences", "--verdicts", str(verdicts)]
    for _ in range(2):
        done = CliRunner().invoke(main, options)
        assert done.exit_code == 0, done.output
        counts = json.loads(done.stdout)
        assert (counts["changes"], counts["outcomes"]) == (1, {"survived": 1})
        assert len(verdicts.read_text().splitlines()) == 2


@pytest.mark.parametrize("damaged", ["kernels", "verdicts"])
def test_files_of_other_kinds_are_refused(
    kernel: RecordedKernel, tmp_path: Path, damaged: str
) -> None:
    files = {"kernels": saved(tmp_path, kernel), "verdicts": tmp_path / "verdicts.jsonl"}
    files[damaged].write_text("neither")
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    done = CliRunner().invoke(main, [*options, "--fences"])
    assert done.exit_code == 1
    assert str(files[damaged]) in done.output


def test_mutants_change_code_that_ran_and_can_be_drawn_again(kernel: RecordedKernel) -> None:
    drawn = list(mutants([kernel, kernel], 40, seed=3))
    assert drawn == list(mutants([kernel, kernel], 40, seed=3))
    assert {job.kernel for job in drawn} == {0, 1}
    assert all(kernel.counts[job.place] for job in drawn)


def test_unknown_ends_count_as_not_caught() -> None:
    records = [
        {"kernel": "a", "outcome": "error"},
        {"kernel": "a", "outcome": "not PTX"},
        {"kernel": "a", "outcome": KILLED},
        {"kernel": "b", "outcome": FAULT},
        {"kernel": "b", "outcome": "survived", "survival": "same effects on both problems"},
        {"kernel": "b", "outcome": "survived", "survival": "the emulator does not check it"},
    ]
    counts = summary(records)
    assert (counts["changes"], counts["kernels"]) == (6, 2)
    assert (counts["caught_share"], counts["caught_share_of_all"]) == (0.25, 0.2)


def test_problems_have_several_tiles_and_a_pipeline_that_comes_round() -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    wide, deep = two_problems(candidate("one", signature, tile=(128, 64, 64)))
    assert (wide.m, wide.n, wide.k) == (129, 120, 184)
    assert (deep.m, deep.n) == (128, 64)
    assert deep.k > 64 * 9, "nine stages fit into shared memory"


def test_the_emulated_device_starts_before_torch() -> None:
    """Torch for CUDA loads the machine's own driver, beside which the stand-in cannot start."""
    code = """
import sys
from benchmarks.emulation import recorded_kernels
from nvgemm_aot.emulator.session import emulated_device
emulated_device.start = lambda *_: print("torch" in sys.modules)
recorded_kernels.start_recording("B200", "cu13")
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_records_a_kernel_and_replays_it_elsewhere(
    emulated_kernel: KernelTask, tmp_path: Path
) -> None:
    """A child process has recorded the kernel, whose memory and device end with it."""
    task = replace(emulated_kernel, problems=two_problems(emulated_kernel.kernel))
    swapped = re.sub(
        r"(cvt\.rn\.bf16x2\.f32\s+%\w+), (%\w+), (%\w+);", r"\1, \3, \2;", task.ptx, count=1
    )
    wrong = replace(task, ptx=swapped)
    start = functools.partial(start_recording, task.device, task.target.cuda)
    with Workers(1, record_kernel, start) as workers:
        found = {one.ptx: outcome for one, outcome in workers.run([task, wrong])}
    assert "elements are wrong" in str(found[swapped])
    kernel = found[task.ptx]
    assert isinstance(kernel, RecordedKernel)
    assert kernel.name.startswith(task.kernel.operator)
    assert len(kernel.launches) == 2
    for launch in kernel.launches:
        execution = launch.replay(launch.program)
        assert (execution.findings, launch.differing_bytes()) == ([], 0)
        assert execution.counts == launch.execution.counts
