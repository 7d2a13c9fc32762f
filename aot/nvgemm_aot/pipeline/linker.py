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
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.calling_convention import KNOWN_FORM, parse_calling_convention
from nvgemm_runtime.bundle.imported_symbols import FFI_SYMBOLS
from nvgemm_runtime.errors import LinkError, ToolchainError, install_command, one_line
from nvgemm_runtime.gemm.target import CPU, CUDA_VERSIONS, PLATFORMS, Target
from nvgemm_runtime.matching.device import FFI_LIBRARY, RUNTIME_LIBRARY

from ..providers.cute_dsl import cute_setup
from ..verify.host.elf import MalformedElfError
from ..verify.host.host_object import MACHINES, PAGE_BYTES, object_machine, require_host_object

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
)
"""Flags for every link, in compiler-driver form. All kernels define the same internal names, so
only the entry point may be visible. Output must not depend on when or where it was linked. Hash
style and page size are set because distributions change their defaults."""

_STUBS = {"linux_aarch64": "aarch64-unknown-linux-gnu"}
"""NVIDIA's folder of stub libraries to link against, by platform."""

_PASSED_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
"""The only environment variables that a compiler driver receives. Others, such as LD_RUN_PATH,
change its output, and cache keys do not cover them."""

_VERSION = re.compile(r"\d+(?:\.\d+)+")

_C_COMPILERS = ("cc", "gcc", "clang")


@functools.cache
def c_compiler() -> tuple[str, ...]:
    """Returns the C compiler driver with its arguments: ``$CC``, or the first of cc, gcc, clang.

    Raises:
        ToolchainError: If no C compiler is installed.
    """
    if setting := os.environ.get("CC"):
        try:
            words = shlex.split(setting)
        except ValueError as error:
            raise ToolchainError(f"CC={setting}: {error}; unset CC or name a C compiler") from None
        program = shutil.which(words[0]) if words else None
        if program is None:
            raise ToolchainError(f"CC={setting}: no such program; unset CC or name a C compiler")
        return (os.path.abspath(program), *words[1:])  # noqa: PTH100
    for name in _C_COMPILERS:
        program = shutil.which(name)
        if program is not None:
            return (os.path.abspath(program),)  # noqa: PTH100
    raise ToolchainError(
        f"no C compiler: none of {', '.join(_C_COMPILERS)} is on PATH and CC is not set; "
        "install one (Debian: apt-get install gcc) or set CC"
    )


@dataclass(frozen=True, kw_only=True)
class Linker:
    """Linker command for one platform.

    Attributes:
        command: The program, with the arguments that every call gets.
        base_words: Number of leading words in ``command`` that do not affect the output.
        is_driver: True for a compiler driver, which forwards arguments that begin with ``-Wl,``.
        remedy: Next step for the user if the linker does not work.
    """

    command: tuple[str, ...]
    base_words: int
    is_driver: bool
    remedy: str

    def arguments(self, *flags: str) -> list[str]:
        """Converts compiler-driver flags to this linker's form."""
        if self.is_driver:
            return [*flags]
        # The bare linker adds no start-up code.
        words = (flag.removeprefix("-Wl,") for flag in flags if flag != "-nostdlib")
        return [word for listed in words for word in listed.split(",")]


def linker_of(platform: str) -> Linker:
    """Returns a platform's linker: the system's for x86-64, LLVM's for any other platform.

    The output for a foreign platform therefore does not depend on the build machine.

    Raises:
        ToolchainError: If the linker is not installed.
    """
    if platform == PLATFORMS[0]:
        remedy = "install the linker (Debian: apt-get install binutils) or set CC"
        return Linker(command=c_compiler(), base_words=1, is_driver=True, remedy=remedy)
    if importlib.util.find_spec("ziglang") is None:
        raise ToolchainError(
            f"cannot link kernels for {platform}: LLVM's linker, which the package ziglang brings, "
            f"is not installed; run: {install_command('cross')}"
        )
    command = (sys.executable, "-m", "ziglang", "ld.lld")
    remedy = "run: pip install --force-reinstall --no-deps 'ziglang>=0.17,<0.18'"
    return Linker(command=command, base_words=len(command), is_driver=False, remedy=remedy)


def linker_flags(platform: str) -> list[str]:
    """Returns everything that shapes a platform's linker output, except file and library names."""
    linker = linker_of(platform)
    page = f"-Wl,-z,max-page-size={PAGE_BYTES[platform]}"
    return [*linker.command[linker.base_words :], *linker.arguments(*FLAGS, page)]


