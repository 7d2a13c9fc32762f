"""Fits tile costs of grouped kernels, and judges estimates on experts held back.

Each design has two costs, a step's and the rest of a tile's, fitted by least squares of relative
errors. The launch cost and the memory bandwidth, which all share, are searched. Cases where a
kernel is near the fastest weigh more.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.estimates.measuring import ATEN
from benchmarks.group_estimates.cases import Case, cases
from benchmarks.group_estimates.measuring import WHAT
from benchmarks.record import Case as ResultCase
from benchmarks.shared.compiling import ROOT
from benchmarks.shared.records import read_record
from benchmarks.shared.records import write as write_file
from benchmarks.shared.summaries import geomean
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.providers.heuristics.group_times import (
    DATA,
    SHARPNESS,
    GroupTimes,
    TileCost,
    design_name,
    load_group_times,
    overlapped_ns,
    work_of,
)
from nvgemm_aot.targets import build_target

ARCH, DEVICE, PROVIDER = "sm_90a", "H200", "quack"
PATH = ROOT / "aot" / "nvgemm_aot" / "providers" / "heuristics" / DATA

POWER = 4.0
"""Exponent for a kernel's weight (fastest time / its time)."""
LAUNCHES_NS = (2_000.0, 4_000.0, 6_000.0, 8_000.0, 10_000.0, 12_000.0)
BANDWIDTHS = (2_500.0, 3_000.0, 3_500.0, 4_000.0, 4_500.0)
"""Candidate bandwidths in bytes a nanosecond; an H200's memory has 4,800."""
OFFERED = 4
"""Chosen kernels that are judged besides the first."""
TARGETS = (1.05, 1.015)
"""Goals for the first choice, and for the best `OFFERED`."""

LEAST_OVER_MOVING = 1.1
"""Least ratio to memory's time; below it, a time says nothing about tiles."""

_DIGITS = 5
_KEYS = {"kernels": list, "times_ns": dict}
_HEADER = f"{'time over the fastest':<45} cases {'first':>7} {'most':>7} {'of four':>7} {'most':>7}"


@dataclass(frozen=True, kw_only=True)
class Example:
    """Kernel at a case: its work and its time."""

    case: Case
    candidate: Candidate
    tiles: float
    steps: float
    moved_bytes: float
    time_ns: float
    weight: float

    @property
    def design(self) -> str:
        """Stored costs' key."""
        return design_name(self.candidate)


def fit_and_judge(paths: Sequence[Path], results: list[ResultCase], *, write: bool) -> None:
    """Fits on some experts, judges on those held back, and prints both."""
    sm_count, examples, source = _read(paths)
    fitted_on = [one for one in examples if not one.case.is_held_back]
    times = fit(fitted_on, source)
    known = load_group_times(ARCH)
    click.echo(
        f"{source}; fitted on {len({one.case.key for one in fitted_on})} of them, "
        f"{len({one.design for one in examples})} designs; launch {times.launch_ns:.0f} ns, "
        f"{times.bytes_per_ns:.0f} bytes a ns"
    )
    click.echo(_HEADER)
    judged = {"fitted": times} | ({} if known is None else {"as shipped": known})
    ends = {}
    for name, one in judged.items():
        for held_back in (False, True):
            chosen = [each for each in examples if each.case.is_held_back is held_back]
            what = "held back" if held_back else "fitted on"
            ends[name, held_back] = _judge(f"{name}, {what}", one, chosen, sm_count)
    first, best = ends["fitted", True]
    for title, figure in (("first", first), ("best of four", best)):
        name = f"held back/all/{title}"
        results.append(ResultCase(name=name, figure=figure, unit="times the best"))
    met = "met" if first <= TARGETS[0] and best <= TARGETS[1] else "missed"
    click.echo(f"aims ({TARGETS[0]} and {TARGETS[1]}): {met}")
    click.echo("\n".join(_beside_aten(paths)))
    if write:
        whole = fit(examples, source)
        write_file(PATH, f"{json.dumps({'architectures': [as_json(whole)]}, indent=1)}\n")
        click.echo(f"{PATH.name}: written, fitted on all cases")


