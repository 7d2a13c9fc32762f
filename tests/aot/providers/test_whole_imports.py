"""Ctrl-C while a compiler is imported: it waits until the import is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from interrupted_imports import INTERRUPT_AT
from nvgemm_aot.providers.cute_dsl.whole_imports import deferred_interrupts

INTERRUPTED_AT = (
    INTERRUPT_AT
    + """
signal.signal(signal.SIGINT, signal.default_int_handler)
{first}
try:
    {call}
except KeyboardInterrupt:
    print({last!r} in sys.modules)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "call", "last"),
    [
        (
            "from nvgemm_aot.providers.cutlass_operators import toolchain",
            "toolchain.import_operators()",
            "torch._subclasses.fake_tensor",
        ),
        (
            "from nvgemm_aot.providers.quack import entry",
            "entry.import_library()",
            "quack.gemm_default_epi",
        ),
    ],
)
def test_an_interrupt_waits_until_a_compiler_is_imported(first: str, call: str, last: str) -> None:
    """An exception inside its compiled modules would end the process by a segmentation fault."""
    module = "cutlass._mlir._mlir_libs"
    code = INTERRUPTED_AT.format(module=module, first=first, call=call, last=last)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_what_was_interrupted_goes_on_to_the_end_of_the_block() -> None:
    handler, reached = signal.default_int_handler, []
    before = signal.signal(signal.SIGINT, handler)  # a shell's background jobs ignore the signal

    def interrupted() -> None:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("end")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert reached == ["end"]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupts_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_import_as_they_are() -> None:
    found = []

    def look() -> None:
        with deferred_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
