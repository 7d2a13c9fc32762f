"""HGEMM-1000's sizes, and its table."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.resuming import ORDER_SEED
from benchmarks.shared.summaries import (
    Summary,
    fastest,
    grouped,
    mean,
    median,
    ratio,
    share,
    standard_error,
)

EXTENTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
LOG2_BOUNDS = (18, 21, 24, 27, 30, 33, 36, 39)
"""Lower bounds of log2(m n k), rounded down, in the table: from 64^3 to 16384^3."""
MODES = ("offline", "server")
LAYOUTS = ("nn", "tn")
BUNDLED = "ours"
"""The best bundled kernel's name in result files."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Contender.

    Attributes:
        method: Measuring method.
        layouts: Layouts among which the fastest counts, on both sides.
    """

    method: str
    layouts: tuple[str, ...]


BASELINES = {
    f"{name} {label}": Baseline(method=method, layouts=layouts)
    for name, method in (
        ("torch.matmul", "torch"),
        ("cuBLAS", "cublas"),
        ("cuBLASLt heuristic", "lt-heuristic"),
        ("cuBLASLt autotuned", "lt-tuned"),
    )
    for label, layouts in (("NN", ("nn",)), ("TN", ("tn",)), ("max", LAYOUTS))
}
"""Baselines by their names in the table."""

CLEAR = 0.01
"""Margin from which a result counts as a win."""

STRONGEST = ("torch.matmul max", "cuBLAS max", "cuBLASLt heuristic max", "cuBLASLt autotuned max")
"""Baselines in the table by size."""


@dataclass(frozen=True, kw_only=True, order=True)
class Size:
    """Product extents [m, k] @ [k, n]."""

    m: int
    n: int
    k: int

    @property
    def key(self) -> str:
        """Key such as ``64_4096_128``."""
        return f"{self.m}_{self.n}_{self.k}"

    @classmethod
    def parse(cls, key: str) -> Size:
        """Reads a size from its key."""
        m, n, k = map(int, key.split("_"))
        return cls(m=m, n=n, k=k)

    @property
    def log2(self) -> int:
        """Logarithm of m n k to base 2, rounded down."""
        return (self.m * self.n * self.k).bit_length() - 1


def sizes(sample: int | None = None) -> list[Size]:
    """Returns all sizes, or the first so many, in the fixed random order."""
    every = [Size(m=m, n=n, k=k) for m, n, k in itertools.product(EXTENTS, repeat=3)]
    random.Random(ORDER_SEED).shuffle(every)
    return every[:sample]


@dataclass(frozen=True, kw_only=True)
class SizeTimes:
    """Times measured at one size.

    Attributes:
        size: The size.
        times: Summaries by mode and method, e.g. ``offline``, ``lt-tuned-nn``; bundled kernels are
            ``ours-nn`` and ``ours-tn``, if there is an exact one.
    """

    size: Size
    times: Mapping[str, Mapping[str, Summary]]

    @classmethod
    def from_json(cls, key: str, entry: Mapping[str, Any]) -> SizeTimes:
        """Reads an entry of `__main__.measure_size`."""
        times = {
            mode: {name: Summary.from_json(one) for name, one in entry[mode].items()}
            for mode in MODES
        }
        return cls(size=Size.parse(key), times=times)

    def fastest(self, mode: str, method: str, layouts: Sequence[str]) -> Summary | None:
        """Returns a method's fastest result in these layouts; None if none was measured."""
        of_layouts = [self.times[mode].get(f"{method}-{layout}") for layout in layouts]
        found = [one for one in of_layouts if one is not None]
        return fastest(found) if found else None

    def is_served(self) -> bool:
        """Returns True if there is an exact kernel."""
        return self.fastest(MODES[0], BUNDLED, LAYOUTS) is not None

    def speedup(self, mode: str, name: str) -> float:
        """Returns t_ref / t - 1 over a baseline; 0 if no kernel serves the size."""
        bundled, reference = self._compared(mode, name)
        return 0.0 if bundled is None else ratio(reference, bundled) - 1

    def best_of(self, mode: str, name: str) -> float:
        """Returns t_ref / t - 1 for the faster of both."""
        bundled, reference = self._compared(mode, name)
        either = [reference] if bundled is None else [reference, bundled]
        return ratio(reference, fastest(either)) - 1

    def _compared(self, mode: str, name: str) -> tuple[Summary | None, Summary]:
        baseline = BASELINES[name]
        reference = self.fastest(mode, baseline.method, baseline.layouts)
        assert reference is not None, f"{self.size.key}: {name} was not measured"
        return self.fastest(mode, BUNDLED, baseline.layouts), reference