def _read(paths: Sequence[Path]) -> tuple[int, list[Example], str]:
    records = [read_record(path, WHAT, _KEYS) for path in paths]
    target = build_target(ARCH, DEVICE)
    sm_count = target.device.sm_count.value
    provider = load_provider(PROVIDER)
    by_key = {case.key: case for case in cases()}
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        operators = {id_: operator for id_, _, operator, _ in record["kernels"]}
        for key, row in record["times_ns"].items():
            for id_, time_ns in row.items():
                if id_ != ATEN:
                    measured[key, operators[id_]].append(time_ns)
    of_case: dict[str, dict[str, float]] = defaultdict(dict)
    for (key, operator), found in measured.items():
        of_case[key][operator] = statistics.median(found)
    examples = []
    for key, row in of_case.items():
        case = by_key[key]
        offered = provider.enumerate(case.problem.signature, target).candidates
        candidates = {candidate.operator: candidate for candidate in offered}
        fastest = min(row.values())
        for operator, time_ns in row.items():
            work = work_of(case.problem, candidates[operator], case.counts(), sm_count)
            examples.append(
                Example(
                    case=case, candidate=candidates[operator], tiles=work.tiles, steps=work.steps,
                    moved_bytes=work.moved_bytes, time_ns=time_ns,
                    weight=(fastest / time_ns) ** POWER,
                )
            )  # fmt: skip
    gpus = sorted({f"{record['gpu']} {record['uuid']}, {record['date']}" for record in records})
    return sm_count, examples, f"{'; '.join(gpus)}; {len(of_case)} cases"


def _beside_aten(paths: Sequence[Path]) -> Iterator[str]:
    """Returns the fastest kernel's speed-up over ATen, by operation and routing."""
    by_key = {case.key: case for case in cases()}
    gains: dict[str, list[float]] = defaultdict(list)
    for path in paths:
        for key, row in read_record(path, WHAT, _KEYS)["times_ns"].items():
            own = min(time_ns for id_, time_ns in row.items() if id_ != ATEN)
            gains[_kind(by_key[key])].append(row[ATEN] / own)
    yield "fastest kernel over torch._grouped_mm"
    for kind, found in sorted(gains.items()):
        yield f"{kind:<45} {len(found):5d} {geomean(found):7.3f}, least {min(found):.3f}"


def _kind(case: Case) -> str:
    return f"{case.problem.signature.op.value}, {case.routing}"


def fit(examples: Sequence[Example], source: str) -> GroupTimes:
    """Returns the costs that explain measured times best."""
    tried = (
        _fit(examples, source, launch_ns, bandwidth)
        for launch_ns, bandwidth in itertools.product(LAUNCHES_NS, BANDWIDTHS)
    )
    return min(tried, key=lambda one: one[0])[1]


def _fit(
    examples: Sequence[Example], source: str, launch_ns: float, bandwidth: float
) -> tuple[float, GroupTimes]:
    """Returns the sum of squared errors and the costs for a launch cost and bandwidth."""
    of_design: dict[str, list[Example]] = defaultdict(list)
    for one in examples:
        of_design[one.design].append(one)
    costs = {}
    for name, own in sorted(of_design.items()):
        busy = [(one, _busy_ns(one, launch_ns, bandwidth)) for one in own]
        if telling := [(one, ns) for one, ns in busy if ns is not None]:
            costs[name] = _cost_of(telling)
    found = GroupTimes(
        arch=ARCH,
        source=source,
        providers=(PROVIDER,),
        launch_ns=launch_ns,
        bytes_per_ns=bandwidth,
        costs=costs,
        unknown=_unknown(costs, examples),
    )
    if {one.case.problem.signature.op.value for one in examples} - found.unknown.keys():
        return math.inf, found  # memory would explain all of it
    error = 0.0
    for one in examples:
        cost = found.cost_of(one.candidate)
        busy = one.steps * cost.step + one.tiles * cost.rest
        estimate = launch_ns + overlapped_ns(busy, one.moved_bytes / bandwidth)
        error += one.weight * math.log(estimate / one.time_ns) ** 2
    return error, found


