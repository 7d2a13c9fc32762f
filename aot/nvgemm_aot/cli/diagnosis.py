"""Diagnoses whether this machine can run prebuilt kernels, and what is missing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.installed.registry import INSTALLATION, FoundBundle
from nvgemm_runtime.launch import native
from nvgemm_runtime.matching.device import (
    RUNTIME_LIBRARY,
    UNKNOWN_VERSION,
    DeviceFacts,
    RuntimeLibrary,
    device_facts,
    find_runtime_library,
    torch_cuda,
)
from nvgemm_runtime.matching.refusals import describe_device

from ..storage.cache import default_directory

T = TypeVar("T")

_DISTRIBUTIONS = ("nvgemm-aot", "torch", "apache-tvm-ffi", "zstandard")
_BUILD_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-operators",
    "nvidia-matmul-heuristics",
)
_DRIVER_LIBRARY = "libcuda.so.1"


@dataclass(frozen=True, kw_only=True)
class BundleState:
    """A bundle that was found.

    Attributes:
        path: The file.
        origin: The distribution that installed it, or the variable that names it.
        target: Key of its target; None if it cannot be read.
        kernels: Number of its kernels.
        problem: Why no device can use it, or None.
        refusals: For each GPU of this machine, why the bundle does not serve it, or None.
    """

    path: str
    origin: str
    target: str | None
    kernels: int
    problem: str | None
    refusals: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """The build cache.

    Attributes:
        directory: Its path; None where the user has no place for it.
        writable: Whether it, or the directory to create it in, can be written.
        entries: Number of kernels and plans in it.
        size_bytes: Size of these.
    """

    directory: str | None
    writable: bool
    entries: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What this machine has, and what it lacks.

    Attributes:
        versions: Versions of the distributions that kernels need; None for a missing one.
        build_versions: Likewise of the compiler side, which running kernels does not need.
        driver: CUDA version that the driver supports, e.g. ``13.0``; None without a driver.
        torch_cuda: CUDA major version of torch, e.g. ``cu13``; None for a CPU build.
        runtime_library: Path and version of the library that kernels call, or None.
        launcher: Whether the native launcher loads.
        gpus: Name and compute capability of each GPU.
        bundles: Every bundle that is installed or named.
        cache: The build cache, which running kernels does not need.
        problems: What keeps this machine or one of its GPUs from running prebuilt kernels, or an
            installed bundle from being used; each with the next step.
    """

    versions: dict[str, str | None]
    build_versions: dict[str, str | None]
    driver: str | None
    torch_cuda: str | None
    runtime_library: str | None
    launcher: bool
    gpus: tuple[str, ...]
    bundles: tuple[BundleState, ...]
    cache: CacheState
    problems: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether every GPU is served and nothing installed is broken."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """The JSON object."""
        return {"healthy": self.healthy} | asdict(self)


def diagnose() -> Diagnosis:
    """Diagnose this machine, which need not have a GPU."""
    problems: list[str] = []
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    problems += (
        f"{name} is not installed; run: pip install nvgemm-aot"
        for name, found in versions.items()
        if found is None
    )
    launcher = _attempt(native.load, problems) is not None
    driver = _driver_version()
    if driver is None:
        problems.append(
            f"no CUDA driver: {_DRIVER_LIBRARY} cannot be loaded or does not answer; install "
            "NVIDIA's driver, or give the container its GPUs"
        )
    cuda = _attempt(torch_cuda, problems) if versions["torch"] else None
    if versions["torch"] and cuda is None:
        problems.append("torch is a CPU build, or broken; install one with CUDA")
    so_far = len(problems)
    library = None if cuda is None else _attempt(lambda: find_runtime_library(cuda), problems)
    if cuda is not None and library is None and len(problems) == so_far:
        problems.append(
            f"{RUNTIME_LIBRARY} for {cuda} is missing; "
            f"run: pip install nvidia-cutlass-dsl-libs-{cuda}"
        )
    if library is not None and library.defect is not None:
        problems.append(
            f"{library.path} cannot be loaded: {library.defect}; "
            f"run: pip install --force-reinstall --no-deps nvidia-cutlass-dsl-libs-{cuda}"
        )
    devices = (_attempt(_gpus, problems) or ()) if driver and cuda else ()
    if driver and cuda and not devices:
        problems.append("torch sees no GPU; is CUDA_VISIBLE_DEVICES empty?")
    found_bundles = _attempt(INSTALLATION.bundles, problems)
    states = tuple(_bundle_state(found, devices) for found in found_bundles or ())
    if found_bundles is not None:
        problems += _bundle_problems(states, devices)
    return Diagnosis(
        versions=versions,
        build_versions={name: _version(name) for name in _BUILD_DISTRIBUTIONS},
        driver=driver,
        torch_cuda=cuda,
        runtime_library=_library_text(library),
        launcher=launcher,
        gpus=tuple(describe_device(facts) for facts in devices),
        bundles=states,
        cache=_cache_state(),
        problems=tuple(problems),
    )


def _attempt(look: Callable[[], T], problems: list[str]) -> T | None:
    """The result of ``look``; its exception becomes a problem, so that diagnosing never fails."""
    try:
        return look()
    except Exception as error:
        name = "" if isinstance(error, NvgemmError) else f"{type(error).__name__}: "
        problems.append(f"{name}{error}")
        return None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    try:
        library = ctypes.CDLL(_DRIVER_LIBRARY)
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _library_text(library: RuntimeLibrary | None) -> str | None:
    if library is None:
        return None
    unknown = library.version == UNKNOWN_VERSION
    return f"{library.path} ({'unknown version' if unknown else library.version})"


def _gpus() -> tuple[DeviceFacts, ...]:
    import torch

    return tuple(device_facts("cuda", index) for index in range(torch.cuda.device_count()))


def _bundle_state(found: FoundBundle, devices: tuple[DeviceFacts, ...]) -> BundleState:
    header = found.bundle and found.bundle.header
    return BundleState(
        path=str(found.path),
        origin=found.origin,
        target=header.target.key if header else None,
        kernels=len(header.kernels) if header else 0,
        problem=found.problem,
        refusals=tuple(found.refusal(facts) for facts in devices),
    )


def _bundle_problems(
    states: tuple[BundleState, ...], devices: tuple[DeviceFacts, ...]
) -> list[str]:
    if not states:
        return [
            "no bundle is installed; pip install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        ]
    problems = [state.problem for state in states if state.problem is not None]
    for place, facts in enumerate(devices):
        refusals = [state.refusals[place] for state in states]
        if None not in refusals:
            # GPUs of one kind share a reason, which is listed once.
            reason = f"no bundle serves {describe_device(facts)}: {'; '.join(map(str, refusals))}"
            problems += [reason] * (reason not in problems)
    return problems


def _cache_state() -> CacheState:
    try:
        directory = default_directory()
    except NvgemmError:
        return CacheState(directory=None, writable=False, entries=0, size_bytes=0)
    try:
        existing = next(place for place in (directory, *directory.parents) if place.exists())
    except OSError:  # no permission to search a parent directory
        return CacheState(directory=str(directory), writable=False, entries=0, size_bytes=0)
    sizes = []
    for folder, _, names in os.walk(directory / "entries"):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(folder, name)).st_size)  # noqa: PTH116, PTH118
            except OSError:  # removed meanwhile, by a build
                continue
    return CacheState(
        directory=str(directory),
        writable=os.access(existing, os.W_OK | os.X_OK),
        entries=len(sizes),
        size_bytes=sum(sizes),
    )
