"""benchmarks/shared/turns: processes that measure on one GPU in turn."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shared import turns

ROOT = Path(__file__).resolve().parents[2]

LIMIT_S = 120
"""Seconds after which the other process counts as never getting its turn."""

OTHER = """
import pathlib, sys
from benchmarks.shared.turns import take_turns
print("waits", flush=True)
take_turns(pathlib.Path(sys.argv[1]))
pathlib.Path(sys.argv[2]).write_text("had its turn")
"""


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Holds the turn while another process waits; yields the file that it writes afterwards."""
    monkeypatch.setattr(turns, "_lock", None)
    turns.take_turns(tmp_path / "turns")
    log = tmp_path / "log"
    arguments = [sys.executable, "-c", OTHER, str(tmp_path / "turns"), str(log)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
        yield log
        other.kill()
    assert turns._lock is not None
    turns._lock.close()


def test_another_waits_for_its_turn(turn: Path) -> None:
    time.sleep(0.3)
    assert not turn.exists()
    with turns.others_turn():
        wait_for(turn)


def test_another_has_its_turn_while_torch_compiles(turn: Path) -> None:
    from torch._inductor.async_compile import AsyncCompile

    began = time.monotonic()
    while not turn.exists() and time.monotonic() - began < LIMIT_S:
        with turns.compiling():
            AsyncCompile().wait({})
    assert turn.exists()


def test_torch_is_left_as_it_was(turn: Path) -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    usual = AlgorithmSelectorCache.make_precompile_fn, AsyncCompile.wait
    with turns.compiling():
        assert AsyncCompile.wait is not usual[1]
    assert (AlgorithmSelectorCache.make_precompile_fn, AsyncCompile.wait) == usual


def test_a_gpu_of_its_own_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(turns, "_lock", None)
    usual = AsyncCompile.wait
    with turns.compiling(), turns.others_turn():
        assert AsyncCompile.wait is usual


def wait_for(path: Path) -> None:
    began = time.monotonic()
    while not path.exists():
        assert time.monotonic() - began < LIMIT_S, f"{path.name} was not written"
        time.sleep(0.01)
