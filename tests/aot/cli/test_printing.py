"""Counts, remaining time, and how much of a plan is printed."""

from __future__ import annotations

from typing import Any

import pytest

from nvgemm_aot.cli.build import documents
from nvgemm_aot.cli.build.documents import plan_text
from nvgemm_aot.cli.terminal.printing import RemainingTime, count_text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "kernel", "1 kernel"),
        (0, "kernel", "0 kernels"),
        (2, "more reason", "2 more reasons"),
        (3, "process", "3 processes"),
        (2, "entry", "2 entries"),
        (30, "day", "30 days"),
    ],
)
def test_a_noun_follows_its_count(count: int, noun: str, text: str) -> None:
    assert count_text(count, noun) == text


def test_the_time_until_the_first_is_done_is_not_taken_for_that_of_each() -> None:
    remaining = RemainingTime()
    assert remaining.after(0, 225, 0.0) is None
    assert remaining.after(1, 225, 10.0) is None, "all of it may be the start"
    assert remaining.after(2, 225, 11.0) is None
    assert remaining.after(21, 225, 30.0) == 204.0
    assert remaining.after(225, 225, 234.0) is None


def plan_of(problems: int) -> dict[str, Any]:
    row = {"kernels": [{"operator": "o", "time_ns": 1000}], "times": "estimated"}
    target = {
        "target": "sm_90a-linux_x86_64-cu13",
        "products": [
            {
                "device": "H200",
                "problems": [{"problem": f"problem-{i}", **row} for i in range(problems)],
            }
        ],
        "kernels": 1,
        "to_compile": 1,
        "estimated_most_bytes": 4700,
    }
    return {
        "targets": [target],
        "unserved": [],
        "jobs": 1,
        "estimated_seconds": 4.6,
        "measured": [],
        "rankings": [],
        "prunes": False,
    }


def test_a_long_plan_is_cut_and_says_where_all_of_it_is() -> None:
    most = documents._PLANNED_PROBLEMS
    whole = plan_text(plan_of(most))
    assert whole.count("problem-") == most
    assert "more" not in whole.split("s of compiling")[0]
    cut = plan_text(plan_of(most + 1))
    assert cut.count("problem-") == most
    assert "\nand 1 more problem, which --json lists\n" in cut
    assert f"{most + 1} problems, 1 unique kernel" in cut
    assert "about 5 s of compiling in 1 process," in cut
