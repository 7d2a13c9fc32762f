"""Loads each bundled kernel once per process, ready to launch.

A verified payload becomes an in-memory file, is opened with dlopen, and gets an entry in the native
kernel table. Nothing is written to disk and no compiler is imported.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...bundle.calling_convention import parse_calling_convention
from ...bundle.format import Header, Kernel
from ...bundle.imported_symbols import RELEASES_ITS_LOCK
from ...bundle.reader import Bundle
from ...errors import DriverError, NoKernelError
from ...gemm.problem import Op
from ...gemm.target import CPU
from ...matching.device import RuntimeLibrary, find_ffi_exports, find_runtime_library
from ...matching.refusals import (
    imports_refusal,
    library_refusal,
    unlaunchable,
    untested_version_warning,
)
from ...reporting.counters import COUNTERS
from . import native

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """Kernel loaded in this process.

    Attributes:
        kernel: Header entry.
        op: Operation.
        quick_op: Operation, or None if the operation's own function must refuse the kernel: a gated
            one or, in some programs, one whose results depend on timing.
        handle: Index in the native kernel table.
        launch: ``launch(a, b, out, *extras)``: `.native.Native.launch` for this kernel.
        sees_negation: True if its operands can be lazily negated views by accident.
    """

    kernel: Kernel
    op: Op
    quick_op: Op | None
    handle: int
    launch: Callable[..., None]
    sees_negation: bool


class KernelLoader:
    """Kernels loaded in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedKernel] = {}
        self._provided: weakref.WeakSet[Bundle] = weakref.WeakSet()

    def get(self, kernel_id: str) -> LoadedKernel | None:
        """Returns a loaded kernel by id; None if it is not loaded."""
        return self._loaded.get(kernel_id)

    def renew_lock(self) -> None:
        """Replaces the lock: in a forked child, a thread that no longer exists may hold it."""
        self._lock = threading.Lock()

    def load(self, bundle: Bundle, kernel: Kernel) -> LoadedKernel:
        """Loads a kernel, or returns it if already loaded.

        Raises:
            BundleFormatError: If the payload is damaged.
            NoKernelError: If this release cannot launch the kernel, the payload cannot be loaded,
                or it lacks its exported function.
            DriverError: If a library that kernels need is missing or incompatible.
            ToolchainError: If the native launcher is missing.
            StorageError: If the bundle cannot be read.
        """
        loaded = self._loaded.get(kernel.id)
        if loaded is not None:
            return loaded
        with self._lock:
            loaded = self._loaded.get(kernel.id)
            if loaded is None:
                with COUNTERS.spending("loading"):
                    loaded = self._load(bundle, kernel)
                self._loaded[kernel.id] = loaded
        return loaded

    def _load(self, bundle: Bundle, kernel: Kernel) -> LoadedKernel:
        name = f"kernel {kernel.id[:12]} of {bundle.path}"
        reason = unlaunchable(kernel)
        if reason is not None:
            raise NoKernelError(f"{name}: {reason}", (reason,))
        convention = parse_calling_convention(kernel.calling_convention)
        assert convention is not None  # checked by unlaunchable()
        target = bundle.facts.target
        if bundle not in self._provided:
            require_libraries(bundle.facts)
            self._provided.add(bundle)
        library = None if target.arch == CPU else find_runtime_library(target.cuda)
        if library is not None:  # only CPU kernels have none, see require_libraries
            reason = imports_refusal(bundle.facts, kernel, library, find_ffi_exports())
            if reason is not None:
                raise DriverError(f"{name}: {reason}")
        launcher = native.load()
        handle = launcher.register_kernel(
            id=kernel.id,
            function_address=launcher.open_kernel(bundle.payload(kernel), convention.symbol, name),
            signature=kernel.signature,
            alignment_bytes=kernel.alignment_bytes,
            target=None if target.arch == CPU else target,
            workspace_bytes=kernel.workspace_bytes,
            workspace=kernel.workspace,
            # unlaunchable() bounds it; without `clusters` the launcher ignores it.
            cluster_size=math.prod(kernel.design.cluster) if convention.takes_clusters else 1,
            convention=convention,
        )
        signature = kernel.signature
        return LoadedKernel(
            kernel=kernel,
            op=signature.op,
            quick_op=signature.op if kernel.is_deterministic and not signature.is_gated else None,
            handle=handle,
            launch=functools.partial(launcher.launch, handle),
            sees_negation=any(
                dtype.row.is_part_of_complex for dtype in (signature.a, signature.b, signature.out)
            ),
        )


def require_libraries(header: Header) -> None:
    """Loads the two libraries that a bundle's payloads need by name.

    Raises:
        DriverError: If one is missing or incompatible.
        ToolchainError: If the native launcher is missing.
    """
    launcher = native.load()  # loads libtvm_ffi.so
    if header.target.arch == CPU:
        return
    library = find_runtime_library(header.target.cuda)
    reason = library_refusal(header, library, find_ffi_exports())
    if library is None or reason is not None:
        raise DriverError(reason)
    warning = untested_version_warning(library)
    if warning is not None:
        _warn_once(library, warning)
    _open_library(library.path)
    exports = library.exports
    launcher.set_library_keeps_lock(exports is not None and RELEASES_ITS_LOCK not in exports)


_warned: set[RuntimeLibrary] = set()


def _warn_once(library: RuntimeLibrary, warning: str) -> None:
    if library not in _warned:
        _warned.add(library)
        _log.warning("%s", warning)


_open: dict[Path, ctypes.CDLL] = {}


def _open_library(path: Path) -> None:
    """Opens a library for the life of the process; payloads then find it by name."""
    if path in _open:
        return
    try:
        library = ctypes.CDLL(str(path))
        # A payload binds to the library with this name that was loaded first.
        first_loaded = ctypes.CDLL(path.name, mode=os.RTLD_NOLOAD)
    except OSError as error:
        raise DriverError(f"{path} cannot be loaded: {error}") from error
    if first_loaded._handle != library._handle:
        others = [other for other in _loaded_files(path.name) if not path.samefile(other)]
        raise DriverError(
            f"{path} cannot be used: this process loaded another {path.name} before "
            f"({', '.join(others) or 'its file is gone'}), which kernels would call; uninstall the "
            "package of the other CUDA version, or launch a kernel before it is loaded"
        )
    _open[path] = library


def _loaded_files(name: str) -> list[str]:
    """Returns mapped files with a name in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = (line.split(maxsplit=5)[-1] for line in lines if line.endswith(f"/{name}"))
    return [file for file in dict.fromkeys(files) if Path(file).exists()]


LOADER = KernelLoader()
"""This process's kernels."""

os.register_at_fork(after_in_child=LOADER.renew_lock)
