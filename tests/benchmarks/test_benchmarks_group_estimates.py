"""Estimates for groups: cases, fits and verdicts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.group_estimates import fitting, measuring
from benchmarks.group_estimates.__main__ import main
from benchmarks.group_estimates.cases import Case, cases
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.base import Candidate
from nvgemm_aot.providers.heuristics.group_times import (
    TileCost,
    design_name,
    read_group_times,
    work_of,
)
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import Op

SM_COUNT = 132
LAUNCH_NS, BYTES_PER_NS = 4000.0, 4000.0
TARGET = build_target("sm_90a", "H200")
CASES = [one for number, one in enumerate(cases()) if number % 3 == 0]


def offered(case: Case) -> list[Candidate]:
    listed = load_provider("quack").enumerate(case.problem.signature, TARGET).candidates
    return list(listed)[:6]


def cost_of(candidate: Candidate) -> TileCost:
    """Returns a simulated GPU's tile cost: larger tiles cost less for their area."""
    m, n, _ = candidate.block_shape.tile
    return TileCost(step=20 * (m * n / 8192) ** 0.8, rest=m * n / 16)


def record(noise: float = 0.01) -> dict[str, Any]:
    dice = random.Random(7)
    kernels, times = {}, {}
    for case in CASES:
        row = {}
        for candidate in offered(case):
            id_ = f"{candidate.signature.key} {candidate.operator}"
            kernels[id_] = [id_, "quack", candidate.operator, candidate.signature.key]
            cost = cost_of(candidate)
            work = work_of(case.problem, candidate, case.counts(), SM_COUNT)
            busy = work.steps * cost.step + work.tiles * cost.rest
            moving = work.moved_bytes / BYTES_PER_NS
            row[id_] = (LAUNCH_NS + (busy**4 + moving**4) ** 0.25) * dice.gauss(1, noise)
        times[case.key] = {**row, fitting.ATEN: 2 * min(row.values())}
    return {
        "what": measuring.WHAT,
        "gpu": "a GPU",
        "uuid": "0123abcd",
        "date": "2026-11-24",
        "kernels": list(kernels.values()),
        "times_ns": times,
    }


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "times.json").write_text(json.dumps(record()))
    monkeypatch.setattr(fitting, "PATH", tmp_path / "group_times.json")
    return tmp_path / "times.json"


def test_cases_are_told_apart_and_spread_all_rows() -> None:
    all_cases = list(cases())
    assert len({one.key for one in all_cases}) == len(all_cases)
    assert {one.problem.signature.op for one in all_cases} == {Op.GROUPED_MM, Op.K_GROUPED_MM}
    for one in all_cases:
        along_k = one.problem.signature.op is Op.K_GROUPED_MM
        assert sum(one.counts()) == (one.problem.k if along_k else one.problem.m)
        assert len(one.counts()) == one.problem.groups
    assert 0 < sum(one.is_held_back for one in all_cases) < len(all_cases) / 2


def test_costs_are_found_again(written: Path) -> None:
    done = CliRunner().invoke(main, ["fit", str(written), "--write"], catch_exceptions=False)
    assert "aims (1.05 and 1.015): met" in done.output
    (value,) = json.loads((written.parent / "group_times.json").read_text())["architectures"]
    found = read_group_times(value)
    assert found.launch_ns == LAUNCH_NS
    assert found.bytes_per_ns == BYTES_PER_NS
    assert "a GPU 0123abcd, 2026-11-24" in found.source
    by_name = {design_name(one): one for case in CASES for one in offered(case)}
    assert found.costs.keys() == by_name.keys()
    for name, cost in found.costs.items():
        right = cost_of(by_name[name])
        # A tile of few steps and one of many: the two costs may make up for each other between.
        for steps in (32, 256):
            assert cost.rest + steps * cost.step == pytest.approx(
                right.rest + steps * right.step, rel=0.05
            )


def test_nothing_is_written_unasked(written: Path) -> None:
    CliRunner().invoke(main, ["fit", str(written)], catch_exceptions=False)
    assert not (written.parent / "group_times.json").exists()


def test_a_choice_is_judged_by_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is slow only in held-back cases costs its time there."""
    made = record(noise=0.0)
    held_back = {case.key for case in CASES if case.is_held_back}
    for key, row in made["times_ns"].items():
        if key in held_back:
            first = min((one for one in row if one != fitting.ATEN), key=row.__getitem__)
            row[first] *= 1.5
    (tmp_path / "times.json").write_text(json.dumps(made))
    monkeypatch.setattr(fitting, "load_group_times", lambda arch: None)
    done = CliRunner().invoke(main, ["fit", str(tmp_path / "times.json")], catch_exceptions=False)
    assert "missed" in done.output


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"what": "estimates"}))
    done = CliRunner().invoke(main, ["fit", str(tmp_path / "other.json")])
    assert done.exit_code == 1
    assert "group estimates" in done.output
