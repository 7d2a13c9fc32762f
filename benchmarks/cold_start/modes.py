"""`cold_start`'s modes: process settings, and their order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.cold_start.table import (
    BUNDLE_MODE,
    DEFAULT_MODE,
    JIT_MODE,
    KEPT_MODE,
    MEASURED_MODE,
    STOCK_MODE,
    TRITON_MODE,
)
from nvgemm_runtime.jit.client import missing_module
from nvgemm_runtime.settings import BUNDLES_VARIABLE

BACKENDS = {
    STOCK_MODE: None,
    DEFAULT_MODE: None,
    "aten": "ATEN",
    TRITON_MODE: "ATEN,TRITON",
    BUNDLE_MODE: "ATEN",
    MEASURED_MODE: "ATEN",
    JIT_MODE: "ATEN",
    KEPT_MODE: "ATEN",
}
"""Backends that each mode autotunes over."""

PLUG_IN_MODES = (BUNDLE_MODE, MEASURED_MODE, DEFAULT_MODE, JIT_MODE, KEPT_MODE)
"""Modes with the plug-in on."""

JIT_CANDIDATES = 4
"""Kernels to compile for a GEMM, as many as join the choices."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Mode with its settings.

    Attributes:
        mode: One of `BACKENDS`.
        choices: Most kernels that join for a GEMM; None for the default.
        bundles: NVGEMM_AOT_BUNDLES' value; None leaves it as it is.
    """

    mode: str
    choices: int | None = None
    bundles: str | None = None

    @property
    def label(self) -> str:
        """Name in the tables."""
        return self.mode if self.choices is None else f"{self.mode}, at most {self.choices}"

    def variables(self, kept: Path) -> dict[str, str | None]:
        """Returns environment variables for the process; None unsets one.

        Args:
            kept: Directory with kernels that the last process compiled.
        """
        is_jit = self.mode in (JIT_MODE, KEPT_MODE)
        variables = {
            "NVGEMM_AOT": None if self.mode in PLUG_IN_MODES else "off",
            "NVGEMM_AOT_MAX_CHOICES": None if self.choices is None else str(self.choices),
            "NVGEMM_AOT_JIT_CANDIDATES": str(JIT_CANDIDATES if is_jit else 0),
            "NVGEMM_AOT_TRUST_RANKING": "1" if self.mode == MEASURED_MODE else None,
        }
        if is_jit:
            variables["NVGEMM_AOT_CACHE"] = str(kept)
        if is_jit or self.bundles is not None:
            variables[BUNDLES_VARIABLE] = None if is_jit else self.bundles
        return variables


def refuse_other_kernels(variant: Variant, run: dict[str, Any]) -> None:
    """Raises if a process has other kernels than its mode."""
    found, stats = run["versions"]["bundles"], run["stats"]
    if variant.mode in (BUNDLE_MODE, MEASURED_MODE, DEFAULT_MODE) and not found:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles by --estimated "
            "and --measured"
        )
    others = [bundle for bundle in found if not bundle.startswith(BUNDLES_VARIABLE)]
    if variant.bundles is not None and others:
        raise click.ClickException(
            f"{variant.mode} had other bundles beside {variant.bundles}: {', '.join(others)}; "
            "uninstall the kernel wheels, and name their bundles by --estimated"
        )
    if variant.mode == KEPT_MODE and (stats["jit_kernels"] or not stats["declared"]):
        raise click.ClickException(
            f"{KEPT_MODE} compiled {stats['jit_kernels']} kernels and found some for "
            f"{stats['declared']} GEMMs: what {JIT_MODE} compiled was not kept"
        )
    if variant.mode == JIT_MODE and (stats["declared"] or stats["signature"] or not stats["jit"]):
        raise click.ClickException(
            f"{JIT_MODE} compiled kernels for {stats['jit']} GEMMs, found some for "
            f"{stats['declared'] + stats['signature']} and missed {stats['missed']}; uninstall the "
            "kernel wheels, and name their bundles by --estimated"
        )


def refuse_other_machine(earlier: dict[str, Any], run: dict[str, Any]) -> None:
    """Raises if a run's GPU or versions differ from an earlier run's."""
    for name in ("device", "driver", "torch", "nvgemm-aot"):
        refuse_other(name, earlier["versions"].get(name), run["versions"][name])


def refuse_other_work(runs: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Raises if a run compiled other GEMMs than the others, or its mode's bundles changed."""
    for earlier in runs:
        refuse_other("GEMMs", sum(earlier["count"].values()), sum(run["count"].values()))
        if earlier["mode"] == run["mode"] in (BUNDLE_MODE, MEASURED_MODE, DEFAULT_MODE):
            refuse_other("bundles", earlier["versions"]["bundles"], run["versions"]["bundles"])


def refuse_other(name: str, before: object, now: object) -> None:
    """Raises if two values differ; see `refuse_other_work`."""
    if before != now:
        raise click.ClickException(
            f"other runs have {name} {before}, and this one {now}; measure into another file"
        )


def check_named(bundles: str | None, option: str) -> None:
    """Checks that an option's bundles are files, or directories with bundles."""
    for name in (bundles or "").split(os.pathsep):
        if name and not Path(name).exists():
            raise click.UsageError(f"{option}: {name} is not there")


def why_no_jit() -> str | None:
    """Returns the reason why nothing can be compiled at run time, or None."""
    module = missing_module()
    return None if module is None else f"the builder is not installed: no {module}"


def variants(
    modes: tuple[str, ...],
    choices: tuple[int, ...],
    estimated: str | None,
    measured: str | None,
    jit: bool,
) -> list[Variant]:
    """Returns variants to measure; prints the ones left out, with the reason."""
    found = []
    for mode in modes:
        if mode in (MEASURED_MODE, DEFAULT_MODE) and measured is None:
            click.echo(f"{mode} is left out: no --measured", err=True)
        elif mode in (JIT_MODE, KEPT_MODE) and not jit:
            click.echo(f"{mode} is left out: no --jit", err=True)
        elif mode in (JIT_MODE, KEPT_MODE) and (why := why_no_jit()) is not None:
            click.echo(f"{mode} is left out: {why}", err=True)
        else:
            numbers = choices if mode == BUNDLE_MODE and choices else (None,)
            named = {BUNDLE_MODE: estimated, MEASURED_MODE: measured, DEFAULT_MODE: measured}
            bundles = named.get(mode)
            found += [Variant(mode=mode, choices=one, bundles=bundles) for one in numbers]
    return found


def turns(found: list[Variant], repeat: int, once: tuple[str, ...]) -> list[Variant]:
    """Returns the measuring order; each turn begins with another variant.

    What keeps kernels comes before what finds them: in the first turn, all are in the order given.
    """
    order = []
    for turn in range(repeat):
        first = turn % len(found)
        order += [
            variant
            for variant in found[first:] + found[:first]
            if turn == 0 or variant.mode not in once
        ]
    return order


def left_of(order: list[Variant], labels: Iterable[str]) -> list[Variant]:
    """Returns an order's rest after measurements with these labels."""
    done = Counter(labels)
    left = []
    for variant in order:
        if done[variant.label]:
            done[variant.label] -= 1
        else:
            left.append(variant)
    modes = [one.mode for one in left]
    if KEPT_MODE in modes and JIT_MODE not in modes[: modes.index(KEPT_MODE)]:
        left.insert(modes.index(KEPT_MODE), Variant(mode=JIT_MODE))  # for its kernels
    return left
