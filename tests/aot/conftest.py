"""What tests of the builder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cpu_provider


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names of the operators that workers of `fake_provider` really compiled, a line each."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("FAKE_LOG", str(path))
    return path


@pytest.fixture
def compiled_here() -> Iterator[None]:
    """Builds compile in this process: to start others takes longer than all of their work."""
    with cpu_provider.compiling_here():
        yield
