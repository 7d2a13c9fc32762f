"""What matching must know of this process and its devices, as explicit values.

Only the functions here look at the machine; `index` takes what they return.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .shared_library import exported_symbols, missing_part

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
"""The library that kernels call to load and launch device code."""

FFI_LIBRARY = "libtvm_ffi.so"
"""The library whose calling convention kernels have, and by which they report errors."""

UNKNOWN_VERSION = "unknown"
"""In place of a version where the library is there and its distribution's metadata is not."""


@dataclass(frozen=True, kw_only=True)
class RuntimeLibrary:
    """An installed copy of the library that kernels call.

    Attributes:
        path: The file.
        cuda: CUDA major version it is for, e.g. ``cu13``.
        version: Version of the distribution it belongs to, e.g. ``4.8.1``, or `UNKNOWN_VERSION`.
        exports: Symbols that it exports; None where it was not looked at or its file does not show
            them, which counts as all that kernels import.
        defect: Why it cannot be loaded, or None.
    """

    path: Path
    cuda: str
    version: str
    exports: frozenset[str] | None = None
    defect: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device, and what of this process decides which kernels it can run.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: Name that the driver gives, e.g. ``NVIDIA H200``.
        capability: Compute capability (major, minor); None for a CPU.
        multiprocessors: Number of streaming multiprocessors; None for a CPU.
        platform: Host platform, e.g. ``linux_x86_64``.
        cuda: CUDA major version that torch was built for, e.g. ``cu13``; None without CUDA.
        runtime_library: The library for that CUDA version; None where it is not installed.
        shared_memory_bytes: Most shared memory that one thread block can opt in to; None for a CPU,
            or where torch does not tell.
        ffi_exports: Symbols that the installed TVM-FFI exports; None where it was not looked at.
        wants_determinism: Whether kernels are left out whose results depend on timing.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None
    multiprocessors: int | None
    platform: str
    cuda: str | None
    runtime_library: RuntimeLibrary | None
    shared_memory_bytes: int | None = None
    ffi_exports: frozenset[str] | None = None
    wants_determinism: bool = False


NO_CUDA = "none"
"""In place of a CUDA version where torch was built without CUDA."""


@dataclass(frozen=True, kw_only=True)
class TorchVersions:
    """The torch of this process, which ATen's speed depends on.

    Attributes:
        torch: Its version, e.g. ``2.11.0+cu130``.
        cuda: CUDA version that it was built for, e.g. ``13.0``, or `NO_CUDA`.
    """

    torch: str
    cuda: str


def host_platform() -> str:
    """Platform of this process, as bundles name it, e.g. ``linux_x86_64``."""
    return f"{sys.platform}_{platform.machine().lower()}"


@functools.cache
def find_runtime_library(cuda: str) -> RuntimeLibrary | None:
    """Find the installed library for a CUDA major version such as ``cu13``; imports nothing.

    It lies in a folder of its CUDA version since 4.6. Older releases have one ``lib`` for whichever
    CUDA version was installed last.
    """
    path = _package_file("nvidia_cutlass_dsl", (f"{cuda}/lib", "lib"), RUNTIME_LIBRARY)
    return None if path is None else look_at_library(path, cuda)


def look_at_library(path: Path, cuda: str) -> RuntimeLibrary:
    """What a file of the library shows: what it exports, and whether it can be loaded."""
    exports, defect = None, None
    try:
        defect = missing_part(path)
        if defect is None:
            exports = exported_symbols(path)
    except (OSError, ValueError) as error:
        defect = str(error)
    return RuntimeLibrary(
        path=path, cuda=cuda, version=_version_of(cuda), exports=exports, defect=defect
    )


@functools.cache
def find_ffi_exports() -> frozenset[str] | None:
    """Symbols that the installed TVM-FFI exports; None where no file shows them."""
    path = _package_file("tvm_ffi", ("lib",), FFI_LIBRARY)
    try:
        return None if path is None else exported_symbols(path)
    except (OSError, ValueError):  # loading it fails, and says why
        return None


def _package_file(package: str, folders: Sequence[str], name: str) -> Path | None:
    """A file of an installed package, in the first of some folders that has it."""
    spec = importlib.util.find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        for folder in folders:
            path = Path(root) / folder / name
            if path.is_file():
                return path
    return None


def _version_of(cuda: str) -> str:
    try:
        return version(f"nvidia-cutlass-dsl-libs-{cuda}")
    except PackageNotFoundError:
        return UNKNOWN_VERSION


@functools.cache
def torch_cuda() -> str | None:
    """CUDA major version that torch was built for, e.g. ``cu13``; None for a CPU build."""
    import torch

    return cuda_major(torch.version.cuda or NO_CUDA)


def cuda_major(cuda: str) -> str | None:
    """Name of a CUDA version's major version, ``cu13`` of ``13.0``; None of `NO_CUDA`."""
    return None if cuda == NO_CUDA else f"cu{cuda.split('.')[0]}"


@functools.cache
def torch_versions() -> TorchVersions:
    """Versions of the torch of this process."""
    import torch

    return TorchVersions(torch=str(torch.__version__), cuda=torch.version.cuda or NO_CUDA)


def wants_determinism() -> bool:
    """Whether the program asked torch for deterministic algorithms."""
    import torch

    return bool(torch.are_deterministic_algorithms_enabled())


def wants_warnings_alone() -> bool:
    """Whether torch is to warn where it would refuse what is not deterministic (``warn_only``)."""
    import torch

    return bool(torch.is_deterministic_algorithms_warn_only_enabled())


def device_facts(kind: str, index: int) -> DeviceFacts:
    """Facts of one device of this process, as it is now. For a GPU this initialises CUDA."""
    return _device_facts(kind, index, wants_determinism())


@functools.cache
def _device_facts(kind: str, index: int, wants_determinism: bool) -> DeviceFacts:
    if wants_determinism:
        return replace(_device_facts(kind, index, False), wants_determinism=True)
    cuda = torch_cuda()
    if kind != "cuda":
        return DeviceFacts(
            kind=kind,
            name=kind,
            capability=None,
            multiprocessors=None,
            platform=host_platform(),
            cuda=cuda,
            runtime_library=None,
        )
    import torch

    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        kind=kind,
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        multiprocessors=properties.multi_processor_count,
        platform=host_platform(),
        cuda=cuda,
        runtime_library=None if cuda is None else find_runtime_library(cuda),
        shared_memory_bytes=getattr(properties, "shared_memory_per_block_optin", None),
        ffi_exports=find_ffi_exports(),
    )
