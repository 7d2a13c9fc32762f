"""Looking at a machine: can it run prebuilt kernels, and if not, what is missing."""

from __future__ import annotations

import ctypes
import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nvgemm_runtime.facts import (
    RUNTIME_LIBRARY,
    DeviceFacts,
    device_facts,
    find_runtime_library,
    torch_cuda,
)
from nvgemm_runtime.installation import INSTALLATION, FoundBundle

from .cache import default_directory

_DISTRIBUTIONS = ("nvgemm-aot", "torch", "apache-tvm-ffi", "zstandard")
_BUILD_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-operators",
    "nvidia-matmul-heuristics",
)
_DRIVER_LIBRARY = "libcuda.so.1"


@dataclass(frozen=True, kw_only=True)
class BundleState:
    """A bundle that was found, and for each GPU why it does not serve it (None: it does)."""

    path: str
    origin: str
    target: str | None
    kernels: int
    refusals: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a machine has.

    Attributes:
        versions: Installed distributions that kernels need; None where one is missing.
        build_versions: Likewise of the compiler side, which running kernels does not need.
        driver: CUDA version that the driver supports, e.g. ``13.0``; None without a driver.
        torch_cuda: CUDA major version of torch, e.g. ``cu13``; None for a CPU build.
        runtime_library: Where the library that kernels call was found, or None.
        gpus: Name and compute capability of each GPU.
        bundles: Every bundle that is installed or named.
        cache: The build cache's directory, and whether it can be written.
        problems: What keeps this machine from running prebuilt kernels; empty where nothing does.
    """

    versions: dict[str, str | None]
    build_versions: dict[str, str | None]
    driver: str | None
    torch_cuda: str | None
    runtime_library: str | None
    gpus: tuple[str, ...]
    bundles: tuple[BundleState, ...]
    cache: tuple[str, bool]
    problems: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether this machine can run at least one prebuilt kernel."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """Everything as values that ``json.dumps`` takes."""
        return asdict(self) | {"healthy": self.healthy}


def diagnose() -> Diagnosis:
    """Look at this machine. Works, and says what is missing, where there is no GPU."""
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    problems = [f"{name} is not installed" for name, found in versions.items() if found is None]
    driver = _driver_version()
    if driver is None:
        problems.append(f"no CUDA driver: {_DRIVER_LIBRARY} cannot be loaded")
    cuda = torch_cuda() if versions["torch"] else None
    if versions["torch"] and cuda is None:
        problems.append("torch is a CPU build; install one with CUDA")
    library = None if cuda is None else find_runtime_library(cuda)
    if cuda is not None and library is None:
        problems.append(
            f"{RUNTIME_LIBRARY} for {cuda} is missing; "
            f"run: pip install nvidia-cutlass-dsl-libs-{cuda}"
        )
    devices = _gpus() if driver is not None and cuda is not None else ()
    if driver is not None and cuda is not None and not devices:
        problems.append("torch sees no GPU")
    states = tuple(_state(found, devices) for found in INSTALLATION.bundles())
    problems += _bundle_problems(states, devices)
    cache = default_directory()
    return Diagnosis(
        versions=versions,
        build_versions={name: _version(name) for name in _BUILD_DISTRIBUTIONS},
        driver=driver,
        torch_cuda=cuda,
        runtime_library=None if library is None else f"{library.path} ({library.version})",
        gpus=tuple(
            f"{facts.name}, compute capability {'.'.join(map(str, facts.capability or ()))}"
            for facts in devices
        ),
        bundles=states,
        cache=(str(cache), _writable(cache)),
        problems=tuple(problems),
    )


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


def _gpus() -> tuple[DeviceFacts, ...]:
    import torch

    return tuple(device_facts("cuda", index) for index in range(torch.cuda.device_count()))


def _state(found: FoundBundle, devices: tuple[DeviceFacts, ...]) -> BundleState:
    header = found.bundle and found.bundle.header
    return BundleState(
        path=str(found.path),
        origin=found.origin,
        target=header.target.key if header else None,
        kernels=len(header.kernels) if header else 0,
        refusals={facts.name: found.refusal(facts) for facts in devices}
        or {"any device": found.problem},
    )


def _bundle_problems(
    states: tuple[BundleState, ...], devices: tuple[DeviceFacts, ...]
) -> list[str]:
    problems = [
        reason
        for state in states
        if state.target is None and (reason := next(iter(state.refusals.values()))) is not None
    ]
    if not states:
        problems.append(
            "no bundle is installed; pip install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )
    problems += [
        f"no bundle serves {facts.name}"
        for facts in devices
        if states and all(state.refusals.get(facts.name) is not None for state in states)
    ]
    return problems


def _writable(directory: Path) -> bool:
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    return os.access(existing, os.W_OK)
