"""Measurements with their origin, independent of any bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nvgemm_runtime.bundle.encode import conditions_json
from nvgemm_runtime.bundle.format import canonical_json
from nvgemm_runtime.bundle.ranking_entries import Conditions, Timing
from nvgemm_runtime.gemm.problem import Problem

from .agreement import Measurement

COLD = "cold"
"""Cache condition in `tune`: operands are not in the L2 cache."""


@dataclass(frozen=True, kw_only=True, order=True)
class Operator:
    """Provider and operator that a kernel was compiled from, as named in a bundle's header."""

    provider: str
    operator: str

    @property
    def name(self) -> str:
        """Name for messages and in a `Measurement`."""
        return f"{self.provider}/{self.operator}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Hardware, software and method used for a measurement.

    Attributes:
        arch: Architecture that the kernels were compiled for, e.g. ``sm_90a``.
        toolchain: Versions, by name, for everything that shapes the kernels' code.
        gpu: The GPU product's driver name.
        by: The program that measured, with its version.
        cache: L2 cache condition: `COLD`, or a text unknown to this release.
        conditions: Driver, torch, CUDA, day, launch spacing, and GPU.
    """

    arch: str
    toolchain: Mapping[str, str]
    gpu: str
    by: str
    conditions: Conditions
    cache: str = COLD

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """JSON object without the day, which differs between problems."""
        conditions = conditions_json(self.conditions)
        del conditions["date"]
        return {
            "arch": self.arch,
            "toolchain": dict(self.toolchain),
            "gpu": self.gpu,
            "by": self.by,
            "cache": self.cache,
            "conditions": conditions,
        }

    def on(self, date: str) -> Origin:
        """Returns this origin with another day."""
        return replace(self, conditions=replace(self.conditions, date=date))

    @cached_property
    def kind(self) -> bytes:
        """Key that is equal for comparable measurements: same kernels, product and method."""
        subject = {"arch": self.arch, "toolchain": dict(self.toolchain), "gpu": self.gpu}
        method = {"cache": self.cache, "launches": self.conditions.launches}
        return canonical_json({**subject, **method})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One measurement for one problem.

    Attributes:
        problem: The problem.
        origin: Hardware, software and method.
        kernels: Each kernel's time, the fastest first.
        aten: ATen's time, or None if ATen has no operator for the problem.
        triton: The best Triton kernel's time, or None if it was not measured.
        doubts: Reasons not to rely on the order.
        repeated: Seconds after which another process measured the same on this GPU, or None.
        is_shipped: True if the entry comes with this package. Ignored in comparisons.
    """

    problem: Problem
    origin: Origin
    kernels: tuple[tuple[Operator, Timing], ...]
    aten: Timing | None
    triton: Timing | None
    doubts: tuple[str, ...]
    repeated: int | None = None
    is_shipped: bool = field(default=False, compare=False)

    @cached_property
    def measurement(self) -> Measurement:
        """The entry for comparison with other measurements, with kernels by operator name."""
        return Measurement(
            kernels={operator.name: timing for operator, timing in self.kernels},
            aten=self.aten,
            triton=self.triton,
            doubts=self.doubts,
            conditions=self.origin.conditions,
        )

    @cached_property
    def sort_key(self) -> tuple[Problem, bytes, str, bytes]:
        """Sort key that groups a file's entries by problem, the newest last.

        The key does not change when a measurement is repeated.
        """
        date = self.origin.conditions.date
        return self.problem, self.origin.kind, date, canonical_json(self._document)

    @property
    def _document(self) -> list[Any]:
        times = [
            (operator.name, timing.time_ns, timing.spread_ns) for operator, timing in self.kernels
        ]
        torchs = [
            timing and (timing.time_ns, timing.spread_ns) for timing in (self.aten, self.triton)
        ]
        return [self.origin.document, times, torchs, list(self.doubts)]


@dataclass(frozen=True, kw_only=True)
class Rankings:
    """Measurements, sorted and unique."""

    entries: tuple[Entry, ...]

    @property
    def groups(self) -> dict[tuple[Problem, bytes], tuple[Entry, ...]]:
        """Entries by problem and `Origin.kind`, the newest last."""
        by_key: dict[tuple[Problem, bytes], list[Entry]] = {}
        for entry in self.entries:
            by_key.setdefault((entry.problem, entry.origin.kind), []).append(entry)
        return {key: tuple(entries) for key, entries in by_key.items()}


def merge(parts: Iterable[Rankings]) -> Rankings:
    """Merges rankings. Among equal entries, keeps the repeated one."""
    by_key: dict[Any, Entry] = {}
    for entry in (entry for part in parts for entry in part.entries):
        known = by_key.setdefault(entry.sort_key, entry)
        if (known.repeated or 0) < (entry.repeated or 0):
            by_key[entry.sort_key] = entry
    return Rankings(entries=tuple(by_key[key] for key in sorted(by_key)))
