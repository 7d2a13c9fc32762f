"""Loading kernels: from a bundle's bytes to something that can be launched, once a process.

Verified payload, in-memory file, dlopen, entry in the native kernel table. Nothing is written to
disk and no compiler is imported.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from . import native
from .bundle import Bundle
from .errors import DriverError, NoKernelError
from .facts import RUNTIME_LIBRARY, find_runtime_library
from .format import Kernel
from .target import CPU, Target

_ABI = "tvm_ffi"
_ARGUMENTS = "(a,b,out)"


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel in this process.

    Attributes:
        kernel: Its entry.
        handle: Its number in the native kernel table: the first argument of a launch.
    """

    kernel: Kernel
    handle: int


class Library:
    """The kernels that this process has loaded. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedKernel] = {}
        self._keep: list[ctypes.CDLL] = []
        self._numbers = itertools.count()

    def get(self, kernel_id: str) -> LoadedKernel | None:
        """A kernel that was loaded before, by its id."""
        return self._loaded.get(kernel_id)

    def load(self, bundle: Bundle, kernel: Kernel) -> LoadedKernel:
        """Load a kernel, or return it as loaded before.

        Raises:
            BundleFormatError: If the payload is damaged.
            NoKernelError: If the payload cannot be loaded, or lacks the function it must export.
            DriverError: If a library that kernels need is missing.
        """
        loaded = self._loaded.get(kernel.id)
        if loaded is not None:
            return loaded
        with self._lock:
            loaded = self._loaded.get(kernel.id)
            if loaded is None:
                loaded = self._load(bundle, kernel)
                self._loaded[kernel.id] = loaded
        return loaded

    def _load(self, bundle: Bundle, kernel: Kernel) -> LoadedKernel:
        target = bundle.header.target
        self._require_libraries(target)
        name = f"kernel {kernel.id[:12]} of {bundle.path}"
        symbol = _symbol(kernel.calling_convention, name)
        library = self._open_from_memory(bundle.payload(kernel), name)
        try:
            function = getattr(library, symbol)
        except AttributeError:
            raise NoKernelError(
                f"{name} does not export {symbol}; build the bundle again"
            ) from None
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None  # dlsym gave a function
        handle = native.load().register_kernel(
            id=kernel.id,
            function_address=address,
            signature=kernel.signature,
            alignment_bytes=kernel.alignment_bytes,
            target=None if target.arch == CPU else target,
            workspace_bytes=kernel.workspace_bytes,
        )
        self._keep.append(library)
        return LoadedKernel(kernel=kernel, handle=handle)

    def _require_libraries(self, target: Target) -> None:
        """Have the two libraries in the process whose names payloads need."""
        native.load()  # brings libtvm_ffi.so
        if target.arch == CPU:
            return
        found = find_runtime_library(target.cuda)
        if found is None:
            raise DriverError(
                f"{RUNTIME_LIBRARY} for {target.cuda} is not installed; "
                f"run: pip install nvidia-cutlass-dsl-libs-{target.cuda}"
            )
        _open_library(found.path)

    def _open_from_memory(self, payload: bytes, name: str) -> ctypes.CDLL:
        descriptor = os.memfd_create("nvgemm-kernel", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(payload)
            path = f"/proc/self/{_spelling(next(self._numbers))}fd/{descriptor}"
            return ctypes.CDLL(path, mode=os.RTLD_NOW)
        except OSError as error:
            raise NoKernelError(f"{name} cannot be loaded: {error}") from error
        finally:
            os.close(descriptor)


def _spelling(number: int) -> str:
    """A way to spell the same directory that no other number has.

    The loader takes equal paths for the same library, and descriptors are reused: without a path of
    its own, a kernel would silently be one that was loaded before.
    """
    return "".join("./" if bit == "0" else ".//" for bit in f"{number:032b}")


def _symbol(calling_convention: str, name: str) -> str:
    abi, _, rest = calling_convention.partition(":")
    function, opening, arguments = rest.partition("(")
    if abi != _ABI or opening + arguments != _ARGUMENTS or not function.isidentifier():
        raise NoKernelError(
            f"{name} has calling convention {calling_convention!r}, this release calls "
            f"{_ABI}:NAME{_ARGUMENTS}; install the nvgemm-aot release that built it"
        )
    return f"__tvm_ffi_{function}"


_open: dict[Path, ctypes.CDLL] = {}


def _open_library(path: Path) -> None:
    """Open a library once and for good; payloads then find it by its name."""
    if path not in _open:
        try:
            _open[path] = ctypes.CDLL(str(path))
        except OSError as error:
            raise DriverError(f"{path} cannot be loaded: {error}") from error


LIBRARY = Library()
"""The kernels of this process."""
