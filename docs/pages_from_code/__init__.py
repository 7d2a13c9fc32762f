"""The parts of the documentation that are made from the code.

Each module returns Markdown; `sections` names them. `docs/hook.py` puts them into the pages while
mkdocs builds the site. Nothing here imports mkdocs, so tests can look at the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import commands, environment, exit_codes, packages, schema, torch_names

ROOT = Path(__file__).resolve().parents[2]

SECTIONS: dict[str, Callable[[], str]] = {
    "commands": commands.section,
    "environment": environment.section,
    "exit-codes": exit_codes.section,
    "manifest-schema": schema.section,
    "builder-layers": lambda: packages.section(ROOT, "nvgemm_aot"),
    "runtime-layers": lambda: packages.section(ROOT, "nvgemm_runtime"),
    "torch-names": lambda: torch_names.section(ROOT),
}
"""By the name in a page's ``<!-- generated: NAME -->``: what makes the text."""
