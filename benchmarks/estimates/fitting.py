"""Fits corrections of runtime estimates and judges them on sizes held back.

The logarithm of measured over estimated time is fitted by the features in
`nvgemm_aot.providers.heuristics.corrections`, with a constant per problem, since only the order
within a problem matters. Kernels near the problem's fastest weigh more.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.estimates.records import Measurements
from benchmarks.record import Case
from benchmarks.shared.compiling import ROOT
from benchmarks.shared.records import write as write_file
from nvgemm_aot.pipeline.select_candidates import SPLIT_GAIN, Choice, rank_splits_behind, select
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.providers.base import RuntimeModel
from nvgemm_aot.providers.heuristics.corrections import DATA, Correction, FeatureRow, feature_rows
from nvgemm_runtime.gemm.problem import Problem

PATH = ROOT / "aot" / "nvgemm_aot" / "providers" / "heuristics" / DATA

UNCORRECTED = "cutlass_operators"
"""Provider whose estimates stay as the model gives them."""

HELD_BACK = 3
"""Interval between held-back pairs (n, k)."""
CHOSEN = 8
"""Kernels that a build chooses for a problem by default."""
OFFERED = 4
"""Chosen kernels that are judged besides the first."""

POWERS = (4.0, 8.0)
"""Exponents for a kernel's weight (fastest time / its time). At a higher one, kernels that take a
quarter longer would not count."""
STRENGTHS = (0.1, 0.3, 1.0, 3.0)
"""Ridge strengths, relative to the kernel weights' sum."""
FOLDS = 3
"""Folds for choosing power and strength, each predicted by the others."""

TARGETS = (1.05, 1.015)
"""Goals for the first choice, and for the best `OFFERED`."""

_DIGITS = 4
_CONSTANT = "constant, "
_DYNAMIC = "dynamic, "
"""Pattern of dynamic kernels, which are not fitted: they rank behind their static twins, and none
was measured at a large m."""

Sizes = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Example:
    """Measured problem.

    Attributes:
        problem: The problem.
        times: Each candidate's nanoseconds.
        rows: Each candidate's features, in the same order.
    """

    problem: Problem
    times: Mapping[Candidate, float]
    rows: Sequence[FeatureRow]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Mean time over the bundle's best kernel: first choice, and best of four."""

    first: float
    best_of: float

    @property
    def score(self) -> float:
        """Quantity that the chosen power and strength minimise."""
        return self.first + 2 * self.best_of


def fit_and_judge(measured: Measurements, cases: list[Case], *, write: bool) -> None:
    """Fits on two thirds of the sizes, prints the gain on the rest, and writes the fit if asked."""
    providers = {one.provider for row in measured.rows.values() for one, _ in row}
    model = load_provider(min(providers)).runtime_model(measured.target)
    examples = _examples(measured, model)
    fitted, held = _split(examples, HELD_BACK)
    if not fitted or not held:
        raise click.ClickException("too few sizes were measured: must be 3 pairs (n, k) or more")
    blank = Correction(
        arch=measured.target.target.arch,
        model=model.name,
        providers=tuple(sorted(providers - {UNCORRECTED})),
        source=f"{measured.source}; {len(examples)} problems",
        weights={},
    )
    settings = _choose_settings(fitted)
    correction = replace(blank, weights=_weights(fitted, *settings))
    click.echo(f"{blank.source}; fitted on {len(fitted)}, held back {len(held)}")
    click.echo(f"power {settings[0]:g}, strength {settings[1]:g}")
    click.echo(f"{'time over the best, in the mean':<48}{'problems':>9}{'first':>9}{'of four':>9}")
    for label, group in _groups(held, measured.files):
        for name, one in (("model", None), ("corrected", correction)):
            loss = _loss(group, one, measured, model)
            for title, figure in (("first", loss.first), ("best of four", loss.best_of)):
                case = f"{label}/{name}/{title}"
                cases.append(Case(name=case, figure=figure, unit="times the best"))
            click.echo(
                f"{label + ', ' + name:<48}{len(group):>9}{loss.first:>9.3f}{loss.best_of:>9.3f}"
            )
    before = _loss(held, None, measured, model)
    after = _loss(held, correction, measured, model)
    met = after.first <= TARGETS[0] and after.best_of <= TARGETS[1]
    click.echo(f"aims ({TARGETS[0]} and {TARGETS[1]}): {'met' if met else 'missed'}")
    if not write:
        return
    if not (after.first < before.first and after.best_of <= before.best_of):
        raise click.ClickException("no better than the model on sizes held back; nothing written")
    whole = replace(blank, weights=_weights(examples, *settings))
    keep(whole, PATH, _judged(before, after, len(fitted), len(held)))
    click.echo(f"{PATH.name}: written, fitted on all {len(examples)} problems")


