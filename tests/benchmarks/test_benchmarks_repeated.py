"""benchmarks/repeated: tuning twice on one GPU, and its winners on another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks.repeated import __main__ as repeated
from benchmarks.repeated.gains import find_pairs, gains_table
from made_rankings import GPU_A, GPU_B, GPU_C, on, rankings
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.storage.build_cache import Cache
from tuning_bench import PROBLEMS, build


def test_each_winner_is_compared_with_aten_on_each_other_gpu() -> None:
    found = find_pairs(
        rankings(
            on(GPU_A, {"x": 900, "y": 950}, aten=1000, repeated=300),
            on(GPU_B, {"x": 1050, "y": 940}, aten=1000),
            on(GPU_C, {"x": 1100, "y": 1100}, aten=1000),  # ATen wins: no winner to be compared
        )
    )
    assert [(round(one.gain, 3), one.over_aten, one.is_repeated) for one in found] == [
        (0.1, 1.05, True), (0.1, 1.1, True), (0.06, 0.95, False), (0.06, 1.1, False),
    ]  # fmt: skip


def test_doubts_that_a_second_pass_raised_leave_a_measurement_among_all_winners() -> None:
    doubts = ("two runs disagree: x took 900 ns, and 990 ns in the run of today",)
    contradicted = on(GPU_A, {"x": 900}, aten=1000, doubts=doubts)
    (pair,) = (one for one in find_pairs(rankings(contradicted, on(GPU_B, {"x": 1001}, aten=1000))))
    assert not pair.is_repeated
    hot = on(GPU_A, {"x": 900}, aten=1000, doubts=("it was hot",))
    assert find_pairs(rankings(hot, on(GPU_B, {"x": 1001}, aten=1000))) == []


def test_the_table_counts_by_gain_all_winners_and_repeated_ones() -> None:
    found = find_pairs(
        rankings(
            on(GPU_A, {"x": 930}, aten=1000), on(GPU_B, {"x": 1015}, aten=1000),
            on(GPU_A, {"x": 940}, aten=1000, repeated=300, problem=PROBLEMS[1]),
            on(GPU_B, {"x": 970}, aten=1000, problem=PROBLEMS[1]),
        )
    )  # fmt: skip
    lines = list(gains_table(found))
    rows = {line[:10].strip(): line[10:].split() for line in lines[2:6]}
    assert rows == {
        "2% to 3%": ["0", "0", "-", "0", "0", "-"],
        "3% to 5%": ["1", "0", "0.940", "0", "0", "-"],
        "5% to 8%": ["2", "1", "1.015", "1", "0", "0.970"],
        "from 8%": ["0", "0", "-", "0", "0", "-"],
    }
    assert lines[-1].startswith("1.015: ")
    assert lines[-1].endswith("gain 0.070, not repeated")


def test_files_of_several_gpus_are_compared_together(tmp_path: Path) -> None:
    paths = []
    for gpu, time_ns in ((GPU_A, 900), (GPU_B, 905)):
        paths.append(tmp_path / f"{gpu[:1]}.json")
        write_rankings(paths[-1], rankings(on(gpu, {"x": time_ns}, aten=1000, repeated=200)))
    result = CliRunner().invoke(repeated.main, ["compare", *map(str, paths)])
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.startswith("from 8%"))
    assert row.split()[2:] == ["2", "0", "0.905", "2", "0", "0.905"]


@pytest.mark.slow
def test_measuring_leaves_rankings_that_were_repeated(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHED_BENCH_UUID", "GPU-1")
    bundle = build(PROBLEMS, tmp_path / "built", kernel_cache)
    command = ["measure", str(tmp_path / "results"), "--bundle", str(bundle)]
    result = CliRunner().invoke(repeated.main, [*command, "--bench", "watched_benches:sound"])
    assert result.exit_code == 0, result.output
    assert "rankings: 3 repeated" in result.output
    found = read_rankings(tmp_path / "results" / "rankings.json").entries
    assert [one.repeated is not None for one in found] == [True] * 3
    assert (tmp_path / "results" / "tuned.txt").read_text() in result.output


def test_the_bundle_must_be_named_where_none_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "INSTALLATION", SimpleNamespace(shipped_bundles=list))
    result = CliRunner().invoke(repeated.main, ["measure", str(tmp_path / "results")])
    assert result.exit_code == 1
    assert "0 bundles are installed: name the one to tune by --bundle PATH" in result.output
