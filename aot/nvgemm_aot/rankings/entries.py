"""What was measured of problems, with where and how, apart from any bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nvgemm_runtime.bundle.encode import conditions_json
from nvgemm_runtime.bundle.format import Conditions, Timing, canonical_json
from nvgemm_runtime.gemm.problem import Problem

from .agreement import Measurement

COLD = "cold"
"""How `tune` has operands in the L2 cache: not at all."""


@dataclass(frozen=True, kw_only=True, order=True)
class Operator:
    """What a kernel was compiled from, by the names that a bundle's header has."""

    provider: str
    operator: str

    @property
    def name(self) -> str:
        """Its name for messages, and in a `Measurement`."""
        return f"{self.provider}/{self.operator}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where and how something was measured.

    Attributes:
        arch: Architecture that the kernels were compiled for, e.g. ``sm_90a``.
        toolchain: Versions of what shapes the kernels' code, by name.
        gpu: The GPU product, as its driver names it.
        by: The program that measured, with its version.
        cache: Whether operands were in the L2 cache: `COLD`, or a text that this release does not
            know.
        conditions: Driver, torch, CUDA, day, how launches followed each other, and which GPU.
    """

    arch: str
    toolchain: Mapping[str, str]
    gpu: str
    by: str
    conditions: Conditions
    cache: str = COLD

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """Its JSON object, without the day, which differs between problems."""
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
        """This origin, with the day of measuring replaced."""
        return replace(self, conditions=replace(self.conditions, date=date))

    @cached_property
    def kind(self) -> bytes:
        """Equal for measurements that can be compared: what ran, on which product, and how."""
        same = {"arch": self.arch, "toolchain": dict(self.toolchain), "gpu": self.gpu}
        how = {"cache": self.cache, "launches": self.conditions.launches}
        return canonical_json({**same, **how})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One measurement of one problem.

    Attributes:
        problem: The problem.
        origin: Where and how it was measured.
        kernels: Each kernel's time, the fastest first.
        aten: ATen's time; None where it has no operator for the problem.
        triton: The best Triton kernel's time; None where it was not measured.
        doubts: Reasons not to rely on the order.
        repeated: Seconds after which another process measured the same on this GPU; None where
            none did.
        is_shipped: Whether it comes with this package; no part of what was measured.
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
        """What is compared with other measurements: kernels by the names of their operators."""
        return Measurement(
            kernels={operator.name: timing for operator, timing in self.kernels},
            aten=self.aten,
            triton=self.triton,
            doubts=self.doubts,
            conditions=self.origin.conditions,
        )

    @cached_property
    def sort_key(self) -> tuple[Problem, bytes, str, bytes]:
        """Order of the entries of a file: each problem's together, the newest last.

        It is the same for one measurement before and after it was repeated.
        """
        date = self.origin.conditions.date
        return self.problem, self.origin.kind, date, canonical_json(self._document)

    @property
    def _document(self) -> list[Any]:
        times = [(one.name, timing.time_ns, timing.spread_ns) for one, timing in self.kernels]
        torchs = [
            timing and (timing.time_ns, timing.spread_ns) for timing in (self.aten, self.triton)
        ]
        return [self.origin.document, times, torchs, list(self.doubts)]


@dataclass(frozen=True, kw_only=True)
class Rankings:
    """Measurements of problems, sorted, each once."""

    entries: tuple[Entry, ...]

    @property
    def groups(self) -> dict[tuple[Problem, bytes], tuple[Entry, ...]]:
        """Entries by problem and `Origin.kind`, the newest of each last."""
        found: dict[tuple[Problem, bytes], list[Entry]] = {}
        for entry in self.entries:
            found.setdefault((entry.problem, entry.origin.kind), []).append(entry)
        return {key: tuple(entries) for key, entries in found.items()}


def merge(several: Iterable[Rankings]) -> Rankings:
    """All entries of several rankings; of equal ones, one: the repeated one."""
    found: dict[Any, Entry] = {}
    for entry in (entry for one in several for entry in one.entries):
        known = found.setdefault(entry.sort_key, entry)
        if (known.repeated or 0) < (entry.repeated or 0):
            found[entry.sort_key] = entry
    return Rankings(entries=tuple(found[key] for key in sorted(found)))
