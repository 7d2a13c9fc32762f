"""The hook that checks commit subjects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from documents import read
from repository import ROOT

HOOK = ROOT / ".githooks/commit-msg"


def run_hook(path: Path, message: str) -> subprocess.CompletedProcess[str]:
    """Runs the hook on a commit message."""
    path.write_text(message, encoding="utf-8")
    command = [sys.executable, str(HOOK), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "message",
    [
        "Add autocast dtype to expert cache keys",
        "Pass the stream to each launch\n\nBody: of several sentences; as long as it needs.",
        "# a comment\n\nFix m",
        f"Fix {'m' * 68}",
        "Embed the device code",
        f"Merge branch {'m' * 80}",
        'Revert "Experts: one thing; another"',
        "fixup! Adds a thing.",
    ],
)
def test_accepts_an_imperative_subject(tmp_path: Path, message: str) -> None:
    checked = run_hook(tmp_path / "message", message)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (f"Fix {'m' * 69}", "it has 73 characters, at most 72 are allowed"),
        ("Fix m; add n", "it has a semicolon"),
        ("Fix m.", "it ends with a period"),
        ("Experts: fix m", "it begins with 'Experts:', not with a capitalized verb"),
        ("fix m", "it begins with 'fix', not with a capitalized verb"),
        ("Added m", "it begins with 'Added': use the imperative"),
        ("Adding m", "it begins with 'Adding': use the imperative"),
        ("Adds m", "it begins with 'Adds': use the imperative"),
    ],
)
def test_refuses_another_subject(tmp_path: Path, message: str, reason: str) -> None:
    checked = run_hook(tmp_path / "message", message)
    assert checked.returncode == 1
    assert reason in checked.stderr


def test_names_every_broken_rule(tmp_path: Path) -> None:
    checked = run_hook(tmp_path / "message", "Adds m; fixes n.")
    assert len(checked.stderr.splitlines()) == 3


def test_contributing_says_how_to_install_it() -> None:
    assert os.access(HOOK, os.X_OK)
    assert "git config core.hooksPath .githooks" in read("CONTRIBUTING.md")
