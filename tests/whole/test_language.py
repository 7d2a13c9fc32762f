"""The check of docstrings' and documents' language finds what it forbids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from repository import ROOT

CLEAN = '''"""Reads files."""

LIMIT = 3
"""Most files."""


def read() -> None:
    """Reads.

    Raises:
        OSError: If it fails.
    """
'''


def check(directory: Path, module: str, document: str) -> tuple[int, list[str]]:
    (directory / "aot").mkdir()
    (directory / "aot" / "module.py").write_text(module)
    (directory / "page.md").write_text(document)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(directory), *command], check=True)
    script = [sys.executable, str(ROOT / ".ci" / "language")]
    result = subprocess.run(script, cwd=directory, capture_output=True, text=True)
    return result.returncode, result.stdout.splitlines()[:-1]


def test_passes_plain_words(tmp_path: Path) -> None:
    code = "```sh\n" + "word " * 50 + "\n```\n"
    assert check(tmp_path, CLEAN, f"One. Two.\n\n- {'item ' * 40}\n- next\n\n{code}") == (0, [])


def test_finds_what_opens_with_a_question_word(tmp_path: Path) -> None:
    module = CLEAN.replace("Most files", "How many files").replace("OSError: If", "OSError: When")
    status, findings = check(tmp_path, module.replace("Reads files", "What reads"), "One.\n")
    assert status == 1
    assert [finding.split(": opens")[0] for finding in sorted(findings)] == [
        "aot/module.py:1",
        "aot/module.py:4",
        "aot/module.py:8",
    ]


def test_finds_long_sentences_and_chains_of_of(tmp_path: Path) -> None:
    module = CLEAN.replace("Reads files", "Bytes of the header of the kernel of a bundle of it")
    status, (words, sentence) = check(tmp_path, module, f"Short. {'word ' * 41}\n")
    assert status == 1
    assert words.startswith("docstrings: ")
    assert words.endswith('"of" in 1,000 words; allowed: 22')
    assert sentence.startswith("page.md: 41 words, allowed 40: word word")
