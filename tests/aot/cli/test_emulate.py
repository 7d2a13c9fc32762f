"""``nvgemm-aot emulate``: a real kernel, right and with faults planted in its PTX."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvgemm_aot.cli.emulate.emulation_rows import emulation_document, emulation_text
from nvgemm_aot.cli.main import main
from nvgemm_aot.emulator.checking.child_processes import check_kernels, code_digest
from nvgemm_aot.emulator.checking.kernel_check import KernelReport, KernelTask
from nvgemm_aot.emulator.checking.manifest_tasks import manifest_kernels, prepare
from nvgemm_aot.pipeline.pipeline import BuildResult
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.target import Target

MANIFEST = """
version: 1
name: emulated
targets: [sm_100f]
providers: [cutlass_operators]
candidates: 2
gemms:
  - {dtype: bf16, mnk: [[8, 4096, 4096]]}
"""
"""Kernels that `real_build` has compiled."""

Outcome = tuple[KernelTask, KernelReport]


@pytest.fixture(scope="module")
def outcomes(
    real_build: BuildResult,
    kernel_cache: Cache,
    alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outcome]:
    """A kernel as it is, and with faults, each in one process of its own device."""
    manifest = tmp_path_factory.mktemp("emulated") / "mine.yaml"
    manifest.write_text(MANIFEST)
    with alone():
        planned = manifest_kernels(manifest, kernel_cache)
        prepared = prepare(planned, kernel_cache, jobs=1, seeds=(0,))
    assert prepared.failures == ()
    task = next(one for one in prepared.tasks if one.kernel.design.scheduler != "one_tile")
    swapped = re.sub(
        r"(cvt\.rn\.bf16x2\.f32\s+%\w+), (%\w+), (%\w+);", r"\1, \3, \2;", task.ptx, count=1
    )
    assert swapped != task.ptx
    greatest = re.sub(
        r"(cvt\.rn\.bf16x2\.f32\s+%\w+, (%\w+), %\w+;)",
        "{ .reg .b32 %at, %other; mov.b32 %at, __dynamic_shmem__0; "
        r"ld.shared.b32 %other, [%at+100000]; max.f32 \2, \2, %other; } \1",
        task.ptx,
        count=1,
    )
    assert greatest != task.ptx
    tasks = {
        "right": task,
        "wrong": replace(task, ptx=swapped),
        "unwritten": replace(task, ptx=greatest, problems=task.problems[-1:]),
        "unknown": replace(task, ptx=task.ptx.replace("tcgen05.mma", "tcgen05.mad")),
        "other target": replace(task, ptx=task.ptx.replace("sm_100f", "sm_80")),
    }
    names = {one.ptx: name for name, one in tasks.items()}
    reports = check_kernels(list(tasks.values()), jobs=1)
    return {names[one.ptx]: (one, report) for one, report in reports}


def test_a_right_kernel_is_right_at_every_size(outcomes: dict[str, Outcome]) -> None:
    task, report = outcomes["right"]
    assert [run.reason for run in report.runs] == [None] * len(task.problems)
    assert all(run.launches == 1 and run.warp_instructions > 0 for run in report.runs)
    assert 0.5 < report.share_run <= 1
    assert len(report.idle) < report.instructions


def test_a_planted_fault_makes_results_wrong(outcomes: dict[str, Outcome]) -> None:
    report = outcomes["wrong"][1]
    assert report.verdict.value == "wrong"
    assert report.first_fault is not None
    assert re.search(r"\d+ of \d+ elements are wrong; that at", report.first_fault.reason or "")


def test_a_result_that_unwritten_memory_changes_is_wrong(outcomes: dict[str, Outcome]) -> None:
    """A maximum ignores the NaN that emulated memory begins with."""
    report = outcomes["unwritten"][1]
    assert report.verdict.value == "wrong"
    assert report.first_fault is not None
    assert report.first_fault.reason == (
        "whole numbers: the result depends on memory that nobody has written"
    )


@pytest.mark.parametrize(("name", "said"), [("unknown", "tcgen05.mad"), ("other target", "sm_80")])
def test_ptx_that_is_not_known_is_an_error_that_names_it(
    name: str, said: str, outcomes: dict[str, Outcome]
) -> None:
    report = outcomes[name][1]
    assert report.verdict.value == "error"
    assert report.first_fault is not None
    assert said in (report.first_fault.reason or "")
    assert report.share_run == 0


def test_a_row_says_what_was_emulated_and_each_fault(outcomes: dict[str, Outcome]) -> None:
    text = emulation_text(emulation_document([outcomes["right"], outcomes["wrong"]], ()))
    assert "4, up to m" in text
    assert "elements are wrong" in text
    assert text.endswith(
        "1 of 2 kernels right: PTX executed functionally on a CPU; not run on a GPU"
    )


def test_kernels_of_equal_ptx_but_for_the_target_are_the_same(
    outcomes: dict[str, Outcome],
) -> None:
    task = outcomes["right"][0]
    other = replace(task, target=Target(arch="sm_100a"), ptx=task.ptx.replace("sm_100f", "sm_100a"))
    assert code_digest(other) == code_digest(task)
    assert code_digest(outcomes["wrong"][0]) != code_digest(task)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a MANIFEST, a --provider, or both"),
        (("mine.yaml", "--target", "sm_100f"), "--target cannot be combined with MANIFEST"),
        (("--provider", "quack", "--declared-sizes"), "--declared-sizes needs MANIFEST"),
        (("mine.yaml", "--seeds", "0"), "--seeds"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["emulate", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_targets_with_other_host_code_are_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "arm.yaml"
    manifest.write_text(MANIFEST.replace("[sm_100f]", "[{arch: sm_100f, platform: linux_aarch64}]"))
    result = CliRunner().invoke(main, ["emulate", str(manifest), "--cache-dir", str(tmp_path)])
    assert result.exit_code == 11
    assert "no target is for linux_x86_64" in result.output
