"""benchmarks/additive/choice_timing.py: its table."""

from __future__ import annotations

from benchmarks.additive import choice_timing


def times(
    stock: float, cold: float, gpu: float, *, memory: float, cache: float, in_a_row: float
) -> dict[str, float]:
    ways = {"stock": stock, "cold": cold, "gpu_time": gpu}
    return {**ways, "memory": memory, "cache": cache, "in a row": in_a_row}


def test_a_way_loses_what_its_choice_takes_longer_than_the_fastest() -> None:
    choices = {
        "aten": times(35.4, 13.0, 10.5, memory=10.0, cache=5.0, in_a_row=8.0),
        "kernel": times(17.4, 12.0, 10.8, memory=9.5, cache=6.0, in_a_row=9.0),
    }
    lines = choice_timing.table([{"m": 24, "n": 5120, "k": 2560, "times_us": choices}])
    assert lines[1].split()[3:] == [
        "9.5",
        "1.000",
        "1.000",
        "1.053",
        "5.0",
        "1.200",
        "1.200",
        "1.000",
        "8.0",
        "1.125",
        "1.125",
        "1.000",
    ]
    text = "\n".join(lines)
    assert "gpu_time, memory: its choices take 1.0526 times as long as the fastest" in text
    assert "longer than ATen by over 2 % in 0 of 1, at most 1.0000" in text
    assert "cold, cache: its choices take 1.2000 times as long" in text
    assert "longer than ATen by over 2 % in 1 of 1, at most 1.2000" in text