def _busy_ns(example: Example, launch_ns: float, bandwidth: float) -> float | None:
    """Returns the tiles' time alone, by `overlapped_ns`; None if memory explains it all."""
    left, moving = example.time_ns - launch_ns, example.moved_bytes / bandwidth
    if left < LEAST_OVER_MOVING * moving:
        return None
    return float((left**SHARPNESS - moving**SHARPNESS) ** (1 / SHARPNESS))


def _cost_of(examples: Iterable[tuple[Example, float]]) -> TileCost:
    """Returns costs a, b >= 0 by least squares of (steps x a + tiles x b) / time - 1."""
    ss = st = tt = s = t = 0.0
    for one, busy_ns in examples:
        x, y, weight = one.steps / busy_ns, one.tiles / busy_ns, one.weight
        ss, st, tt = ss + weight * x * x, st + weight * x * y, tt + weight * y * y
        s, t = s + weight * x, t + weight * y
    span = ss * tt - st * st
    step, rest = (s * tt - t * st, t * ss - s * st) if span > 1e-9 * ss * tt else (0.0, -1.0)
    if rest < 0 or span <= 1e-9 * ss * tt:
        step, rest, span = s / ss, 0.0, 1.0
    elif step < 0:
        step, rest, span = 0.0, t / tt, 1.0
    return TileCost(step=_rounded(step / span), rest=_rounded(rest / span))


def _unknown(costs: Mapping[str, TileCost], examples: Iterable[Example]) -> dict[str, TileCost]:
    """Returns the median known cost per unit, by operation."""
    units: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for one in examples:
        if one.design not in costs:
            continue
        m, n, k = one.candidate.block_shape.tile
        area, cost = m * n / 128**2, costs[one.design]
        op = one.case.problem.signature.op.value
        units[op][one.design] = cost.step / (area * k / 64), cost.rest / area
    return {
        op: TileCost(
            step=_rounded(statistics.median(step for step, _ in of.values())),
            rest=_rounded(statistics.median(rest for _, rest in of.values())),
        )
        for op, of in sorted(units.items())
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _judge(
    what: str, times: GroupTimes, examples: Sequence[Example], sm_count: int
) -> tuple[float, float]:
    """Prints and returns the geometric means of first choices and of the best of `OFFERED`."""
    of_case: dict[str, list[Example]] = defaultdict(list)
    for one in examples:
        of_case[one.case.key].append(one)
    losses = {key: _losses(times, own, sm_count) for key, own in of_case.items()}
    for group, keys in _grouped(of_case).items():
        first = [losses[key][0] for key in keys]
        best = [losses[key][1] for key in keys]
        click.echo(
            f"{what:<22} {group:<22} {len(keys):5d} {geomean(first):7.3f} {max(first):7.3f} "
            f"{geomean(best):7.3f} {max(best):7.3f}"
        )
    return (
        geomean([first for first, _ in losses.values()]),
        geomean([best for _, best in losses.values()]),
    )


def _grouped(of_case: Mapping[str, Sequence[Example]]) -> dict[str, list[str]]:
    """Groups cases by operation and routing, and all."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, own in of_case.items():
        found[_kind(own[0].case)].append(key)
    return dict(sorted(found.items())) | {"all": list(of_case)}


def _losses(times: GroupTimes, examples: Sequence[Example], sm_count: int) -> tuple[float, float]:
    """Returns the first choice's and the best few's times over the fastest.

    A build does not know the routing, so routing is not used here.
    """
    problem = examples[0].case.problem
    estimates = times.corrected(problem, [one.candidate for one in examples], (), sm_count)
    ranked = [
        one.time_ns
        for _, one in sorted(zip(estimates, examples), key=lambda pair: pair[0] or math.inf)
    ]
    fastest = min(ranked)
    return ranked[0] / fastest, min(ranked[:OFFERED]) / fastest


def as_json(times: GroupTimes) -> dict[str, Any]:
    """Returns the file that `read_group_times` reads."""
    return asdict(times)
