"""Shared code of kernel benchmarks: statistics, operands, results over several runs."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from benchmarks.shared import measuring, resuming, summaries
from nvgemm_runtime.gemm.problem import Layout

Summary = summaries.Summary

SETTINGS: dict[str, Any] = {
    "what": "test",
    "environment": {"gpu": "G", "bundles": ["one"]},
    "settings": {"rounds": 4},
}


def summary(choice: int, report: int) -> Any:
    return Summary(choice_ns=choice, report_ns=report, least_ns=1, most_ns=9999)


def test_rounds_that_choose_are_not_those_reported() -> None:
    found = Summary.of([10, 20, 11, 22, 12, 24])
    assert (found.choice_ns, found.report_ns) == (11, 22)
    assert (found.least_ns, found.most_ns) == (10, 24)
    assert Summary.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(ValueError, match="must be 4 rounds or more"):
        Summary.of([1, 2, 3])


def test_best_of_can_lose_for_it_is_chosen_by_other_rounds() -> None:
    lucky, steady = summary(choice=90, report=120), summary(choice=100, report=100)
    assert summaries.fastest([steady, lucky]) is lucky
    assert summaries.chosen({"steady": steady, "lucky": lucky}) == "lucky"
    assert summaries.ratio(steady, lucky) == pytest.approx(100 / 120)


def test_means_of_nothing_are_no_numbers() -> None:
    assert summaries.geomean([1.0, 4.0]) == pytest.approx(2)
    assert summaries.share([True, False, True, True]) == 0.75
    for empty in (summaries.geomean, summaries.mean, summaries.median, summaries.share):
        assert math.isnan(empty([]))


def test_a_round_in_which_all_are_slower_is_no_difference_between_them() -> None:
    paces = [1.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2, 1.2]
    times = {name: [ns * pace for pace in paces] for name, ns in (("a", 100), ("b", 110))}
    raw = Summary.of(times["a"])
    assert raw.report_ns == 1.2 * raw.choice_ns  # the clocks, by the parity of the round
    found = summaries.summarized(times)
    assert summaries.ratio(found["b"], found["a"]) == pytest.approx(1.1, abs=0.01)
    assert found["a"].choice_ns < found["b"].choice_ns
    alone = summaries.leveled({"a": [1.0, 2.0, 9.0], "b": [1.0, 2.0, 3.0], "c": [1.0, 2.0, 3.0]})
    assert alone["a"] == [2.0, 2.0, 6.0]  # its own trouble stays its own


def test_standard_error_of_a_mean() -> None:
    sample = [1.0, 2.0, 3.0, 4.0]
    assert summaries.standard_error(sample, 10**9) == pytest.approx(1.29099 / 2, rel=1e-4)
    assert summaries.standard_error(sample, 8) == pytest.approx(1.29099 / 2 * 0.5**0.5, rel=1e-4)
    assert summaries.standard_error(sample, 4) == 0
    assert math.isnan(summaries.standard_error([1.0], 4))


def test_best_of_equals_is_no_better_than_any() -> None:
    numbers = random.Random(1)
    gains = []
    for _ in range(2000):
        paces = [numbers.gauss(1, 0.02) for _ in range(20)]
        times = {name: [pace * numbers.gauss(100_000, 1000) for pace in paces] for name in "abc"}
        found = summaries.summarized(times)
        gains.append(summaries.ratio(found["a"], summaries.fastest(found.values())) - 1)
    assert abs(summaries.mean(gains)) < 4 * summaries.standard_error(gains, 10**9)


def test_groups_by_lower_bounds_and_leaves_out_empty_ones() -> None:
    found = summaries.grouped([1, 2, 15, 16, 8192], (1, 2, 16, 128, 1024), lambda number: number)
    assert found == [("1", [1]), ("2-15", [2, 15]), ("16-127", [16]), ("1024-", [8192])]
    with pytest.raises(ValueError, match="0 lies below the least bound 1"):
        summaries.grouped([0], (1,), lambda number: number)


@pytest.mark.parametrize("size", [(1, 4096, 4096), (64, 64, 64), (8192, 28672, 4096)])
def test_operands_in_turn_are_larger_than_l2_or_as_many_as_launches(
    size: tuple[int, int, int],
) -> None:
    m, n, k = size
    count = measuring.set_count(m, n, k)
    held = count * 2 * (m * k + k * n + m * n)
    assert held >= measuring.BUFFER_BYTES or count == measuring.MAX_LAUNCHES
    assert 2 <= count <= measuring.MAX_LAUNCHES


def test_windows_hold_at_least_one_launch_and_not_too_many() -> None:
    assert measuring.launch_count(5e6, 1e6) == 1
    assert measuring.launch_count(1e5, 1e6) == 10
    assert measuring.launch_count(10, 1e6) == measuring.MAX_LAUNCHES


@pytest.mark.parametrize("layout", list(Layout))
def test_operand_sets_have_their_shape_and_share_no_memory(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "BUFFER_BYTES", 40_000)
    m, n, k = 24, 40, 72
    arena = measuring.Arena(torch.float16, [(m, n, k), (8, 8, 8)], device="cpu")
    sets = arena.sets(m, n, k, layout)
    assert len(sets) == measuring.set_count(m, n, k) > 2
    inputs: list[range] = []
    outputs: list[range] = []
    for a, b, out in sets:
        assert (a.shape, b.shape, out.shape) == ((m, k), (k, n), (m, n))
        assert a.is_contiguous() is layout.a_row_major
        assert b.is_contiguous() is layout.b_row_major
        assert out.is_contiguous()
        assert a.storage_offset() % 128 == b.storage_offset() % 128 == 0
        for tensor, taken in ((a, inputs), (b, inputs), (out, outputs)):
            begin = tensor.storage_offset()
            taken.append(range(begin, begin + tensor.numel()))
    for taken in (inputs, outputs):
        taken.sort(key=lambda place: place.start)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(taken))


def test_error_is_zero_for_exact_products_and_nothing_else() -> None:
    exact = measuring.Exact.draw(16, 24, 4096, Layout.TN, torch.float16, device="cpu")
    assert exact.b.T.is_contiguous()

    def right(a: Any, b: Any, out: Any) -> None:
        out.copy_(a.double() @ b.double())

    def off_by_one(a: Any, b: Any, out: Any) -> None:
        right(a, b, out)
        out[3, 5] += 4

    assert exact.expected.max() > 512
    assert exact.error(right) == 0
    assert 0 < exact.error(off_by_one) < 1e-2
    assert math.isnan(exact.error(lambda a, b, out: None))


def begin(path: Path, resume: bool = False, **changed: Any) -> Any:
    return resuming.Results.begin(path, resume=resume, **{**SETTINGS, **changed})


def test_results_are_kept_after_each_size_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    begin(path).add("a", {"times": [1, 2]})
    again = begin(path, resume=True)
    assert again.entries == {"a": {"times": [1, 2]}}
    again.add("b", {"times": []})
    read = resuming.Results.read(path, "test")
    assert list(read.entries) == ["a", "b"]
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_results_of_other_circumstances_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    begin(path).save()
    with pytest.raises(click.ClickException, match="give --resume"):
        begin(path)
    with pytest.raises(click.ClickException, match=r"its environment is .*\"?G.* here it is"):
        begin(path, resume=True, environment={"gpu": "H"})
    with pytest.raises(click.ClickException, match="its settings is"):
        begin(path, resume=True, settings={"rounds": 6})
    with pytest.raises(click.ClickException, match="is no result of other"):
        resuming.Results.read(path, "other")


def test_files_of_other_circumstances_are_not_joined(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    begin(first).add("a", {"times": [1]})
    begin(second, settings={"rounds": 6}).add("b", {"times": [2]})
    with pytest.raises(click.ClickException, match=r"second.json: cannot be joined .* settings is"):
        resuming.Results.joined(tmp_path / "all.json", [first, second], "test")
    assert not (tmp_path / "all.json").exists()


def test_a_size_that_fails_is_left_out_and_the_others_are_measured(tmp_path: Path) -> None:
    results = begin(tmp_path / "results.json")

    def fail() -> dict[str, Any]:
        raise RuntimeError("no such launch")

    work = [("a", fail), ("b", lambda: {"n": 1}), ("c", lambda: {"n": 2})]
    with pytest.raises(click.ClickException, match="a FAILED: RuntimeError: no such launch"):
        results.fill(work, None, str)
    assert list(results.entries) == ["b", "c"]
    calls = []

    def count() -> dict[str, Any]:
        calls.append(1)
        raise RuntimeError

    with pytest.raises(click.ClickException):
        results.fill([(str(number), count) for number in range(9)], None, str)
    assert len(calls) == resuming.MAX_FAILURES


def test_nothing_is_begun_that_cannot_end_in_time() -> None:
    now = [0.0]

    def go_on(budget: float | None) -> Iterator[int]:
        now[0] = 100.0
        for number, seconds in resuming.in_time([3, 5, 1, 1], budget, lambda: now[0], 100.0):
            now[0] += seconds
            yield number

    assert list(go_on(None)) == [0, 1, 2, 3]
    assert list(go_on(12)) == [0, 1]  # 8 s are over, and another might take 5
    assert list(go_on(13)) == [0, 1, 2]
    assert list(go_on(1)) == [0]  # one is always measured


def test_what_takes_long_leaves_time_for_what_does_not() -> None:
    now = [0.0]
    done = []
    order = ["triton", "aten", "triton", "aten"]
    for _, item in resuming.in_time(order, 45, lambda: now[0], 0.0, kind=lambda item: item):
        now[0] += {"triton": 30.0, "aten": 5.0}[item]
        done.append(item)
    assert done == ["triton", "aten", "aten"]


def test_table_says_how_it_came_about_and_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = begin(tmp_path / "results.json")
    results.add("a", {})
    results.end(lambda entries: [f"the table of {len(entries)}"])
    text = (tmp_path / "results.txt").read_text()
    assert capsys.readouterr().out == text
    lines = text.splitlines()
    assert lines[0].startswith("$ python -m benchmarks.")
    assert lines[1:3] == ["G", "  one"]
    assert lines[-1] == "the table of 1"
    kept = (tmp_path / "results.json").stat().st_ino
    resuming.Results.read(tmp_path / "results.json", "test").write_table(lambda entries: ["again"])
    assert (tmp_path / "results.json").stat().st_ino == kept, (
        "a table is no reason to write results"
    )


def test_without_measurements_there_is_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "results.json").end(lambda entries: ["the table"])
    assert "nothing was measured" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    results = begin(tmp_path / "results.json")
    results.add("a", {})
    with pytest.raises(
        click.ClickException, match=r"results\.json is not as this .* KeyError: 'x'"
    ):
        results.write_table(lambda entries: [entries["a"]["x"]])


def test_command_line_names_no_directory() -> None:
    command = resuming.command_line(
        ["/x/kernels/__main__.py", "measure", "/out/dir/k.json", "--e=/a/b.x:/c/d.x", "m/x"]
    )
    assert command == "python -m benchmarks.kernels measure k.json --e=b.x:d.x m/x"
