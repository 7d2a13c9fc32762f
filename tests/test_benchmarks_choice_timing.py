"""benchmarks/choice_timing.py: what its table makes of times."""

from __future__ import annotations

from benchmark_modules import load

(choice_timing,) = load("choice_timing")


def times(stock: float, written: float, read: float, graph: float) -> dict[str, float]:
    return {"stock": stock, "written": written, "read": read, "graph": graph}


def test_a_way_loses_what_its_choice_takes_longer_than_the_fastest() -> None:
    choices = {"aten": times(35.4, 15.0, 13.0, 10.0), "kernel": times(17.4, 16.0, 15.0, 12.0)}
    lines = choice_timing.table([{"m": 24, "n": 5120, "k": 2560, "times_us": choices}])
    text = "\n".join(lines)
    assert "stock: its choices take 1.2000 times as long" in text
    assert "written: its choices take 1.0000 times as long" in text
    assert "read: its choices take 1.0000 times as long" in text
    assert lines[1].split()[3:] == ["10.0", "12.0", "kernel", "10.0", "aten", "10.0", "aten"]
    assert "read: 3.0 us more than in the graph, the median; 3.0 to 3.0" in text
