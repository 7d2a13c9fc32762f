"""Options of `python -m benchmarks.emulation`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.emulation import __main__ as command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "quack", "--records", "x.jsonl"], "--records does not take"),
        (["--rows", "quack nm"], "no row's name has 'quack nm'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "row_kernels", lambda _: [])
    result = CliRunner().invoke(command.main, [*arguments, "--cache-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.output
