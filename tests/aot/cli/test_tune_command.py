"""``nvgemm-aot tune``, and how measured rankings are shown."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import cpu_provider
from nvgemm_aot.cli.main import main
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.tuning.state import state_path
from tuning_bench import DictatedTimer, Lazy, MostlyLazy, bench, build, header_of

PROBLEMS = tuple(cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16))
TIMES = {"": [5000.0], "Cpu_16x16": [3000.0], "Cpu_8x32": [2000.0], "aten": [2500.0]}
SMALLEST_FIRST = {"": [2000.0], "Cpu_8x32": [3000.0], "Cpu_16x16": [5000.0], "aten": [2500.0]}
"""The kernel that pruning leaves anyway, for it takes operands of any alignment, is the fastest."""
NOISE = [2000.0, 2800.0, 2400.0, 3100.0, 2200.0, 2600.0, 3300.0]


@pytest.fixture(scope="module")
def path(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(PROBLEMS, tmp_path_factory.mktemp("tune"), kernel_cache)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tuned.nvgemm"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> DictatedTimer:
    """The command finds a device, whose times are these."""
    timer = DictatedTimer(TIMES)
    timer.watch_runs(monkeypatch)
    monkeypatch.setattr("nvgemm_aot.tuning.gpu.gpu_bench", lambda: bench(timer))
    return timer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def test_prints_a_table_and_what_was_written(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    result = run(path, "-o", output)
    assert result.exit_code == 0, result.output
    assert "Measuring 2 problems" in result.stderr
    for problem in PROBLEMS:
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(problem.key))
        assert line.split()[1:9] == ["bundled", "2.00", "±", "0.00", "2.50", "±", "0.00", "-"]
        assert "0.800" in line
    assert f"{output}: written, 2 of 2 problems measured, 3 kernels" in result.stdout


def test_json_has_every_time(path: Path, output: Path, timer: DictatedTimer) -> None:
    timer.times = SMALLEST_FIRST
    result = run(path, "-o", output, "--json", "--prune")
    document = json.loads(result.stdout)
    for problem in PROBLEMS:
        found = document["problems"][problem.key]
        assert [time for _, time, _ in found["kernels"]] == [2000, 3000, 5000]
        assert found["aten"] == [2500, 0]
        assert found["doubts"] == []
    assert len(document["pruned"]["dropped"]) == 1
    assert document["kernels"] == 2
    assert document["bytes"] == output.stat().st_size


def test_wrong_kernels_are_said_loudly(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    wrong = build(PROBLEMS, tmp_path / "b", kernel_cache, Lazy())
    result = run(wrong, "-o", output)
    assert result.exit_code == 0
    assert result.stdout.count("WRONG: kernel") == 1
    for problem in PROBLEMS:
        elements = problem.m * problem.n
        assert f"{problem.key}: {elements} of {elements} elements are wrong" in result.stdout


def test_pruning_says_what_it_saves_and_costs(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.times = SMALLEST_FIRST
    before = {kernel.id: kernel.span.stored_bytes for kernel in header_of(path).kernels}
    result = run(path, "-o", output, "--prune")
    (dropped,) = before.keys() - {kernel.id for kernel in header_of(output).kernels}
    said = f"pruned: kernels dropped: 1; bytes saved: {before[dropped]} B; speed lost: 0.0 %"
    assert said in result.stdout


def test_what_is_uncertain_is_marked_with_why(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.times = {**TIMES, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    result = run(path, "-o", output)
    assert "uncertain (2), and timed again wherever it is used: the fastest" in result.stdout
    assert " ?  " in result.stdout


def test_ctrl_c_says_how_to_go_on(path: Path, output: Path, timer: DictatedTimer) -> None:
    timer.interrupt_at = 5
    result = run(path, "-o", output)
    assert result.exit_code == 130
    assert f"interrupted; what was measured is in {state_path(output)}" in result.stderr
    assert "compiled" not in result.stderr
    timer.interrupt_at = None
    assert run(path, "-o", output).exit_code == 0


def test_sigterm_is_no_kill(
    path: Path, output: Path, timer: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    prepare = timer.prepare

    def terminated(calls: Any) -> Any:
        if len(timer.prepared) == 5:
            signal.raise_signal(signal.SIGTERM)
        return prepare(calls)

    with monkeypatch.context() as patch:
        patch.setattr(timer, "prepare", terminated)
        result = run(path, "-o", output)
    assert result.exit_code == 130
    assert f"interrupted; what was measured is in {state_path(output)}" in result.stderr
    assert b"running" not in state_path(output).read_bytes()
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_before_anything_is_measured_names_no_file(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.interrupt_at = 0
    result = run(path, "-o", output)
    assert result.exit_code == 130
    assert "interrupted; nothing was measured yet" in result.stderr
    assert list(output.parent.iterdir()) == []


def test_the_same_command_again_says_that_all_is_measured(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    first = run(path, "-o", output)
    assert "measured already" not in first.stdout
    again = run(path, "-o", output, "--budget", "0s")
    assert again.exit_code == 0
    assert again.stdout.startswith(first.stdout)
    assert f"all of that was measured already, and is kept in {state_path(output)}" in again.stdout


def test_a_budget_that_is_used_up_is_said(path: Path, output: Path, timer: DictatedTimer) -> None:
    result = run(path, "-o", output, "--budget", "0s")
    assert result.exit_code == 0
    assert result.stdout.count("not measured: ") == 2
    assert "0 of 2 problems measured" in result.stdout
    assert "the same command goes on" in result.stdout
    assert str(state_path(output)) not in result.stdout, "there is none"


def test_a_suspect_run_fails_first_and_is_written_when_told_to(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    wrong = build(PROBLEMS, tmp_path / "b", kernel_cache, MostlyLazy())
    result = run(wrong, "-o", output)
    assert result.exit_code == 25
    assert f"error: suspect, so {output} is not written: 2 of 3 kernels" in result.stderr
    assert not output.exists()
    result = run(wrong, "-o", output, "--accept-suspect")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("SUSPECT: 2 of 3 kernels were thrown out, more than half")
    assert output.exists()
    document = json.loads(run(wrong, "-o", output, "--accept-suspect", "--json").stdout)
    assert document["suspicion"].startswith("2 of 3 kernels")


@pytest.mark.parametrize("budget", ["10", "m", "-1m", "1d", "1e3s"])
def test_a_budget_is_a_duration(path: Path, output: Path, budget: str) -> None:
    result = run(path, "-o", output, f"--budget={budget}")
    assert result.exit_code == 2
    assert "is no duration such as 90s, 10m or 1.5h" in result.stderr


def test_the_output_is_a_bundle_and_another_one(path: Path, tmp_path: Path) -> None:
    result = run(path, "-o", path.parent / "." / path.name)
    assert result.exit_code == 2
    assert "is among the bundles to tune" in result.stderr
    result = run(path, "-o", tmp_path / "tuned")
    assert result.exit_code == 2
    assert "a bundle is named NAME.nvgemm" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused(path: Path, output: Path) -> None:
    result = run(path, "-o", output)
    assert result.exit_code == 24
    assert "sees no GPU" in result.stderr


def test_another_device_is_refused(
    path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: Any = replace(bench().facts, platform="linux_aarch64")
    monkeypatch.setattr("nvgemm_aot.tuning.gpu.gpu_bench", lambda: bench(facts=facts))
    result = run(path, "-o", output)
    assert result.exit_code == 24
    assert f"{path} cannot be measured here: built for platform" in result.stderr


def test_inspect_shows_measured_rankings(path: Path, output: Path, timer: DictatedTimer) -> None:
    timer.times = {**TIMES, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    assert run(path, "-o", output).exit_code == 0
    shown = CliRunner().invoke(main, ["inspect", str(output)]).stdout
    assert (
        f"measurement by nvgemm-aot 0.1.0 for cpu, driver 580.95.05, torch {torch.__version__}"
        in shown
    )
    assert shown.count("  ATen  ") == 2
    assert shown.count("uncertain") == 2
    document = json.loads(CliRunner().invoke(main, ["inspect", str(output), "--json"]).stdout)
    for problem in document["problems"]:
        assert problem["measured"]["doubts"]
        assert len(problem["measured"]["spreads_ns"]) == len(problem["kernels"])
