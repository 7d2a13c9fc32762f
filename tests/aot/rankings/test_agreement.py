"""When two measurements confirm each other, and when they contradict each other."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from made_rankings import GPU_A, GPU_B, GPU_C, on, rankings
from nvgemm_aot.cli.rankings.command import summary_document
from nvgemm_aot.rankings.agreement import Agreement, Relation, compare, compare_repeat
from nvgemm_aot.rankings.assess import assess
from nvgemm_aot.rankings.entries import Entry, Rankings, merge
from nvgemm_aot.rankings.file import decode, encode
from nvgemm_runtime.bundle.ranking_entries import BACK_TO_BACK

CONFIRMS, CONTRADICTS, NEITHER = Relation.CONFIRMS, Relation.CONTRADICTS, Relation.NEITHER
REPEATS = Relation.REPEATS


def relation(one: Entry, other: Entry) -> tuple[Relation, str]:
    there = compare(one.measurement, other.measurement)
    back = compare(other.measurement, one.measurement)
    assert there.relation is back.relation, "it does not matter which is older"
    return there.relation, there.reason


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"x": 1000, "y": 1100}, {"x": 1000, "y": 1100}, CONFIRMS),
        # Another GPU may be slower altogether.
        ({"x": 1000, "y": 1100}, {"x": 1500, "y": 1600}, CONFIRMS),
        # Each one's fastest is within 1 % of the best on the other, at its limit and beyond it.
        ({"x": 1000, "y": 1005}, {"x": 1010, "y": 1000}, CONFIRMS),
        ({"x": 1000, "y": 1005}, {"x": 1011, "y": 1000}, NEITHER),
        ({"x": 1000, "y": 1011}, {"x": 1005, "y": 1000}, NEITHER),
        # Beyond the noise too, which is the spreads (1 + 1) and 1 %.
        ({"x": 1000, "y": 1005}, {"x": 1013, "y": 1000}, CONTRADICTS),
        # A winner that the other did not measure.
        ({"x": 1000}, {"y": 1000}, NEITHER),
    ],
)
def test_the_fastest_of_each_must_be_within_one_percent_on_the_other(
    one: dict[str, int], other: dict[str, int], expected: Relation
) -> None:
    assert relation(on(GPU_A, one), on(GPU_B, other))[0] is expected


@pytest.mark.parametrize(
    ("aten", "there", "expected"),
    [
        (2000, 2000, CONFIRMS),
        (1001, 999, NEITHER),  # within the noise, and yet another verdict
        (2000, 900, CONTRADICTS),
        (2000, None, NEITHER),
        (None, None, CONFIRMS),
    ],
)
def test_the_verdict_of_bundled_or_aten_must_be_the_same(
    aten: int | None, there: int | None, expected: Relation
) -> None:
    times = {"x": 1000, "y": 1200}
    one, other = on(GPU_A, times, aten=aten), on(GPU_B, times, aten=there)
    assert relation(one, other)[0] is expected


def test_aten_may_be_the_verdict() -> None:
    one = on(GPU_A, {"x": 1000, "y": 1200}, aten=800)
    assert relation(one, on(GPU_B, {"y": 1000}, aten=810))[0] is CONFIRMS


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"gpu": GPU_A}, f"both were measured on one GPU, {GPU_A[:12]}"),
        ({"gpu": None}, "the GPU of at least one is unknown"),
        ({"launches": BACK_TO_BACK}, "one timed launches "),
        ({"torch": "2.12.0"}, "ATen's torch or CUDA differs"),
        ({"doubts": ("it was hot",)}, "at least one has doubts"),
    ],
)
def test_what_is_not_two_like_measurements_confirms_nothing(how: Any, said: str) -> None:
    times = {"x": 1000, "y": 1200}
    found, why = relation(on(GPU_A, times), on(**{"gpu": GPU_B, "times": times, **how}))
    assert found is NEITHER
    assert why.startswith(said)


def test_atens_equal_is_aten() -> None:
    """As torch.compile decides by a measured ranking."""
    assert on(GPU_A, {"a": 1000, "x": 1000}, aten=1000).measurement.winner == "aten"
    assert on(GPU_A, {"a": 1000, "x": 1000}, aten=1001).measurement.winner == "some/a"


def test_one_gpu_contradicts_itself_beyond_the_noise() -> None:
    found, why = relation(on(GPU_A, {"x": 1000, "y": 1200}), on(GPU_A, {"x": 1200, "y": 1000}))
    assert found is CONTRADICTS
    assert "two runs disagree: kernel some/" in why


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"x": 1000, "y": 1005}, {"x": 1010, "y": 1000}, REPEATS),
        ({"x": 1000, "y": 1005}, {"x": 1011, "y": 1000}, NEITHER),
        ({"x": 1000, "y": 1200}, {"x": 1000}, REPEATS),  # what is far behind is not measured again
        ({"x": 1000, "y": 1200}, {"x": 1200, "y": 1000}, CONTRADICTS),
        ({"x": 1000, "y": 1200}, {"x": 1060, "y": 1200}, CONTRADICTS),  # slower by over 5 %
        ({"x": 1998}, {"x": 2001}, NEITHER),  # another verdict
        ({"x": 1000}, {}, NEITHER),
    ],
)
def test_a_second_measurement_on_one_gpu_repeats_what_it_agrees_with(
    one: dict[str, int], other: dict[str, int], expected: Relation
) -> None:
    first, second = on(GPU_A, one).measurement, on(GPU_A, other).measurement
    assert compare_repeat(first, second).relation is expected


@pytest.mark.parametrize(
    ("first_ns", "second_ns", "why"),
    [
        (920, 920, ""),
        (910, 921, "only the first gained 8%"),  # 9 %, and then less than counts
        (976, 945, ""),  # 2.4 %, by which it is judged, and then more
        (980, 981, "only the first gained 2%"),
        (985, 990, ""),  # too little both times: ATen computes
        (700, 730, ""),
    ],
)
def test_a_gain_that_lets_a_ranking_count_must_be_there_both_times(
    first_ns: int, second_ns: int, why: str
) -> None:
    first, second = (
        on(GPU_A, {"x": time_ns}, aten=1000).measurement for time_ns in (first_ns, second_ns)
    )
    assert compare_repeat(first, second).reason == why
    assert (compare_repeat(first, second).relation is REPEATS) is (not why)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"gpu": GPU_B}, "they are not known to come from one GPU"),
        ({"launches": BACK_TO_BACK}, "they timed launches differently"),
        ({"torch": "2.12.0"}, "ATen's torch or CUDA differs"),
        ({"doubts": ("it was hot",)}, "at least one has doubts"),
        ({"aten": None}, "they measured different contenders"),
    ],
)
def test_what_is_not_two_like_measurements_of_one_gpu_repeats_nothing(how: Any, said: str) -> None:
    times = {"x": 1000, "y": 1200}
    second = on(**{"gpu": GPU_A, "times": times, **how}).measurement
    found = compare_repeat(on(GPU_A, times).measurement, second)
    assert (found.relation, found.reason) == (NEITHER, said)


def test_measurements_of_an_unknown_gpu_repeat_nothing() -> None:
    measured = on(None, {"x": 1000}).measurement
    assert compare_repeat(measured, measured).relation is NEITHER


def assessed(*entries: Entry) -> Any:
    (group,) = rankings(*entries).groups.values()
    return assess(group)


def test_two_gpus_confirm_and_three_that_agree_are_all_named() -> None:
    times = {"x": 1000, "y": 1200}
    found = assessed(on(GPU_A, times))
    assert (found.standing, found.confirmed_by) == ("measured once", ())
    found = assessed(on(GPU_B, times), on(GPU_A, times))
    assert (found.standing, found.confirmed_by) == ("confirmed", (GPU_A, GPU_B))
    found = assessed(*(on(gpu, times) for gpu in (GPU_C, GPU_A, GPU_B)))
    assert found.confirmed_by == (GPU_A, GPU_B, GPU_C)


def test_a_gpu_that_measured_twice_is_named_and_confirms_nothing() -> None:
    times = {"x": 1000, "y": 1200}
    found = assessed(on(GPU_A, times), on(GPU_A, times, date="2026-11-22"))
    assert (found.standing, found.confirmed_by) == ("measured once", ())
    assert (found.measured_again, found.repeated) == ((GPU_A[:12],), None)
    assert found.entry.origin.conditions.date == "2026-11-22"


def test_a_repeated_measurement_counts_before_a_newer_one_that_was_not_repeated() -> None:
    times = {"x": 1000, "y": 1200}
    repeated = on(GPU_A, times, repeated=300)
    assert (assessed(repeated).standing, assessed(repeated).repeated) == ("repeated", 300)
    found = assessed(repeated, on(GPU_A, {"x": 1001, "y": 1201}, date="2026-11-22"))
    assert (found.standing, found.repeated, found.entry) == ("repeated", 300, repeated)


def test_two_gpus_are_more_than_one_that_repeated() -> None:
    times = {"x": 1000, "y": 1200}
    assert assessed(on(GPU_A, times, repeated=300), on(GPU_B, times)).standing == "confirmed"
    # Two that confirm each other with a later torch, beside one that repeated with an earlier.
    later = [on(gpu, times, torch="2.12.0", date="2026-11-23") for gpu in (GPU_B, GPU_C)]
    found = assessed(on(GPU_A, times, repeated=300), *later)
    assert (found.standing, found.confirmed_by) == ("confirmed", (GPU_B, GPU_C))
    assert found.entry.origin.conditions.torch == "2.12.0"
    assert assessed(on(GPU_A, times, repeated=300), later[0]).standing == "repeated"


def test_another_gpu_puts_a_repeated_measurement_in_doubt() -> None:
    other = on(GPU_B, {"x": 1200, "y": 1000})
    found = assessed(on(GPU_A, {"x": 1000, "y": 1200}, repeated=300), other)
    assert (found.standing, found.repeated) == ("doubtful", None)


def test_of_one_measurement_before_and_after_it_was_repeated_the_latter_stays() -> None:
    once, repeated = on(GPU_A, {"x": 1000}), on(GPU_A, {"x": 1000}, repeated=300)
    for several in ([once, repeated], [repeated, once]):
        assert rankings(*several).entries == (repeated,)


def test_gpus_that_contradict_each_other_make_it_doubtful_whichever_is_newer() -> None:
    one, other = on(GPU_A, {"x": 1000, "y": 1200}), on(GPU_B, {"x": 1200, "y": 1000})
    third = on(GPU_C, {"x": 1000, "y": 1200}, date="2026-11-23")
    for several in ([one, other], [other, one], [one, other, third]):
        found = assessed(*several)
        assert found.standing == "doubtful"
        assert found.confirmed_by == ()
        assert any("was fastest on one GPU, and took 1200 ns" in doubt for doubt in found.doubts)


def test_the_newest_without_doubts_counts() -> None:
    times = {"x": 1000, "y": 1200}
    busy = on(GPU_B, {"x": 3000, "y": 1000}, date="2026-11-23", doubts=("it was busy",))
    found = assessed(on(GPU_A, times), busy)
    assert (found.entry.origin.conditions.gpu_sha256, found.doubts) == (GPU_A, ())
    found = assessed(busy)
    assert (found.standing, found.doubts) == ("doubtful", ("it was busy",))


def test_only_the_newest_of_another_gpu_counts() -> None:
    wrong = on(GPU_B, {"x": 1200, "y": 1000}, date="2026-11-20")
    times = {"x": 1000, "y": 1200}
    settled = on(GPU_B, times, date="2026-11-21")
    found = assessed(wrong, settled, on(GPU_A, times, date="2026-11-22"))
    assert found.confirmed_by == (GPU_A, GPU_B)


def test_those_that_agree_are_those_of_which_each_pair_confirms() -> None:
    dice = random.Random(45)
    sizes = set()
    for _ in range(300):
        entries = [
            on(
                dice.choice((None, *"abcdefgh")),
                {name: dice.choice((1000, 1003, 1008, 1011, 1030)) for name in "xyz"},
                aten=dice.choice((2000, 2000, 2000, 1005, None)),
                torch=dice.choice(("2.11.0", "2.11.0", "2.11.0", "2.13.0")),
                doubts=dice.choice(((), (), (), ("it was hot",))),
            )
            for _ in range(8)
        ]
        first, *others = (one.measurement for one in entries)
        agreement, agreeing = Agreement(first), [first]
        for one in others:
            pairs = [compare(one, another).relation for another in agreeing]
            confirms_all = all(relation is CONFIRMS for relation in pairs)
            assert agreement.add(one) is confirms_all
            agreeing += [one] * confirms_all
        sizes.add(len(agreeing))
    assert sizes >= {1, 2, 3}


def calls(work: Callable[[list[Rankings]], object], given: list[Rankings]) -> int:
    """How many Python functions are called, which no clock and no other process changes."""
    count = itertools.count()

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            next(count)

    sys.setprofile(on_event)
    try:
        work(given)
    finally:
        sys.setprofile(None)
    return next(count)


def test_work_grows_with_the_measurements_of_one_problem_and_not_with_their_pairs() -> None:
    def made(count: int) -> list[Rankings]:
        """Measurements of as many GPUs, in as many drivers' versions, by as many kernels."""
        return [
            rankings(on(f"{number:064x}", {"x": 1000, f"y{number}": 1100}, torch=f"2.11.{number}"))
            for number in range(count)
        ]

    def merged_and_shown(several: list[Rankings]) -> None:
        merged = merge(several)
        assert summary_document(decode("r.json", encode(merged)))["standings"] == {"confirmed": 1}

    some, twice = (calls(merged_and_shown, made(count)) for count in (60, 120))
    assert twice < 2.3 * some