@functools.cache
def linker_version(platform: str) -> str:
    """Returns the first line of a linker's version output, which is part of every cache key.

    Raises:
        ToolchainError: If no linker works.
    """
    linker = linker_of(platform)
    command = [*linker.command, *linker.arguments("-Wl,--version")]
    result = _run(command)
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        raise ToolchainError(
            f"{shlex.join(command)} fails: {result.stderr.strip()[:200] or 'no output'}; "
            f"{linker.remedy}"
        )
    return lines[0]


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command with only the environment variables in `_PASSED_VARIABLES`."""
    environment = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )


def linker_identity(platform: str) -> tuple[str, str]:
    """Returns the name and version of a platform's linker, e.g. ``("GNU ld", "2.40")``.

    Raises:
        ToolchainError: If no linker works.
    """
    line = linker_version(platform)
    number = _VERSION.search(line)
    if number is None:
        return line, "unknown"
    return re.split(r"\(|\d", line, maxsplit=1)[0].strip() or "linker", number[0]


@functools.cache
def library_directories(target: Target) -> tuple[Path, ...]:
    """Returns the directories that hold the libraries a target's kernels link against.

    x86-64 uses the installed libcute_dsl_runtime.so and libtvm_ffi.so. Other platforms use NVIDIA's
    stub for the former; TVM-FFI has no stub (see `_ffi_stub`).

    Raises:
        ToolchainError: If a library is missing, with the command that installs it.
    """
    stubs = _STUBS.get(target.platform)
    folder = f"{target.cuda}/lib" + (f"/stubs/{stubs}" if stubs else "")
    libraries = [("nvidia_cutlass_dsl", folder, RUNTIME_LIBRARY)]
    if not stubs:
        libraries.append(("tvm_ffi", "lib", FFI_LIBRARY))
    directories = []
    for package, subdirectory, library in libraries:
        spec = importlib.util.find_spec(package)
        roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
        existing = [
            root / subdirectory for root in roots if (root / subdirectory / library).exists()
        ]
        if not existing:
            searched = ", ".join(str(root / subdirectory) for root in roots) or "no such package"
            raise ToolchainError(
                f"{library} for {target.key} not found (searched: {searched}); "
                f"run: {_install_command(library, target.cuda)}"
            )
        directories.append(existing[0])
    return tuple(directories)


def _install_command(library: str, cuda: str) -> str:
    if library == RUNTIME_LIBRARY and cuda != CUDA_VERSIONS[0]:
        return cute_setup.compiler_install_command(cuda)
    return install_command("build")


def link(relocatable: bytes, calling_convention: str, target: Target) -> bytes:
    """Links one object and checks that the result has the form this toolchain produces.

    Only the calling convention's entry point stays visible. A CPU kernel needs no library for
    device code. Equal inputs give equal bytes.

    Raises:
        LinkError: If the calling convention is unknown, the object is for another platform, the
            linker fails, or its output needs something that the runtime lacks.
        ToolchainError: If the linker or a library is missing.
        OSError: If no space is left for temporary files.
    """
    convention = parse_calling_convention(calling_convention)
    if convention is None:
        raise LinkError(f"calling convention {calling_convention!r} is not {KNOWN_FORM}")
    _require_object_for(target.platform, relocatable)
    symbol = convention.symbol
    on_cpu = target.arch == CPU
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "kernel.o").write_bytes(relocatable)
        (folder / "exports").write_text(f"{{ global: {symbol}; local: *; }};\n")
        linker = linker_of(target.platform)
        command = [
            *linker.command[: linker.base_words],
            *linker_flags(target.platform),
            *linker.arguments("-Wl,--version-script=exports"),
            *("-o", "kernel.so", "kernel.o"),
            *_libraries(target, folder, on_cpu=on_cpu),
        ]
        result = _run(command, folder)
        if os.strerror(errno.ENOSPC) in result.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if result.returncode:
            raise LinkError(_failure_text(command, result.stderr))
        linked = (folder / "kernel.so").read_bytes()
    require_host_object(linked, symbol, platform=target.platform, on_cpu=on_cpu)
    return linked


_COMMENTARY = re.compile(
    r"collect2: error: ld returned |clang.*: linker command failed|.*: in function |>>>|.*warning: "
)
"""Linker output lines without the cause, from GNU's and LLVM's linkers and their drivers."""

_MOST_SHOWN = 200
"""Most characters of linker output in a message."""


def _failure_text(command: Sequence[str], output: str) -> str:
    """Returns a message for a failed link, with the first output line that states the cause."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    causes = [line for line in lines if not _COMMENTARY.match(line)] or lines
    shown = one_line(causes[0])[:_MOST_SHOWN] if causes else "it printed no error"
    return f"the linker ({command[0]}) fails: {shown}"


def _require_object_for(platform: str, relocatable: bytes) -> None:
    """Refuses an object for another processor. The linker itself refuses a file that is no object.

    Raises:
        LinkError: If the object's machine is not the platform's.
    """
    try:
        machine = object_machine(relocatable)
    except MalformedElfError:
        return
    if machine != MACHINES[platform]:
        raise LinkError(
            f"the compiled object is for {machine}, must be for {MACHINES[platform]} ({platform}): "
            "its provider must compile host code for the target's platform"
        )


def _libraries(target: Target, folder: Path, *, on_cpu: bool) -> list[str]:
    """Returns the library arguments; writes a TVM-FFI stub to ``folder`` if needed."""
    directories = [*library_directories(target)]
    if target.platform in _STUBS:
        _ffi_stub(target.platform, folder)
        directories.append(folder)
    pairs = zip(directories, (RUNTIME_LIBRARY, FFI_LIBRARY))
    return [
        argument
        for directory, library in pairs
        if not (on_cpu and library == RUNTIME_LIBRARY)
        for argument in (f"-L{directory}", f"-l{library[3:-3]}")
    ]


def _ffi_stub(platform: str, folder: Path) -> None:
    """Makes a TVM-FFI stub: a library with the function names that kernels call, and no code."""
    names = "".join(f"{name} = 0;\n" for name in sorted(FFI_SYMBOLS))
    (folder / "names").write_text(names)
    options = ("-shared", "-m", _EMULATIONS[platform], "-soname", FFI_LIBRARY, "-o", FFI_LIBRARY)
    command = [*linker_of(platform).command, *options, "names"]
    result = _run(command, folder)
    if result.returncode:
        raise LinkError(_failure_text(command, result.stderr))


_EMULATIONS = {"linux_aarch64": "aarch64linux"}
"""LLVM linker emulation by platform, for links without an object that implies it."""
