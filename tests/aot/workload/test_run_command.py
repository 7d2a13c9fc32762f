"""Signals that reach the process which runs a user's command."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nvgemm_aot.workload import run_command
from nvgemm_aot.workload.run_command import run_to_end

_SLEEPS = """
import signal, sys, time
def leave(*_):
    print("asked to leave", flush=True)
    raise SystemExit(9)
if len(sys.argv) > 1:
    signal.signal(int(sys.argv[1]), leave)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Interrupts as in a program at a terminal; a job in the background has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGQUIT)


@pytest.mark.parametrize(
    ("command", "number", "is_handled"),
    [
        *itertools.product(["explain"], SIGNALS, [False, True]),
        ("record", signal.SIGTERM, False),
        ("record", signal.SIGINT, True),
    ],
)
def test_a_signal_ends_the_command_whose_status_is_returned(
    tmp_path: Any, command: str, number: signal.Signals, is_handled: bool
) -> None:
    handled = [str(int(number))] * is_handled
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"if {int(number)} != signal.SIGINT: signal.signal({int(number)}, signal.SIG_DFL)\n"
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from nvgemm_aot.cli.main import main; main()"
    )
    arguments = [command, "--", sys.executable, "-c", _SLEEPS, *handled]
    with subprocess.Popen(
        [sys.executable, "-c", start, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        output, said = running.communicate(timeout=600)
    status = 9 if is_handled else 128 + number
    assert running.returncode == status
    assert ("asked to leave" in output) == is_handled
    assert f"the command exited with status {status} before compiling a GEMM" in output + said


class _Interrupted(subprocess.Popen):  # type: ignore[type-arg]
    """Gets signals wherever the program that starts it is at that moment."""

    begun: list[int]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        self.begun.append(self.pid)

    def __enter__(self) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return super().__enter__()


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("is_typed", [True, False])
def test_an_interrupt_while_a_command_is_being_started_is_the_commands_alone(
    monkeypatch: pytest.MonkeyPatch, is_typed: bool
) -> None:
    """One that was typed reaches the command anyway; any other is sent to it."""
    monkeypatch.setattr(_Interrupted, "begun", [], raising=False)
    monkeypatch.setattr(subprocess, "Popen", _Interrupted)
    monkeypatch.setattr(run_command, "_is_in_foreground", lambda: is_typed)
    code = (
        "import signal, time\n"
        "is_left_to_it = signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        f"time.sleep({0 if is_typed else 3600})\n"
        "raise SystemExit(7 if is_left_to_it else 8)"
    )
    status = run_to_end([sys.executable, "-c", code], os.environ)
    assert status == (7 if is_typed else 128 + signal.SIGINT)
    assert len(_Interrupted.begun) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_are_ignored_stay_ignored_in_the_command() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import signal; raise SystemExit(signal.getsignal(1) is signal.SIG_IGN)"
        assert run_to_end([sys.executable, "-c", code], os.environ) == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