def table(record: Mapping[str, Any]) -> list[str]:
    """Returns the tables' lines."""
    entries = [SizeTimes.from_json(key, one) for key, one in record.items()]
    lines: list[str] = []
    for mode in MODES:
        lines += [
            f"{mode}: {len(entries)} of {len(EXTENTS) ** 3} sizes",
            f"{'speed-up over':<26} {'mean':>8} {'+-':>6} {'median':>8} {'best of':>8} {'wins':>6}",
        ]
        for name in BASELINES:
            values = [one.speedup(mode, name) for one in entries]
            either = [one.best_of(mode, name) for one in entries]
            lines.append(
                f"{name:<26} {mean(values):+8.1%} {standard_error(values, len(EXTENTS) ** 3):6.1%} "
                f"{median(values):+8.1%} {mean(either):+8.1%} "
                f"{share(value > CLEAR for value in values):6.0%}"
            )
        lines.append("")
    head = "".join(f" {name:>23}" for name in STRONGEST)
    lines.append(f"{'log2(m n k)':<11} {'mode':<8} {'sizes':>5}{head}")
    for (label, group), mode in itertools.product(
        grouped(entries, LOG2_BOUNDS, lambda one: one.size.log2), MODES
    ):
        cells = ""
        for name in STRONGEST:
            speedup = mean([one.speedup(mode, name) for one in group])
            best = mean([one.best_of(mode, name) for one in group])
            cells += f" {f'{speedup:+.1%} ({best:+.1%})':>23}"
        lines.append(f"{label:<11} {mode:<8} {len(group):5d}{cells}")
    return [*lines, *_notes(record, entries)]


def _notes(record: Mapping[str, Any], entries: Sequence[SizeTimes]) -> list[str]:
    lines = [
        "speed-up: t_ref / t - 1 of the best bundled kernel in the same layout, for max in the",
        "faster of both; +-: standard error of the mean, for all 1000; best of, in brackets: of",
        "the faster of it and the baseline; wins: by more than 1 %. What is fastest is chosen by",
        "other rounds than those reported. Where no kernel serves a size, it counts as 0.",
    ]
    algorithms = [count for one in record.values() for count in one["algorithms"].values()]
    if algorithms:
        lines.append(
            f"cuBLASLt suggested {min(algorithms)} to {max(algorithms)} algorithms, "
            f"{mean(algorithms):.0f} in the mean."
        )
    unserved = [one.size.key for one in entries if not one.is_served()]
    if unserved:
        lines.append(f"no kernel serves {len(unserved)} sizes: {', '.join(unserved[:10])}")
    bases: dict[str, int] = {}
    for one in record.values():
        for basis in one["basis"].values():
            bases[basis] = bases.get(basis, 0) + 1
    said = ", ".join(f"{count} {basis}" for basis, count in sorted(bases.items()))
    lines.append(f"Sizes in a layout, by how kernels were found: {said}.")
    inexact: dict[str, int] = {}
    for one in record.values():
        for method in one["inexact"]:
            inexact[method] = inexact.get(method, 0) + 1
    for method, count in sorted(inexact.items()):
        lines.append(f"{method} is not exact on zeros and ones at {count} sizes.")
    for key, one in record.items():
        for id_, why in one["thrown_out"].items():
            lines.append(f"THROWN OUT at {key}: {id_[:12]}: {why}")
    return lines
