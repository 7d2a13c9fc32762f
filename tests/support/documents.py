"""The documents, and what the site puts into them when it is built."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

MARKER = re.compile(r"^<!-- (generated|included): (\S+) -->$", re.MULTILINE)

sys.path.insert(0, str(ROOT / "docs"))
try:
    SECTIONS = importlib.import_module("pages_from_code").SECTIONS
    commands = importlib.import_module("pages_from_code.commands")
    exit_codes = importlib.import_module("pages_from_code.exit_codes")
    packages = importlib.import_module("pages_from_code.packages")
    torch_names = importlib.import_module("pages_from_code.torch_names")
finally:
    sys.path.remove(str(ROOT / "docs"))


def read(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def documents() -> Iterator[Path]:
    """All documents of the repository, pages of the site among them."""
    yield from ROOT.glob("*.md")
    yield from ROOT.glob("docs/**/*.md")
    yield from (ROOT / "manifests/README.md", ROOT / "wheels/README.md")


def as_built(page: Path) -> str:
    """A document with what its markers ask for."""

    def fill(found: re.Match[str]) -> str:
        kind, name = found.groups()
        return SECTIONS[name]() if kind == "generated" else read(name)

    return MARKER.sub(fill, page.read_text("utf-8"))


def code_blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
