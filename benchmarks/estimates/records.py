"""Measured times of a bundle's kernels, from several programs' files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.estimates.measuring import WHAT
from benchmarks.shared.records import as_written, read_json
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem, Signature

Times = Mapping[str, float]
"""Nanoseconds by kernel id."""

Name = tuple[str, str, Signature]
"""A kernel's provider, operator and signature."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Times measured with one bundle's kernels.

    Attributes:
        target: Bundle target.
        rows: Measured candidates with their nanoseconds, by problem.
        files: File name with a problem's times, by problem.
        source: Source, in words.
    """

    target: BuildTarget
    rows: Mapping[Problem, Sequence[tuple[Candidate, float]]]
    files: Mapping[Problem, str]
    source: str


def read_times(bundle_path: Path, paths: Sequence[Path]) -> Measurements:
    """Reads files of `benchmarks.estimates`, `.ranking`, `.kernels`, or of ``tune --json``.

    A file of `benchmarks.estimates` names its kernels; the others name the bundle's. Times for
    kernels that no provider lists any more are left out. If several files measured a problem, the
    last file's times count.

    Raises:
        click.ClickException: If a file has times of a kernel that neither it nor the bundle names,
            or if no time is left.
    """
    with as_written(bundle_path):
        header = Bundle(bundle_path).header
    target = build_target(header.target.arch, header.device)
    of_bundle = {one.id: (one.provider, one.operator, one.signature) for one in header.kernels}
    rows: dict[Problem, list[tuple[Candidate, float]]] = {}
    files: dict[Problem, str] = {}
    sources = []
    for path in paths:
        record = read_json(path)
        with as_written(path):
            names = {**of_bundle, **_own_names(record)}
            listed = _listed(set(names.values()), target)
            for key, times in _problems(record):
                if strange := times.keys() - names.keys():
                    raise click.ClickException(
                        f"{path}: {key} has times of kernel {min(strange)[:12]}, which neither "
                        f"{bundle_path} nor the file names; give the bundle that was measured"
                    )
                row = [
                    (listed[names[id_]], ns) for id_, ns in times.items() if names[id_] in listed
                ]
                if row:
                    rows[Problem.parse(key)] = row
                    files[Problem.parse(key)] = path.stem
            sources.append(_source(record))
    if not rows:
        raise click.ClickException(
            f"{', '.join(map(str, paths))}: no problem was measured with a kernel that a provider "
            "lists"
        )
    return Measurements(
        target=target, rows=rows, files=files, source="; ".join(dict.fromkeys(sources))
    )


def _own_names(record: Mapping[str, Any]) -> dict[str, Name]:
    """Returns the kernels that a file names itself, by id."""
    if record.get("what") != WHAT:
        return {}
    return {
        id_: (provider, operator, Signature.parse(key))
        for id_, provider, operator, key in record["kernels"]
    }


def _listed(names: Collection[Name], target: BuildTarget) -> dict[Name, Candidate]:
    """Returns the named candidates that providers still list."""
    return {
        (one.provider, one.operator, one.signature): one
        for provider, signature in sorted({(provider, key) for provider, _, key in names})
        for one in load_provider(provider).enumerate(signature, target).candidates
        if (one.provider, one.operator, one.signature) in names
    }


def _problems(record: Mapping[str, Any]) -> Iterator[tuple[str, Times]]:
    """Yields a file's problems with their times."""
    what = record.get("what")
    if what in (WHAT, "ranking"):
        ids = [one[0] if isinstance(one, list) else one for one in record["kernels"]]
        for key, row in record["times_ns"].items():
            yield key, {id_: ns for id_, ns in zip(ids, row) if ns is not None}
    elif what == "kernels":
        for key, entry in record["entries"].items():
            # Medians over even rounds and over odd rounds.
            yield key, {id_: (one[0] + one[1]) / 2 for id_, one in entry["kernels"].items()}
    elif isinstance(record.get("problems"), dict):
        for key, outcome in record["problems"].items():
            yield key, {id_: float(ns) for id_, ns, _ in outcome["kernels"]}
    else:
        raise ValueError("holds no times of kernels")


def _source(record: Mapping[str, Any]) -> str:
    """Describes a file's GPU, date and timing."""
    environment = record.get("environment", {})
    gpu = record.get("gpu") or environment.get("gpu") or "a GPU"
    runs = record.get("runs", [])
    outcomes = record.get("problems", {})
    dates = {record.get("date"), *(run["date"] for run in runs)}
    dates |= {one["date"] for one in outcomes.values()}
    timing = record.get("timing", "back to back")
    return f"{gpu}, {', '.join(sorted(filter(None, dates))) or 'undated'}, {timing}"
