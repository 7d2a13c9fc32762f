"""``nvgemm-aot tune``, and how measured rankings are shown."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import cpu_provider
from nvgemm_aot.cli.main import main
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.session import OUT_OF_BUDGET
from nvgemm_aot.tuning.state import tuning_state as state_module
from nvgemm_aot.tuning.state.journal import state_path
from nvgemm_runtime.installed.signatures import read_signatures
from signing_keys import new_key, set_policy, sign_bundle
from tuning_bench import DictatedTimer, Lazy, MostlyLazy, bench, build, header_of, measure_here

PROBLEMS = tuple(cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16))
TIMES = {"": [5000.0], "Cpu_16x16": [3000.0], "Cpu_8x32": [2000.0], "aten": [2500.0]}
SMALLEST_FIRST = {"": [2000.0], "Cpu_8x32": [3000.0], "Cpu_16x16": [5000.0], "aten": [2500.0]}
"""The kernel that pruning leaves anyway, for it takes operands of any alignment, is the fastest."""
NOISE = [2000.0, 2800.0, 2400.0, 3100.0, 2200.0, 2600.0, 3300.0]

Tune = Callable[..., Result]


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
    measure_here(monkeypatch, bench(timer))
    return timer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


@pytest.fixture
def tune(path: Path, output: Path, timer: DictatedTimer) -> Tune:
    """Runs the command for `path`, unless another bundle is given, with some options."""
    return lambda *options, given=path: run(given, "-o", output, *options)


def test_prints_a_table_and_what_was_written(output: Path, tune: Tune) -> None:
    result = tune()
    assert result.exit_code == 0, result.output
    assert "Measuring 2 problems" in result.stderr
    for problem in PROBLEMS:
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(problem.key))
        assert line.split()[1:9] == ["bundled", "2.00", "±", "0.00", "2.50", "±", "0.00", "-"]
        assert "0.800" in line
    assert f"{output}: written, 2 of 2 problems measured, 3 kernels" in result.stdout
    assert "measured already" not in result.stdout
    again = tune("--budget", "0s")
    assert again.stdout.startswith(result.stdout)
    assert f"nothing new was measured: all measurements are in {state_path(output)}" in again.stdout


def test_says_what_counts_where_and_measures_again_unless_told_not_to(
    output: Path, tune: Tune, timer: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = [bench(timer), *(bench(timer) for _ in range(2))]
    for number, one in enumerate(started):
        on = replace(one, uuid="GPU-1", now_s=lambda number=number: 1000.0 * number)
        monkeypatch.setattr(state_module, "PROCESS", f"process {number}")
        measure_here(monkeypatch, on)
        result = tune(*(["--no-repeat"] if number == 1 else []))
        assert result.exit_code == 0, result.output
        standing = "2 repeated" if number == 2 else "2 measured once"
        assert f"rankings: {standing}" in result.stdout
        used = "2: 0 confirmed, 2 repeated" if number == 2 else "0: 0 confirmed, 0 repeated"
        assert f"plain torch.compile uses kernels for {used} with a gain of 8% or" in result.stdout
        assert "under max-autotune, kernels compete for 2" in result.stdout
        left = "still to be measured a second time: 2 problems" in result.stdout
        assert left is (number == 0)
    document = json.loads(tune("--json").stdout)
    (counted,) = document["counted"]
    assert (counted["gpu"], counted["measured"], counted["repeated"]) == ("cpu", 2, 2)
    assert (counted["with_setting"], counted["aten"], document["unrepeated"]) == (2, 0, 0)


def test_json_has_every_time_and_what_pruning_saves_and_costs(
    path: Path, output: Path, timer: DictatedTimer, tune: Tune
) -> None:
    timer.times = SMALLEST_FIRST
    document = json.loads(tune("--json", "--prune").stdout)
    for problem in PROBLEMS:
        found = document["problems"][problem.key]
        assert [time for _, time, _ in found["kernels"]] == [2000, 3000, 5000]
        assert (found["aten"], found["doubts"]) == ([2500, 0], [])
    [dropped] = document["pruned"]["dropped"]
    assert (document["kernels"], document["bytes"]) == (2, output.stat().st_size)
    before = {kernel.id: kernel.span.stored_bytes for kernel in header_of(path).kernels}
    assert {dropped} == before.keys() - {kernel.id for kernel in header_of(output).kernels}
    said = f"pruned: kernels dropped: 1; bytes saved: {before[dropped]} B; speed lost: 0.0 %"
    assert said in tune("--prune").stdout


def test_wrong_kernels_are_said_loudly(kernel_cache: Cache, tmp_path: Path, tune: Tune) -> None:
    result = tune(given=build(PROBLEMS, tmp_path / "b", kernel_cache, Lazy()))
    assert result.exit_code == 0
    assert result.stdout.count("WRONG: kernel") == 1
    for problem in PROBLEMS:
        elements = problem.m * problem.n
        assert f"{problem.key}: {elements} of {elements} elements are wrong" in result.stdout


def test_doubts_are_marked_with_why_here_and_by_inspect(
    output: Path, timer: DictatedTimer, tune: Tune
) -> None:
    timer.times = {**TIMES, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    result = tune()
    assert "uncertain (2), and timed again wherever it is used: the fastest" in result.stdout
    assert " ?  " in result.stdout
    shown = CliRunner().invoke(main, ["inspect", str(output)]).stdout
    by = f"measurement by nvgemm-aot 0.1.0 for cpu, driver 580.95.05, torch {torch.__version__}"
    assert by in shown
    assert (shown.count("  ATen  "), shown.count("uncertain")) == (2, 2)
    document = json.loads(CliRunner().invoke(main, ["inspect", str(output), "--json"]).stdout)
    for problem in document["problems"]:
        assert problem["measured"]["doubts"]
        assert len(problem["measured"]["spreads_ns"]) == len(problem["kernels"])


@pytest.mark.parametrize("by_sigterm", [False, True])
def test_an_interruption_says_how_to_go_on(
    output: Path,
    timer: DictatedTimer,
    tune: Tune,
    monkeypatch: pytest.MonkeyPatch,
    by_sigterm: bool,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    prepare = timer.prepare

    def interrupted(calls: Any, **how: Any) -> Any:
        if len(timer.prepared) == 5:
            if not by_sigterm:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        return prepare(calls, **how)

    with monkeypatch.context() as patch:
        patch.setattr(timer, "prepare", interrupted)
        result = tune()
    assert result.exit_code == 130
    assert f"interrupted; measurements are in {state_path(output)}" in result.stderr
    assert "compiled" not in result.stderr
    assert b"running" not in state_path(output).read_bytes(), "it is no kill"
    assert signal.getsignal(signal.SIGTERM) is before
    assert tune().exit_code == 0


def test_ctrl_c_before_anything_is_measured_names_no_file(
    output: Path, timer: DictatedTimer, tune: Tune
) -> None:
    timer.interrupt_at = 0
    result = tune()
    assert result.exit_code == 130
    assert "interrupted; nothing was measured yet" in result.stderr
    assert list(output.parent.iterdir()) == []


def test_a_budget_that_is_used_up_is_said(output: Path, tune: Tune) -> None:
    result = tune("--budget", "0s")
    assert result.exit_code == 0
    assert result.stdout.count("not measured: ") == 2
    assert "0 of 2 problems measured" in result.stdout
    assert OUT_OF_BUDGET in result.stdout
    assert str(state_path(output)) not in result.stdout, "there is none"


def test_a_suspect_run_fails_first_and_is_written_when_told_to(
    kernel_cache: Cache, tmp_path: Path, output: Path, tune: Tune
) -> None:
    wrong = build(PROBLEMS, tmp_path / "b", kernel_cache, MostlyLazy())
    result = tune(given=wrong)
    assert result.exit_code == 25
    assert f"error: suspect, so {output} is not written: 2 of 3 kernels" in result.stderr
    assert not output.exists()
    result = tune("--accept-suspect", given=wrong)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("SUSPECT: 2 of 3 kernels were dropped, more than half")
    assert output.exists()
    document = json.loads(tune("--accept-suspect", "--json", given=wrong).stdout)
    assert document["suspicion"].startswith("2 of 3 kernels")


def test_the_policy_holds_for_input_and_output(
    path: Path, output: Path, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(tmp_path, "ci")
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": key})
    signed = tmp_path / "signed.nvgemm"
    signed.write_bytes(path.read_bytes())
    result = tune(given=signed)
    assert result.exit_code == 28
    assert f"{signed}: no key that counts in the policy" in result.stderr
    assert not output.exists()
    sign_bundle(signed, key)
    result = tune(given=signed)
    assert result.exit_code == 0, result.output
    assert f"nvgemm-aot: {output}: no key that counts in the policy" in result.stderr
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", str(tmp_path / "ci.pem"))
    result = tune(given=signed)
    assert (result.exit_code, "no key that counts" in result.stderr) == (0, False)
    (signature,) = read_signatures(output)
    assert signature.key_id == key.id


@pytest.mark.parametrize("budget", ["10", "m", "-1m", "1d", "1e3s"])
def test_a_budget_is_a_duration(tune: Tune, budget: str) -> None:
    result = tune(f"--budget={budget}")
    assert result.exit_code == 2
    assert "is not a duration such as 90s, 10m or 1.5h" in result.stderr


def test_serving_adds_sizes_between_and_grid_excludes_it(
    kernel_cache: Cache, tmp_path: Path, output: Path, tune: Tune
) -> None:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 32)]
    wide = build(problems, tmp_path / "wide", kernel_cache)
    result = tune("--serving", "--skip-confirmed", given=wide)
    assert result.exit_code == 0, result.output
    assert [one.problem.m for one in header_of(output).rankings] == [8, 12, 16, 24, 32]
    assert "measured and not declared: 3 problems" in result.stdout
    both = tune("--serving", "--grid", given=wide)
    assert both.exit_code == 2
    assert "--grid and --serving name two grids; name one of them" in both.stderr
    other = tune("--serving", given=wide)
    assert other.exit_code != 0, "another tuning"
    assert "that two GPUs do not confirm" in other.stderr


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
    measure_here(monkeypatch, bench(facts=facts))
    result = run(path, "-o", output)
    assert result.exit_code == 24
    assert f"{path} cannot be measured here: built for platform" in result.stderr
