"""Generated blocks within pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.tables import emulation, fleets, results, serving
from benchmarks.tables.goals import goals
from benchmarks.tables.selection import Selection

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/benchmarks/*.md")
"""Pages that may have blocks, as patterns below `ROOT`."""

BLOCKS: dict[str, Callable[[Selection], str]] = {
    "building": results.building,
    "clocks": results.clocks,
    "cold-start": results.cold_start,
    "compression": results.compression,
    "correctness": results.correctness,
    "coverage": results.coverage,
    "dispatch": results.dispatch,
    "emulation": emulation.blackwell,
    "emulation-hopper": emulation.hopper,
    "emulation-mutants": emulation.mutants,
    "experts": results.experts,
    "fleet-arithmetic": fleets.arithmetic,
    "fleet-parts": fleets.parts,
    "fused": results.fused,
    "gated": results.gated,
    "gather": results.gather,
    "goals": goals,
    "gpus": results.gpus,
    "hgemm": results.hgemm,
    "host": results.host,
    "kernels": results.kernels,
    "models": results.models,
    "ranking": results.ranking,
    "readme": results.readme,
    "rounding": results.rounding,
    "serving": serving.serving,
    "tests": results.tests,
    "timing": results.timing,
    "tokens": results.tokens,
    "training": results.training,
    "tuning": results.tuning,
}
"""Functions that generate each block."""

_BLOCK = re.compile(r"^<!-- begin (\S+) -->$.*?^<!-- end \1 -->$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Pages that may have blocks."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def block(name: str, records: Selection) -> str:
    """A block with its markers.

    Raises:
        KeyError: If no function generates it.
    """
    return f"<!-- begin {name} -->\n\n{BLOCKS[name](records)}\n\n<!-- end {name} -->"


def renewed(text: str, records: Selection) -> str:
    """A page's text with every block generated again."""
    return _BLOCK.sub(lambda match: block(match[1], records), text)


def names(text: str) -> list[str]:
    """Returns a page's block names."""
    return [match[1] for match in _BLOCK.finditer(text)]
