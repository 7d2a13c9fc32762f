"""Facts about this process and its devices that matching needs, as explicit values.

Only these functions inspect the machine; `index` takes their results.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from .shared_library import exported_symbols, missing_part

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
"""Library that kernels call to load and launch device code."""

FFI_LIBRARY = "libtvm_ffi.so"
"""Library that defines the kernels' calling convention and error reporting."""

UNKNOWN_VERSION = "unknown"
"""Version for a library whose distribution metadata is missing."""


@dataclass(frozen=True, kw_only=True)
class RuntimeLibrary:
    """Installed copy of the library that kernels call.

    Attributes:
        path: File.
        cuda: CUDA major version, e.g. ``cu13``.
        version: Distribution version, e.g. ``4.8.1``, or `UNKNOWN_VERSION`.
        exports: Exported symbols; None if unknown, which counts as everything that kernels import.
        defect: Reason why it cannot be loaded, or None.
    """

    path: Path
    cuda: str
    version: str
    exports: frozenset[str] | None = None
    defect: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Device and process facts that decide which kernels can run.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: Driver's device name, e.g. ``NVIDIA H200``.
        capability: Compute capability (major, minor); None for a CPU.
        multiprocessors: Number of streaming multiprocessors; None for a CPU.
        platform: Host platform, e.g. ``linux_x86_64``.
        cuda: CUDA major version that torch was built for, e.g. ``cu13``; None without CUDA.
        runtime_library: Library for that CUDA version; None if not installed.
        shared_memory_bytes: Largest opt-in shared memory per thread block; None for a CPU, or if
            torch does not report it.
        ffi_exports: Symbols that the installed TVM-FFI exports; None if unknown.
        wants_determinism: True to exclude kernels whose results depend on timing.
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
"""CUDA version for a torch built without CUDA."""


@dataclass(frozen=True, kw_only=True)
class TorchVersions:
    """Versions of this process's torch, which determine ATen's speed.

    Attributes:
        torch: Version of torch, e.g. ``2.11.0+cu130``.
        cuda: CUDA version that it was built for, e.g. ``13.0``, or `NO_CUDA`.
    """

    torch: str
    cuda: str


def host_platform() -> str:
    """Returns this process's platform by its bundle name, e.g. ``linux_x86_64``."""
    return f"{sys.platform}_{platform.machine().lower()}"


@functools.cache
def find_runtime_library(cuda: str) -> RuntimeLibrary | None:
    """Finds the installed library for a CUDA major version such as ``cu13``; imports nothing.

    Since 4.6, it is in a folder per CUDA version. Older releases have one ``lib`` for the CUDA
    version installed last.
    """
    path = _package_file("nvidia_cutlass_dsl", (f"{cuda}/lib", "lib"), RUNTIME_LIBRARY)
    return None if path is None else inspect_library(path, cuda)


def inspect_library(path: Path, cuda: str) -> RuntimeLibrary:
    """Inspects a library file: its exported symbols and defects."""
    exports, defect = None, None
    try:
        defect = missing_part(path) or _replaced_by_another(path, cuda)
        if defect is None:
            exports = exported_symbols(path)
    except (OSError, ValueError) as error:
        defect = str(error)
    return RuntimeLibrary(
        path=path, cuda=cuda, version=_version_of(cuda), exports=exports, defect=defect
    )


_SHARED_FOLDER = "nvidia_cutlass_dsl/lib"
"""Folder in which release 4.5 keeps the library for either CUDA version."""

_OWNERS = {"cu13": "nvidia-cutlass-dsl-libs-cu13", "cu12": "nvidia-cutlass-dsl-libs-base"}
"""Distributions in release 4.5 that put their library there. Both may be installed: the one for
CUDA 13 requires the other, and should be installed last."""


def _replaced_by_another(path: Path, cuda: str) -> str | None:
    """Describes a library in the shared folder that is for the other CUDA version, or None."""
    if not path.parent.match(_SHARED_FOLDER) or cuda not in _OWNERS:
        return None
    try:
        owner = distribution(_OWNERS[cuda])
    except PackageNotFoundError:
        return None
    sizes = [one.size for one in owner.files or () if one.match(f"{_SHARED_FOLDER}/{path.name}")]
    size_bytes = path.stat().st_size
    if not sizes or sizes[0] in (None, size_bytes):
        return None
    return (
        f"another package replaced the file of {_OWNERS[cuda]} {owner.version}: it has "
        f"{size_bytes} bytes, must have {sizes[0]}"
    )


@functools.cache
def find_ffi_exports() -> frozenset[str] | None:
    """Returns the symbols that the installed TVM-FFI exports; None if unknown."""
    path = _package_file("tvm_ffi", ("lib",), FFI_LIBRARY)
    try:
        return None if path is None else exported_symbols(path)
    except (OSError, ValueError):  # loading it later fails with the reason
        return None


def _package_file(package: str, folders: Sequence[str], name: str) -> Path | None:
    """Returns a file in an installed package, from the first folder that has it."""
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
    """Returns torch's CUDA major version, e.g. ``cu13``; None for a CPU build."""
    import torch

    return cuda_major(torch.version.cuda or NO_CUDA)


def cuda_major(cuda: str) -> str | None:
    """Returns a CUDA version's major version, ``cu13`` for ``13.0``; None for `NO_CUDA`."""
    return None if cuda == NO_CUDA else f"cu{cuda.split('.')[0]}"


@functools.cache
def torch_versions() -> TorchVersions:
    """Returns the versions of this process's torch."""
    import torch

    return TorchVersions(torch=str(torch.__version__), cuda=torch.version.cuda or NO_CUDA)


def wants_determinism() -> bool:
    """Returns True if the program asked torch for deterministic algorithms."""
    import torch

    return bool(torch.are_deterministic_algorithms_enabled())


def warns_on_nondeterminism() -> bool:
    """Returns True if torch only warns about nondeterminism (``warn_only``)."""
    import torch

    return bool(torch.is_deterministic_algorithms_warn_only_enabled())


def device_facts(kind: str, index: int) -> DeviceFacts:
    """Returns current facts about one device in this process. Initialises CUDA for a GPU."""
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
