"""Links a compiled object into a shared object that the runtime can load from memory."""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nvgemm_runtime.bundle.calling_convention import KNOWN_FORM, parse_calling_convention
from nvgemm_runtime.errors import LinkError, ToolchainError
from nvgemm_runtime.matching.device import FFI_LIBRARY, RUNTIME_LIBRARY

from ..verify.host_object import require_host_object

FLAGS = (
    "-shared",
    "-Wl,--no-as-needed",  # every payload names both libraries; some distributions' cc drops them
    "-nostdlib",  # the object needs no C start-up code: output depends on the linker alone
    "-Wl,-Bsymbolic",
    "-Wl,--build-id=none",
    "-Wl,--strip-all",
    "-Wl,--hash-style=gnu",
    "-Wl,-z,defs",
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noseparate-code",  # 6 % less to hash and to map
    "-Wl,-z,max-page-size=4096",
)
"""Flags of every link. All kernels define the same internal names, so nothing but the entry point
may be visible, and nothing in the output may depend on when or where it was made. Page size and
hash style are defaults that distributions change."""

_KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
"""The only environment variables that a compiler driver gets. Others, such as LD_RUN_PATH, change
its output, and cache keys do not cover them."""

_VERSION = re.compile(r"\d+(?:\.\d+)+")

_COMPILERS = ("cc", "gcc", "clang")


@functools.cache
def compiler() -> tuple[str, ...]:
    """The system's C compiler driver with its arguments: ``$CC``, else the first of cc, gcc, clang.

    Raises:
        ToolchainError: If there is none.
    """
    if named := os.environ.get("CC"):
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise ToolchainError(f"CC={named}: {error}; unset CC or name a C compiler") from None
        program = shutil.which(words[0]) if words else None
        if program is None:
            raise ToolchainError(f"CC={named}: no such program; unset CC or name a C compiler")
        return (os.path.abspath(program), *words[1:])  # noqa: PTH100
    for name in _COMPILERS:
        program = shutil.which(name)
        if program is not None:
            return (os.path.abspath(program),)  # noqa: PTH100
    raise ToolchainError(
        f"no C compiler: none of {', '.join(_COMPILERS)} is on PATH and CC is not set; "
        "install one (Debian: apt-get install gcc) or set CC"
    )


@functools.cache
def linker_version() -> str:
    """First line of what the linker prints as its version; part of every cache key.

    Raises:
        ToolchainError: If there is no working linker.
    """
    command = [*compiler(), "-Wl,--version"]
    result = _run(command)
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        raise ToolchainError(
            f"{shlex.join(command)} fails: {result.stderr.strip()[:200] or 'no output'}; "
            "install the linker (Debian: apt-get install binutils) or set CC"
        )
    return lines[0]


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with the environment variables of `_KEPT_VARIABLES` alone."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return subprocess.run(
        command,
        cwd=folder,
        env={**kept, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )


def linker_identity() -> tuple[str, str]:
    """Name and version of the linker, e.g. ``("GNU ld", "2.40")``.

    Raises:
        ToolchainError: If there is no working linker.
    """
    line = linker_version()
    number = _VERSION.search(line)
    if number is None:
        return line, "unknown"
    return re.split(r"\(|\d", line, maxsplit=1)[0].strip() or "linker", number[0]


@functools.cache
def library_directories() -> tuple[Path, Path]:
    """Where libcute_dsl_runtime.so and libtvm_ffi.so lie in their installed packages.

    Raises:
        ToolchainError: If one is missing, with the command that installs it.
    """
    wanted = (
        ("nvidia_cutlass_dsl", "cu13/lib", "libcute_dsl_runtime.so", "nvidia-cutlass-dsl[cu13]"),
        ("tvm_ffi", "lib", "libtvm_ffi.so", "apache-tvm-ffi"),
    )
    found = []
    for package, subdirectory, library, distribution in wanted:
        spec = importlib.util.find_spec(package)
        roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
        places = [root / subdirectory for root in roots if (root / subdirectory / library).exists()]
        if not places:
            searched = ", ".join(str(root / subdirectory) for root in roots) or "no such package"
            raise ToolchainError(
                f"{library} not found (searched: {searched}); run: pip install '{distribution}'"
            )
        found.append(places[0])
    return found[0], found[1]


def link(relocatable: bytes, calling_convention: str, *, on_cpu: bool = False) -> bytes:
    """Link one object, and check that the result is what the toolchain is known to make.

    The function that the calling convention names alone stays visible. A kernel that runs
    ``on_cpu`` needs no library for device code. Equal inputs give equal bytes.

    Raises:
        LinkError: If the calling convention is unknown, the linker fails, or its output needs what
            the runtime does not have.
        ToolchainError: If there is no C compiler or a library is missing.
        OSError: If there is no space for temporary files.
    """
    convention = parse_calling_convention(calling_convention)
    if convention is None:
        raise LinkError(f"calling convention {calling_convention!r} is not {KNOWN_FORM}")
    symbol = convention.symbol
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "kernel.o").write_bytes(relocatable)
        (folder / "exports").write_text(f"{{ global: {symbol}; local: *; }};\n")
        command = [
            *compiler(),
            *FLAGS,
            "-Wl,--version-script=exports",
            "-o",
            "kernel.so",
            "kernel.o",
        ]
        for place, library in zip(library_directories(), (RUNTIME_LIBRARY, FFI_LIBRARY)):
            if not (on_cpu and library == RUNTIME_LIBRARY):
                command += [f"-L{place}", f"-l{library[3:-3]}"]
        result = _run(command, folder)
        if os.strerror(errno.ENOSPC) in result.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if result.returncode:
            raise LinkError(f"{shlex.join(command)} fails: {result.stderr.strip()[:500]}")
        linked = (folder / "kernel.so").read_bytes()
    require_host_object(linked, symbol, on_cpu=on_cpu)
    return linked