def keep(correction: Correction, path: Path, judged: Mapping[str, Any]) -> None:
    """Replaces the correction for the same architecture and model."""
    document = json.loads(path.read_text(encoding="utf-8"))
    kept = [
        one
        for one in document["corrections"]
        if (one["arch"], one["model"]) != (correction.arch, correction.model)
    ]
    document["corrections"] = sorted(
        [*kept, {**asdict(correction), "judged": dict(judged)}],
        key=lambda one: (one["arch"], one["model"]),
    )
    write_file(path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def _judged(before: Loss, after: Loss, fitted: int, held: int) -> dict[str, Any]:
    return {
        "fitted_on": fitted,
        "held_back": held,
        "first": [round(before.first, 3), round(after.first, 3)],
        "best_of_four": [round(before.best_of, 3), round(after.best_of, 3)],
    }


def _examples(measured: Measurements, model: RuntimeModel) -> list[Example]:
    examples = []
    for problem, row in sorted(measured.rows.items()):
        # The candidates' order must not depend on the file's.
        times = dict(sorted(row, key=lambda one: (one[0].operator, one[0].provider)))
        estimates = [model.estimate_ns(problem, one.block_shape) for one in times]
        sm_count = measured.target.device.sm_count.value
        rows = feature_rows(problem, list(times), estimates, sm_count)
        if rows is not None and len(times) > 1:
            examples.append(Example(problem=problem, times=times, rows=rows))
    return examples


def _split(examples: Sequence[Example], parts: int) -> tuple[list[Example], list[Example]]:
    """Returns examples of most pairs (n, k), and of every ``parts``-th, in the order of n x k."""
    held = set(_sizes(examples)[parts // 2 :: parts])
    fitted = [one for one in examples if (one.problem.n, one.problem.k) not in held]
    return fitted, [one for one in examples if (one.problem.n, one.problem.k) in held]


def _sizes(examples: Sequence[Example]) -> list[Sizes]:
    return sorted(
        {(one.problem.n, one.problem.k) for one in examples}, key=lambda nk: (nk[0] * nk[1], nk)
    )


def _groups(
    examples: Sequence[Example], files: Mapping[Problem, str]
) -> Iterator[tuple[str, Sequence[Example]]]:
    for low, high in itertools.pairwise((1, 64 + 1, 512 + 1, 1 << 31)):
        group = [one for one in examples if low <= one.problem.m < high]
        if group:
            yield f"m {low} to {max(one.problem.m for one in group)}", group
    names = sorted({files[one.problem] for one in examples})
    if len(names) > 1:
        for name in names:
            yield name, [one for one in examples if files[one.problem] == name]
    yield "all", examples


def _choose_settings(examples: Sequence[Example]) -> tuple[float, float]:
    """Returns the power and strength that predict parts of the sizes best from the others."""
    sizes = _sizes(examples)
    parts = [set(sizes[first::FOLDS]) for first in range(FOLDS)]

    def score(settings: tuple[float, float]) -> float:
        losses = []
        for part in filter(None, parts):
            inside = [one for one in examples if (one.problem.n, one.problem.k) in part]
            outside = [one for one in examples if (one.problem.n, one.problem.k) not in part]
            if outside:
                losses.append(_ordered_loss(inside, _weights(outside, *settings)).score)
        return statistics.fmean(losses) if losses else 0.0

    return min(itertools.product(POWERS, STRENGTHS), key=score)


def _ordered_loss(examples: Sequence[Example], weights: Mapping[str, float]) -> Loss:
    """Returns `_loss` over all kernels instead of a build's, which is quicker."""
    first, best_of = [], []
    for one in examples:
        corrected = [
            row.log_estimate + sum(weights.get(name, 0.0) * value for name, value in row.features)
            for row in one.rows
        ]
        choices = [
            Choice(candidate=candidate, time_ns=round(math.exp(time)))
            for time, candidate in zip(corrected, one.times)
        ]
        ranked = rank_splits_behind(
            sorted(choices, key=lambda choice: choice.time_ns or 0), SPLIT_GAIN
        )
        times = [one.times[choice.candidate] for choice in ranked]
        least = min(times)
        first.append(times[0] / least)
        best_of.append(min(times[:OFFERED]) / least)
    return Loss(first=statistics.fmean(first), best_of=statistics.fmean(best_of))


def _weights(examples: Sequence[Example], power: float, strength: float) -> dict[str, float]:
    """Fits weights by ridge regression, with a constant per problem."""
    import torch

    names = sorted(
        {
            name
            for one in examples
            for row in one.rows
            for name, _ in row.features
            if not name.startswith((_CONSTANT, _DYNAMIC))
        }
    )
    place = {name: number for number, name in enumerate(names)}
    gram = torch.zeros(len(names), len(names), dtype=torch.float64)
    moment = torch.zeros(len(names), dtype=torch.float64)
    total = 0.0
    tables = []
    for one in examples:
        table = torch.zeros(len(one.rows), len(names), dtype=torch.float64)
        for number, row in enumerate(one.rows):
            for name, value in row.features:
                if name in place:
                    table[number, place[name]] = value
        times = torch.tensor(list(one.times.values()), dtype=torch.float64)
        wanted = times.log() - torch.tensor([row.log_estimate for row in one.rows]).double()
        counts = (times.min() / times) ** power
        counts = counts / counts.sum()  # every problem weighs the same
        centred = table - counts @ table
        gram += centred.T @ (counts[:, None] * centred)
        moment += centred.T @ (counts * (wanted - counts @ wanted))
        total += 1.0
        tables.append((table, wanted, counts))
    penalty = strength * 1e-3 * total
    solved = torch.linalg.solve(gram + penalty * torch.eye(len(names)).double(), moment)
    weights = {name: round(float(solved[place[name]]), _DIGITS) for name in names}
    constants = _constants(examples, [float(c @ (w - t @ solved)) for t, w, c in tables])
    return {name: weight for name, weight in {**weights, **constants}.items() if weight}


def _constants(examples: Sequence[Example], left: Sequence[float]) -> dict[str, float]:
    """Returns corrections of mean times at each knot, which leave the order alone."""
    import torch

    shares = [
        {name: value for name, value in one.rows[0].features if _constant(name)} for one in examples
    ]
    names = sorted({name for one in shares for name in one})
    table = torch.tensor([[one.get(name, 0.0) for name in names] for one in shares]).double()
    gram = table.T @ table + 1e-6 * torch.eye(len(names)).double()
    solved = torch.linalg.solve(gram, table.T @ torch.tensor(left).double())
    return {name: round(float(one), _DIGITS) for name, one in zip(names, solved)}


def _constant(name: str) -> bool:
    return name.startswith(_CONSTANT)


def _loss(
    examples: Sequence[Example],
    correction: Correction | None,
    measured: Measurements,
    model: RuntimeModel,
) -> Loss:
    """Returns a build's loss at these problems, with the measured kernels as candidates."""
    first, best_of = [], []
    sm_count = measured.target.device.sm_count.value
    for one in examples:
        selection = select(
            one.problem,
            tuple(one.times),
            model.estimate_ns,
            CHOSEN,
            None if correction is None else _correcting(correction, sm_count),
        )
        least = min(one.times.values())
        chosen = [one.times[choice.candidate] / least for choice in selection.choices]
        first.append(chosen[0])
        best_of.append(min(chosen[:OFFERED]))
    return Loss(first=statistics.fmean(first), best_of=statistics.fmean(best_of))


def _correcting(correction: Correction, sm_count: int) -> Any:
    def correct(
        problem: Problem, candidates: Sequence[Candidate], times: Sequence[int | None]
    ) -> list[int | None]:
        return correction.corrected(problem, candidates, times, sm_count)

    return correct
