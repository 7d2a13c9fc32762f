"""Kernels for the CPU that leave a record of each launch, so that tests see what compiled code ran.

A kernel of a bundle may call nothing but TVM-FFI. So it asks the kernel of the operating system, by
number, to append a line to the file that is open as descriptor `DESCRIPTOR`: where none is, nothing
happens. That works in a fresh process as in this one, by whatever way the kernel is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import cpu_kernels
import cpu_provider
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.providers import Candidate
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.problem import Problem

DESCRIPTOR = 198

_SYSTEM_CALL = """{{
  long answer;
  __asm__ volatile("syscall" : "=a"(answer)
    : "a"({number}L), "D"({first}), "S"({second}), "d"({third}) : "rcx", "r11", "memory");
}}"""
"""Of Linux on x86-64, the only platform that kernels are built for."""

_WRITE, _NANOSLEEP = 1, 35


def _record(text: str) -> str:
    call = _SYSTEM_CALL.format(
        number=_WRITE, first=f"{DESCRIPTOR}L", second="line", third="(long)sizeof line - 1"
    )
    return f'{{ static const char line[] = "{text}\\n"; {call} }}'


def _sleep(milliseconds: int) -> str:
    call = _SYSTEM_CALL.format(number=_NANOSLEEP, first="pause", second="0L", third="0L")
    return f"{{ static const long pause[] = {{0, {milliseconds * 1_000_000}L}}; {call} }}"


class Recording(cpu_provider.CpuProvider):
    """`CpuProvider`, whose kernels write the name of their operator at each launch."""

    name = "recording_kernels:Recording"
    behaviour = ""

    def behaviour_of(self, candidate: Candidate) -> str:
        return _record(candidate.operator) + self.behaviour


class Sleeping(Recording):
    """Kernels that are slower than ATen, however busy this machine is."""

    name = "recording_kernels:Sleeping"
    behaviour = _sleep(milliseconds=100)


class TimingDependent(Recording):
    """Kernels that say that their results depend on timing."""

    name = "recording_kernels:TimingDependent"
    behaviour = "{ static volatile int arrivals; ++arrivals; }"
    is_deterministic = False


class WithCounters(Recording):
    """Kernels that refuse a workspace of another size, or counters that are not zero."""

    name = "recording_kernels:WithCounters"
    workspace = cpu_provider.WithCounters.workspace


class Raising(Recording):
    """Kernels that fail whenever they are launched."""

    name = "recording_kernels:Raising"
    behaviour = cpu_kernels.RAISES


def build_recording(
    problems: Iterable[Problem],
    directory: Path,
    cache: Cache,
    provider: Recording | None = None,
    *,
    name: str = "cpu",
    candidates: int = 1,
) -> BuiltBundle:
    """Build a bundle of such kernels by the product's own pipeline."""
    declared = cpu_provider.manifest(problems, name=name, candidates=candidates)
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return cpu_provider.build_here(declared, directory, cache, provider or Recording())


class Record:
    """The lines that kernels wrote, in whatever process has the file open as `DESCRIPTOR`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def open_here(self) -> None:
        """Have the kernels of this process write here."""
        with self.path.open("a") as file:
            os.dup2(file.fileno(), DESCRIPTOR)

    def close_here(self) -> None:
        """Have the kernels of this process write nowhere."""
        os.close(DESCRIPTOR)

    def forget(self) -> None:
        """Drop what was written."""
        os.truncate(self.path, 0)

    def lines(self) -> list[str]:
        """The operators that were launched since then, in order."""
        return self.path.read_text().splitlines()
