"""Where the command begins: as a module, and what Ctrl-C does before anything is at work."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from interrupted_imports import INTERRUPT_AT
from nvgemm_runtime import __version__

INTERRUPTED_AT = (
    INTERRUPT_AT
    + """
sys.argv[0] = "nvgemm-aot"
from nvgemm_aot.__main__ import main
main()
"""
)


def run(
    *arguments: str, interrupt: signal.Handlers = signal.SIG_DFL
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        # A run in the background may have been told to ignore it.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, interrupt),
    )


def test_the_module_is_the_command() -> None:
    done = run("-m", "nvgemm_aot", "--version")
    assert (done.returncode, done.stdout) == (0, f"nvgemm-aot, version {__version__}\n")
    wrong = run("-m", "nvgemm_aot", "no-such-command")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: nvgemm-aot ")
    assert "No such command 'no-such-command'" in wrong.stderr
    [script] = [p for p in entry_points(group="console_scripts") if p.name == "nvgemm-aot"]
    assert script.value == "nvgemm_aot.__main__:main"


@pytest.mark.parametrize(
    "module", ["nvgemm_aot.cli.main", "click", "nvgemm_runtime", "nvgemm_aot.cli.rankings.tune"]
)
def test_an_interrupt_during_imports_ends_the_command_quietly(module: str) -> None:
    done = run("-c", INTERRUPTED_AT.format(module=module), "list")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "nvgemm-aot: interrupted\n"


def test_an_interrupt_during_a_command_is_handled_by_it() -> None:
    done = run("-c", INTERRUPTED_AT.format(module="pydantic"), "schema")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "nvgemm-aot: interrupted; compiled kernels are in the cache\n"


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    code = INTERRUPTED_AT.format(module="nvgemm_aot.cli.main")
    done = run("-c", code, "--version", interrupt=signal.SIG_IGN)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); "
        "import nvgemm_aot, nvgemm_aot.cli.terminal.interrupts; "
        "print([name for name in set(sys.modules) - before if name.startswith('nvgemm_runtime')], "
        "nvgemm_aot.__version__)"
    )
    assert run("-c", code).stdout == f"[] {__version__}\n"
