"""benchmarks/dispatch: which sizes are held back, and what its table makes of times."""

from __future__ import annotations

import pytest

import cpu_provider
from benchmarks.dispatch import __main__ as dispatch
from nvgemm_runtime.gemm.problem import DType


def test_sizes_that_were_measured_are_not_held_back() -> None:
    measured = [1, 2, 4, 8, 16, 24, 32, 8192]
    found = dispatch.held_back(measured, 40)
    assert len(found) == len(set(found)) == 40
    assert found == sorted(found)
    assert 1 < found[0] < 8 < 1000 < found[-1] < 8192
    assert not set(found) & set(measured)
    assert {m % 2 for m in found} == {0, 1}


def test_few_sizes_lie_between_near_ones() -> None:
    assert dispatch.held_back([4, 8], 40) == [5, 6, 7]
    assert dispatch.held_back([4, 5], 40) == []


def test_lines_have_several_m() -> None:
    alone, *line = (
        cpu_provider.problem(sizes=sizes) for sizes in ((8, 64, 64), (8, 32, 64), (24, 32, 64))
    )
    found = dispatch.lines_of(dict.fromkeys([alone, *line], ()))
    assert list(found.values()) == [{8: line[0], 24: line[1]}]


def entry(choices: dict[str, str], **times: int) -> dict[str, object]:
    return {
        "times": {name: [time, time, time, time] for name, time in times.items()},
        "choices": choices,
        "thrown_out": {},
    }


def test_a_choice_loses_what_it_takes_longer_than_the_best() -> None:
    small, large = (
        cpu_provider.problem(sizes=sizes, operand=DType.BF16)
        for sizes in ((12, 32, 64), (20, 32, 64))
    )
    entries = {
        small.key: entry({"dispatch": "a", "hint 16": "b"}, a=100, b=125, aten=110),
        large.key: entry({"dispatch": "aten", "hint 16": "b"}, a=90, b=80, aten=100),
    }
    assert dispatch.losses(entries[small.key]) == pytest.approx(
        {"dispatch": 1.0, "hint 16": 1.25, "aten": 1.1}
    )
    lines = list(dispatch.table(entries))
    assert lines[1].split()[3:] == [
        *("2", "1.1180", "(1.250)", "1.1180", "(1.250)", "1.1726", "(1.250)")
    ]
    assert lines[2].split()[0] == "all"
    assert lines[4] == f"dispatch, {large.key}: 1.250: aten for b"
