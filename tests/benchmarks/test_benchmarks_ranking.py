"""Ranking benchmark: accepted measurements, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from benchmarks.ranking import __main__ as ranking
from made_rankings import GPU_A, GPU_B, GPU_C, on, rankings
from matching_headers import header, problem
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.rankings.file import write_rankings
from nvgemm_runtime.matching.trust import holds_here


def test_times_count_as_measured_here_and_not_once_they_are_taken_for_estimates() -> None:
    built = header(problem(16), problem(64))
    times = {
        one.problem.key: [
            float(len(built.kernels) - number) for number in range(len(built.kernels))
        ]
        for one in built.rankings
    }
    measured = ranking.with_measured_times(built, times, all_kernels=True)
    for one in measured.rankings:
        assert holds_here(one, measured.sources[one.source], ranking.H200, built.kernels)
        assert [place.kernel for place in one.kernels] == [*reversed(range(len(built.kernels)))]
    few = ranking.with_measured_times(built, times, all_kernels=False)
    assert [{place.kernel for place in one.kernels} for one in few.rankings] == [
        {place.kernel for place in one.kernels} for one in built.rankings
    ]
    scaled = ranking.without_interpolation(measured)
    for one in scaled.rankings:
        assert not holds_here(one, scaled.sources[one.source], ranking.H200, built.kernels)
    assert replace(scaled, rankings=()) == replace(measured, rankings=())


def test_refuses_times_of_another_bundle(tmp_path: Path, cpu_bundle: BuiltBundle) -> None:
    times = {"what": "ranking", "gpu": "G", "kernels": ["x"], "times_ns": {"k": [1.0]}}
    path = tmp_path / "times.json"
    path.write_text(json.dumps(times))
    done = CliRunner().invoke(ranking.main, ["compare", str(cpu_bundle.path), str(path)])
    assert done.exit_code == 1
    assert "was measured over another bundle" in done.output


def test_a_kernel_between_two_sizes_is_one_that_is_near_the_fastest_at_both() -> None:
    low, held, high = [100.0, 101.0, 150.0], [300.0, 120.0, 100.0], [130.0, 101.0, 100.0]
    assert ranking.loss_between(low, held, high, 0.02) == 1.2
    assert ranking.loss_between(low, held, high, 0.005) is None
    assert ranking.loss_between(low, held, high, 0.6) == 1.2, "the least of both"


def test_prints_what_is_lost_between_sizes(tmp_path: Path) -> None:
    times = {"m1": [10.0, 11.0], "m8": [30.0, 10.0], "m16": [10.0, 12.0], "m512": [9.0, 8.0]}
    keyed = {f"mm/tn/bf16xbf16/fp32/bf16/{m}n64k64": row for m, row in times.items()}
    path = tmp_path / "times.json"
    path.write_text(
        json.dumps({"what": "ranking", "gpu": "G", "kernels": ["x", "y"], "times_ns": keyed})
    )
    done = CliRunner().invoke(ranking.main, ["between", str(path)])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[0] == ["G:", "2", "kernels,", "1", "pairs", "of", "n", "and", "k"]
    assert lines[4][-6:] == ["2%", "1", "of", "1", "3.000", "(3.00)"]
    assert lines[7][-6:] == ["2%", "1", "of", "1", "1.200", "(1.20)"]


def test_prints_what_one_gpu_loses_by_the_times_of_another(tmp_path: Path) -> None:
    first, second = {"x": 800, "y": 900}, {"x": 1_100, "y": 950}
    path = tmp_path / "rankings.json"
    write_rankings(
        path, rankings(on(GPU_A, first, aten=1_000), on(GPU_B, second, aten=1_000), on(None, first))
    )
    done = CliRunner().invoke(ranking.main, ["gpus", str(path)])
    assert done.exit_code == 0, done.output
    (row,) = (line.split() for line in done.output.splitlines() if line.startswith("all"))
    # x on the second GPU, 1,100 for 950; y on the first, 900 for 800, where ATen takes 1,000
    assert row == ["all", "2", "1.1413", "1.158", "2", "2", "0.9950", "1.100", "1"]
    write_rankings(path, rankings(on(GPU_A, first), on(None, second)))
    refused = CliRunner().invoke(ranking.main, ["gpus", str(path)])
    assert refused.exit_code == 1
    assert "two known GPUs" in refused.output


def test_prints_what_a_third_gpu_says_of_what_two_confirm(tmp_path: Path) -> None:
    gains, loses = {"x": 900, "y": 990}, {"x": 1_020, "y": 1_100}
    path = tmp_path / "rankings.json"
    write_rankings(
        path,
        rankings(
            *(on(gpu, gains, aten=1_000) for gpu in (GPU_A, GPU_B)), on(GPU_C, loses, aten=1_000)
        ),
    )
    done = CliRunner().invoke(ranking.main, ["gpus", str(path)])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if "from 5%" in line]
    # Two confirm x by 10 %; no other two confirm anything.
    assert rows == [["from", "5%", "1", "1.0200", "1.020", "1"]]
    write_rankings(path, rankings(on(GPU_A, gains), on(GPU_B, gains)))
    assert "third" not in CliRunner().invoke(ranking.main, ["gpus", str(path)]).output
