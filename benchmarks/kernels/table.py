"""Table for bundled kernels, ATen and Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.summaries import Summary, fastest, geomean, grouped, ratio, share
from nvgemm_runtime.gemm.problem import Problem

CLEAR = 1.01
"""Speed-up from which a result counts as a win."""
TOKENS = (1, 2, 16, 128, 1024)
"""Lower bounds for m in the table."""


FEW_TOKENS = 64
"""Largest m with its own goal."""


@dataclass(frozen=True, kw_only=True)
class ProblemTimes:
    """Times measured at one problem.

    Attributes:
        problem: The problem.
        aten: ATen's times.
        triton: Triton's times; None if not measured.
        kernels: Exact bundled kernels' times, by id, best-ranked first.
    """

    problem: Problem
    aten: Summary
    triton: Summary | None
    kernels: Mapping[str, Summary]

    @classmethod
    def from_json(cls, key: str, entry: Mapping[str, Any]) -> ProblemTimes:
        """Reads an entry of `measure_problem`, or its times back to back."""
        triton = entry["triton"]
        return cls(
            problem=Problem.parse(key),
            aten=Summary.from_json(entry["aten"]),
            triton=None if triton is None else Summary.from_json(triton),
            kernels={id_: Summary.from_json(one) for id_, one in entry["kernels"].items()},
        )

    @property
    def others(self) -> list[Summary]:
        """ATen's times, and Triton's if measured."""
        return [self.aten] if self.triton is None else [self.aten, self.triton]

    @property
    def of_others(self) -> Summary:
        """The faster of ATen and Triton."""
        return fastest(self.others)

    @property
    def best_of_all(self) -> float:
        """Speed-up, with bundled kernels, over ATen and Triton."""
        return ratio(self.of_others, fastest([*self.others, *self.kernels.values()]))

    @property
    def bundle(self) -> float:
        """The bundle's speed-up over the best of ATen and Triton."""
        return ratio(self.of_others, fastest(self.kernels.values()))

    @property
    def bundle_to_aten(self) -> float:
        """The bundle's speed-up over ATen."""
        return ratio(self.aten, fastest(self.kernels.values()))

    @property
    def first_ranked(self) -> float:
        """The first-ranked kernel's speed-up over the bundle's best."""
        return ratio(fastest(self.kernels.values()), next(iter(self.kernels.values())))


def speedups_row(label: str, entries: Sequence[ProblemTimes]) -> str:
    """Returns one table row, over problems."""
    best, own = [one.best_of_all for one in entries], [one.bundle for one in entries]
    return (
        f"{label:<22} {len(entries):5d} {geomean(best):8.3f} {min(best):7.3f} {geomean(own):8.3f} "
        f"{geomean([one.bundle_to_aten for one in entries]):8.3f} "
        f"{share(one > CLEAR for one in own):7.0%} {share(one > 1.05 for one in own):7.0%}"
    )


def _speedups(entries: Sequence[ProblemTimes]) -> list[str]:
    """Returns rows for all problems, by m and by type."""
    with_triton = [one for one in entries if one.triton is not None]
    without = [one for one in entries if one.triton is None]
    lines = []
    for over, of_kind in (("over ATen and Triton", with_triton), ("over ATen alone", without)):
        if not of_kind:
            continue
        lines.append(speedups_row(over, of_kind))
        for label, group in grouped(of_kind, TOKENS, lambda one: one.problem.m):
            lines.append(speedups_row(f"  m {label}", group))
        if few := [one for one in of_kind if one.problem.m <= FEW_TOKENS]:
            lines.append(speedups_row(f"  m 1-{FEW_TOKENS}", few))
        for dtype in sorted({one.problem.signature.a.value for one in of_kind}):
            of_type = [one for one in of_kind if one.problem.signature.a.value == dtype]
            lines.append(speedups_row(f"  {dtype}", of_type))
    return lines


def table(record: Mapping[str, Any]) -> list[str]:
    """Returns the table's lines."""
    entries = [ProblemTimes.from_json(key, one) for key, one in record.items() if one["kernels"]]
    thrown_out = {key: one["thrown_out"] for key, one in record.items() if one["thrown_out"]}
    head = (
        f"{'':<22} {'':>5} {'best of':>8} {'':>7} {'bundle':>8} {'bundle':>8} {'wins':>7} "
        f"{'wins':>7}"
    )
    columns = (
        f"{'':<22} {'count':>5} {'all':>8} {'least':>7} {'alone':>8} {'to ATen':>8} {'> 1%':>7} "
        f"{'> 5%':>7}"
    )
    beside = [
        ProblemTimes.from_json(key, one["back_to_back"])
        for key, one in record.items()
        if one["kernels"] and "back_to_back" in one
    ]
    lines = [head, columns, *(["launches apart"] if beside else []), *_speedups(entries)]
    if beside:
        lines += ["launches back to back", *_speedups(beside)]
    lines += [
        "speed-ups: geometric means of time over time; above 1 bundled kernels are faster.",
        "best of all: of bundle, ATen and Triton over the best of ATen and Triton, chosen by other",
        "rounds than those reported; least: at the worst problem; wins: share of problems.",
    ]
    if entries:
        first = geomean([one.first_ranked for one in entries])
        kernels = {id_ for one in entries for id_ in one.kernels}
        lines.append(
            f"The kernel ranked first is {first:.3f} times as fast as the bundle's best "
            f"({len(kernels)} kernels)."
        )
    triton_s = [one["triton_s"] for one in record.values() if one["triton_s"] is not None]
    if triton_s:
        none = sum(one["why_no_triton"] is not None for one in record.values())
        lines.append(
            f"Compiling and autotuning Triton took {sum(triton_s):.0f} s for {len(triton_s)} "
            f"problems; {none} have no Triton kernel."
        )
    without = [key for key, one in record.items() if not one["kernels"]]
    lines += [f"no bundled kernel was exact: {key}" for key in without]
    for key, why in thrown_out.items():
        lines += [f"THROWN OUT at {key}: {id_[:12]}: {reason}" for id_, reason in why.items()]
    return lines
