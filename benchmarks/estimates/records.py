"""Measured times of a bundle's kernels, whichever program measured them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.estimates.measuring import WHAT
from benchmarks.shared.records import as_written, read_json
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem

Times = Mapping[str, float]
"""Nanoseconds by a kernel's id."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured of the kernels of one bundle.

    Attributes:
        target: What the bundle is for.
        rows: By problem, the candidates that were measured, each with its nanoseconds.
        source: Where the times come from, in words.
    """

    target: BuildTarget
    rows: Mapping[Problem, Sequence[tuple[Candidate, float]]]
    source: str


def read_times(bundle_path: Path, paths: Sequence[Path]) -> Measurements:
    """Read files of `benchmarks.estimates`, `.ranking`, `.kernels`, or of ``tune --json``.

    Of a problem that several files measured, the last one's times count.
    """
    with as_written(bundle_path):
        header = Bundle(bundle_path).header
    target = build_target(header.target.arch, header.device)
    candidates = _candidates(header, target)
    rows: dict[Problem, list[tuple[Candidate, float]]] = {}
    sources = []
    for path in paths:
        record = read_json(path)
        with as_written(path):
            for key, times in _problems(record):
                if strange := times.keys() - candidates.keys():
                    raise click.ClickException(
                        f"{path}: {key} has times of kernel {min(strange)[:12]}, which "
                        f"{bundle_path} does not hold or no provider lists any more"
                    )
                rows[Problem.parse(key)] = [(candidates[id_], ns) for id_, ns in times.items()]
            sources.append(_source(record))
    if not rows:
        raise click.ClickException(f"{', '.join(map(str, paths))}: no problem was measured")
    return Measurements(target=target, rows=rows, source="; ".join(dict.fromkeys(sources)))


def _candidates(header: Header, target: BuildTarget) -> dict[str, Candidate]:
    """By id, the candidates that a bundle's kernels were compiled from."""
    listed = {
        (one.provider, one.operator, one.signature): one
        for provider in sorted({kernel.provider for kernel in header.kernels})
        for signature in sorted({kernel.signature for kernel in header.kernels})
        for one in load_provider(provider).enumerate(signature, target).candidates
    }
    keys = {one.id: (one.provider, one.operator, one.signature) for one in header.kernels}
    return {id_: listed[key] for id_, key in keys.items() if key in listed}


def _problems(record: Mapping[str, Any]) -> Iterator[tuple[str, Times]]:
    """The problems of a file, and the times of each."""
    what = record.get("what")
    if what in (WHAT, "ranking"):
        ids = [one[0] if isinstance(one, list) else one for one in record["kernels"]]
        for key, row in record["times_ns"].items():
            yield key, {id_: ns for id_, ns in zip(ids, row) if ns is not None}
    elif what == "kernels":
        for key, entry in record["entries"].items():
            # Medians of the even rounds and of the odd ones.
            yield key, {id_: (one[0] + one[1]) / 2 for id_, one in entry["kernels"].items()}
    elif isinstance(record.get("problems"), dict):
        for key, outcome in record["problems"].items():
            yield key, {id_: float(ns) for id_, ns, _ in outcome["kernels"]}
    else:
        raise ValueError("holds no times of kernels")


def _source(record: Mapping[str, Any]) -> str:
    """Which GPU a file's times are from, when and how they were measured."""
    environment = record.get("environment", {})
    gpu = record.get("gpu") or environment.get("gpu") or "a GPU"
    runs = record.get("runs", [])
    outcomes = record.get("problems", {})
    dates = {record.get("date"), *(run["date"] for run in runs)}
    dates |= {one["date"] for one in outcomes.values()}
    timing = record.get("timing", "back to back")
    return f"{gpu}, {', '.join(sorted(filter(None, dates))) or 'undated'}, {timing}"
