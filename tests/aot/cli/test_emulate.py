"""``nvgemm-aot emulate``: a real kernel, right and with faults planted in its PTX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvgemm_aot.cli.emulate.emulation_rows import emulation_document, join, rows_text, summary_text
from nvgemm_aot.cli.main import main
from nvgemm_aot.emulator.checking import child_processes, manifest_tasks
from nvgemm_aot.emulator.checking.child_processes import check_kernels, code_digest
from nvgemm_aot.emulator.checking.kernel_check import KernelReport, KernelTask, Verdict
from nvgemm_aot.emulator.checking.manifest_tasks import (
    PlannedKernel,
    PreparedKernels,
    manifest_kernels,
)
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.target import Target
from repository import TESTS

MANIFEST = """
version: 1
name: emulated
targets: [sm_100f]
providers: [cutlass_operators]
candidates: 2
gemms:
  - {dtype: bf16, mnk: [[8, 4096, 4096]]}
"""


def _written(directory: Path) -> Path:
    path = directory / "mine.yaml"
    path.write_text(MANIFEST)
    return path


Outcome = tuple[KernelTask, KernelReport]


@pytest.fixture(scope="module")
def outcomes(emulated_kernel: KernelTask) -> dict[str, Outcome]:
    """A kernel as it is, and with faults, each in one process of its own device."""
    task = emulated_kernel
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
        "right": replace(task, seeds=(0, 1)),
        "repeated": replace(task, seeds=(1,), ptx=f"{task.ptx}\n"),
        "wrong": replace(task, ptx=swapped),
        "unwritten": replace(task, ptx=greatest, problems=task.problems[3:4]),
        "unknown": replace(task, ptx=task.ptx.replace("tcgen05.mma", "tcgen05.mad")),
        "other target": replace(task, ptx=task.ptx.replace("sm_100f", "sm_80")),
    }
    names = {one.ptx: name for name, one in tasks.items()}
    reports = check_kernels(list(tasks.values()), jobs=1)
    return {names[one.ptx]: (one, report) for one, report in reports}


def test_a_right_kernel_is_right_at_every_size(outcomes: dict[str, Outcome]) -> None:
    task, report = outcomes["right"]
    assert [run.reason for run in report.runs] == [None] * 2 * len(task.problems)
    assert all(run.launches == 1 and run.warp_instructions > 0 for run in report.runs)
    assert 0.5 < report.share_run <= 1
    assert len(report.idle) < report.instructions


def test_a_run_is_repeated_by_its_seed(outcomes: dict[str, Outcome]) -> None:
    first, again = (
        [
            (run.problem, run.operands, run.warp_instructions)
            for run in outcomes[name][1].runs
            if run.seed == 1
        ]
        for name in ("right", "repeated")
    )
    assert first == again
    assert len(again) == 5


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
    document = emulation_document([outcomes["right"], outcomes["wrong"]], ())
    text = rows_text(document)
    assert "5, up to m" in text
    assert "elements are wrong" in text
    assert summary_text(join([document], 2)) == (
        "1 of 2 kernels right: PTX executed functionally on a CPU; not run on a GPU"
    )
    assert "1 of 2 kernels right, 3 not emulated: " in summary_text(join([document], 5))


def test_an_interrupted_run_reports_what_it_has(
    outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(*_: object, **__: object) -> Iterator[Outcome]:
        yield outcomes["right"]
        if len(parts) == 2:
            raise KeyboardInterrupt

    def prepared(part: tuple[PlannedKernel, ...], *_: object, **__: object) -> PreparedKernels:
        parts.append(part)
        return PreparedKernels(tasks=(), failures=())

    parts: list[tuple[PlannedKernel, ...]] = []
    planned = manifest_kernels(_written(tmp_path), Cache(tmp_path / "cache"))[:1] * 200
    monkeypatch.setattr(manifest_tasks, "provider_kernels", lambda *_, **__: planned)
    monkeypatch.setattr(manifest_tasks, "prepare", prepared)
    monkeypatch.setattr(child_processes, "check_kernels", check)
    arguments = ["emulate", "--provider", "p", "-j1", "--cache-dir", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 130
    assert [len(part) for part in parts] == [32, 32]
    assert result.stdout.count("5, up to m") == 2
    assert result.stdout.splitlines()[-1].startswith("2 of 2 kernels right, 198 not emulated: ")
    assert "200 kernels for 1 signature, in 7 parts" in result.stderr
    assert "interrupted; compiled kernels are in the cache" in result.stderr
    parts.clear()
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert document["planned"] == 200
    assert [kernel["verdict"] for kernel in document["kernels"]] == ["right", "right"]


PROVIDER = """
import dataclasses, sys
from tiny_gemm import TinyGemm
from nvgemm_aot.providers.interface import Enumeration

class Mine(TinyGemm):
    name = "mine:Mine"
    def enumerate(self, signature, target):
        found = super().enumerate(signature, target)
        if signature.key != "mm/tn/bf16xbf16/fp32/bf16":
            return Enumeration(absence="another signature")
        right = found.candidates[0]
        names = "wrong_tile64x64x32", "none_tile64x64x32"
        others = [dataclasses.replace(right, operator=name) for name in names]
        return Enumeration(candidates=(right, *others))
    def compile(self, candidate, target):
        if candidate.operator.startswith("none"):
            raise RuntimeError("no code")
        if candidate.operator.startswith("wrong"):
            import wrong_kernel
            sys.modules["tiny_gemm.kernel"] = wrong_kernel
        return super().compile(candidate, target)
"""


@pytest.mark.slow
def test_a_providers_right_and_wrong_kernels_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROVIDER)
    package = TESTS / "provider_package"
    text = (package / "tiny_gemm" / "kernel.py").read_text()
    steps = "range(cute.size(a_tile, mode=[2]))"
    assert steps in text
    wrong = text.replace(steps, "range(cute.size(a_tile, mode=[2]) - 1)")
    (tmp_path / "wrong_kernel.py").write_text(wrong)
    arguments = ["emulate", "--provider", "mine:Mine", "--target", "sm_90a", "-j1", "--json"]
    command = [sys.executable, "-m", "nvgemm_aot", *arguments, "--cache-dir", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), str(package)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 27, done.stderr
    document = json.loads(done.stdout)
    verdicts = {row["operator"]: row["verdict"] for row in document["kernels"]}
    assert verdicts == {"tiny_gemm_tile64x64x32": "right", "wrong_tile64x64x32": "wrong"}
    (failure,) = document["not_compiled"]
    assert "raised RuntimeError: no code" in failure["reason"]
    assert "1 of 2 emulated kernels failed; see their rows" in done.stderr


def test_the_last_line_counts_suspects(outcomes: dict[str, Outcome]) -> None:
    task, report = outcomes["right"]
    first = replace(report.runs[0], verdict=Verdict.SUSPECT, reason="reads what nobody wrote")
    suspect = replace(report, runs=(first, *report.runs[1:]))
    document = emulation_document([(task, report), (task, suspect)], ())
    assert "suspect: " in rows_text(document)
    assert "2 of 2 kernels right, 1 of them suspect: PTX executed" in summary_text(
        join([document], 2)
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
