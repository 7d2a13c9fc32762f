"""Loading kernels: from a bundle's bytes to something that can be launched, once a process.

Verified payload, in-memory file, dlopen, entry in the native kernel table. Nothing is written to
disk and no compiler is imported.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import native
from .bundle import Bundle
from .calling_convention import exported_symbol
from .errors import DriverError, NoKernelError
from .facts import find_runtime_library
from .format import Header, Kernel
from .match import library_refusal, unlaunchable
from .problem import DType, Op
from .target import CPU

_PARTS_OF_COMPLEX = frozenset({DType.FP32, DType.FP16})

_numbers = itertools.count()
"""Numbers the images that this process opened. Every `Library` counts on, for all of them share one
loader; guarded by the interpreter, whose ``next`` of a counter is atomic."""


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel in this process.

    Attributes:
        kernel: Its entry.
        op: The operation it computes.
        handle: Its number in the native kernel table.
        launch: ``launch(a, b, out)``: `nvgemm_runtime.native.Native.launch` of this kernel.
        sees_negation: Whether an operand can be a lazily negated view, which the launcher does not
            see: only types that are the parts of a complex type can.
    """

    kernel: Kernel
    op: Op
    handle: int
    launch: Callable[[Any, Any, Any], None]
    sees_negation: bool


class Library:
    """The kernels that this process has loaded. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedKernel] = {}
        self._provided: weakref.WeakSet[Bundle] = weakref.WeakSet()
        self._keep: list[ctypes.CDLL] = []  # what is registered must never be unloaded

    def get(self, kernel_id: str) -> LoadedKernel | None:
        """A kernel that was loaded before, by its id."""
        return self._loaded.get(kernel_id)

    def renew_lock(self) -> None:
        """Forget who holds the lock: in a forked child, perhaps a thread that it does not have."""
        self._lock = threading.Lock()

    def load(self, bundle: Bundle, kernel: Kernel) -> LoadedKernel:
        """Load a kernel, or return it as loaded before.

        Raises:
            BundleFormatError: If the payload is damaged.
            NoKernelError: If this release cannot launch such a kernel, the payload cannot be
                loaded, or it lacks the function it must export.
            DriverError: If a library that kernels need is missing or does not fit.
            ToolchainError: If the native launcher is missing.
            StorageError: If the bundle cannot be read.
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
        name = f"kernel {kernel.id[:12]} of {bundle.path}"
        reason = unlaunchable(kernel)
        if reason is not None:
            raise NoKernelError(f"{name}: {reason}", (reason,))
        symbol = exported_symbol(kernel.calling_convention)
        assert symbol is not None  # or it were unlaunchable
        target = bundle.header.target
        if bundle not in self._provided:
            _require_libraries(bundle.header)
            self._provided.add(bundle)
        library = _open_from_memory(bundle.payload(kernel), name)
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
        launch = functools.partial(native.load().launch, handle)
        signature = kernel.signature
        types = (signature.a, signature.b, signature.out)
        return LoadedKernel(
            kernel=kernel,
            op=signature.op,
            handle=handle,
            launch=launch,
            sees_negation=not _PARTS_OF_COMPLEX.isdisjoint(types),
        )


def _require_libraries(header: Header) -> None:
    """Have the two libraries in the process whose names payloads need."""
    native.load()  # brings libtvm_ffi.so
    if header.target.arch == CPU:
        return
    found = find_runtime_library(header.target.cuda)
    reason = library_refusal(header, found)
    if found is None or reason is not None:
        raise DriverError(reason)
    _open_library(found.path)


def _open_from_memory(payload: bytes, name: str) -> ctypes.CDLL:
    _check_segments(payload, name)
    try:
        descriptor = os.memfd_create("nvgemm-kernel", os.MFD_CLOEXEC)
        try:
            if os.write(descriptor, payload) != len(payload):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            path = f"/proc/self/{_spelling(next(_numbers))}fd/{descriptor}"
            return ctypes.CDLL(path, mode=os.RTLD_NOW)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoKernelError(f"{name} cannot be loaded from memory: {error}") from error


def _spelling(number: int) -> str:
    """A way to spell the same directory that no other number has.

    The loader takes equal paths for the same library, and descriptors are reused: without a path of
    its own, a kernel would silently be one that was loaded before.
    """
    return "".join("./" if bit == "0" else ".//" for bit in f"{number:b}")


_ELF = struct.Struct("<16sHHIQQQIHHH")
"""Elf64_Ehdr up to e_phnum (System V ABI)."""

_SEGMENT = struct.Struct("<IIQQQQQQ")
"""Elf64_Phdr (System V ABI)."""

_ELF_64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"


def _check_segments(payload: bytes, name: str) -> None:
    """Refuse an image whose segments reach behind its end: touching those would kill the process.

    The loader itself notices other damage.
    """
    if len(payload) < _ELF.size or not payload.startswith(_ELF_64_LITTLE_ENDIAN):
        raise NoKernelError(f"{name} is no 64-bit ELF image ({len(payload)} bytes)")
    table, size_bytes, count = (_ELF.unpack_from(payload)[field] for field in (5, 9, 10))
    end = table + count * _SEGMENT.size
    if size_bytes == _SEGMENT.size and end <= len(payload):
        for at in range(table, end, _SEGMENT.size):
            _, _, offset, _, _, file_bytes, _, _ = _SEGMENT.unpack_from(payload, at)
            end = max(end, offset + file_bytes)
    if end > len(payload):
        raise NoKernelError(f"{name} is cut off: {len(payload)} bytes, its segments need {end}")


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

os.register_at_fork(after_in_child=LIBRARY.renew_lock)
