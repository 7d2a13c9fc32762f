"""Result files: one JSON line a case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import record
from benchmarks.record import Baseline, Case, Record, Run

RUN = Run(
    benchmark="moe.training",
    command="python -m benchmarks.moe.training measure t.json",
    commit="c3c052c2",
    date="2026-11-27",
    gpu="NVIDIA H100 80GB HBM3",
    gpu_sha256="0" * 64,
    versions=dict.fromkeys(record.VERSIONS, "1.0"),
)
CASE = Case(
    name="a/b", figure=2.0, unit="ms", baseline=Baseline(name="torch", value=3.0), noise=0.01
)
RECORD = Record(case=CASE, run=RUN)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    bare = Record(
        case=Case(name="c", figure=1, unit="s"),
        run=Run(benchmark="b", versions=dict.fromkeys(record.VERSIONS)),
    )
    record.write(tmp_path / "r.jsonl", [RECORD, bare])
    assert record.read(tmp_path / "r.jsonl") == [RECORD, bare]
    assert (RECORD.file_name, bare.file_name) == ("moe-h100.jsonl", "b-cpu.jsonl")


def test_rates_are_better_when_higher() -> None:
    assert RECORD.speedup == 1.5
    rate = Record(case=replace(CASE, unit="tokens/s"), run=RUN)
    assert rate.speedup == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("figure", "2", "figure has the wrong type"),
        ("figure", True, "figure has the wrong type"),
        ("figure", float("nan"), "figure must be finite"),
        ("unit", None, "unit has the wrong type"),
        ("baseline", {"name": "x"}, "baseline must have name and value"),
        ("date", "27.11.2026", "date must be YYYY-MM-DD"),
        ("gpu_sha256", "GPU-1", "gpu_sha256 must be 64 lower-case hex digits"),
        ("versions", {"torch": "2"}, "versions must be of torch, cuda"),
        ("more", 1, "fields must be benchmark, case"),
    ],
)
def test_rejects_a_line_that_breaks_the_schema(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**json.loads(RECORD.to_json()), field: value}) + "\n")
    with pytest.raises(record.RecordError, match=f"line 1: {message}"):
        record.read(path)


def test_rejects_a_case_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record.write(path, [RECORD, RECORD])
    with pytest.raises(record.RecordError, match=r"line 2: .* is there twice"):
        record.read(path)


def test_keeps_the_newest_result_of_each_case(tmp_path: Path) -> None:
    other = Record(case=replace(CASE, name="other"), run=RUN)
    record.keep([RECORD, other], tmp_path)
    newer = Record(case=replace(CASE, figure=1), run=replace(RUN, date="2026-11-28"))
    older = Record(case=replace(CASE, name="other"), run=replace(RUN, date="2026-11-20"))
    record.write(tmp_path / "run", [newer, older])
    assert record.keep(record.read(tmp_path / "run"), tmp_path) == {tmp_path / "moe-h100.jsonl"}
    assert record.read_all(tmp_path) == [newer, other]


def test_refuses_to_keep_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("{}\n")
    refused = CliRunner().invoke(record.main, ["keep", str(path)])
    assert refused.exit_code == 1
    assert "line 1" in refused.output
