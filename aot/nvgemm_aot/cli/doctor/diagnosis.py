"""Diagnoses whether this machine can run prebuilt kernels, and lists what is missing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.errors import NvgemmError, ToolchainError, install_command
from nvgemm_runtime.gemm.target import (
    CPU,
    CUDA_VERSIONS,
    DEFAULT_ARCHITECTURE,
    PLATFORMS,
    Target,
)
from nvgemm_runtime.installed.policy import current_policy
from nvgemm_runtime.installed.registry import INSTALLATION, FoundBundle
from nvgemm_runtime.installed.required_wheels import missing_wheels
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.matching.device import (
    RUNTIME_LIBRARY,
    UNKNOWN_VERSION,
    DeviceFacts,
    RuntimeLibrary,
    device_facts,
    find_ffi_exports,
    find_runtime_library,
    host_platform,
    torch_cuda,
    torch_versions,
)
from nvgemm_runtime.matching.refusals import (
    describe_device,
    library_install_command,
    library_refusal,
    process_refusal,
    reinstall_command,
)
from nvgemm_runtime.settings import default_mode

from ...pipeline.linker import library_directories, linker_version
from ...providers import PROVIDERS, load_provider
from ...providers.discovery import Offered, offered_providers
from ...storage.build_cache import default_directory, entry_files
from ..build.measured_rankings import rankings_document
from .confirmed_here import confirmed_documents
from .policy_here import policy_document, signer

Document = dict[str, Any]
T = TypeVar("T")

_DISTRIBUTIONS = ("nvgemm-aot", "torch", "apache-tvm-ffi", "zstandard")
_BUILD_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-operators",
    "nvidia-matmul-heuristics",
)
OWN = "nvgemm-aot"
"""Origin of the providers that come with this package."""

_DRIVER_LIBRARY = "libcuda.so.1"


def diagnose() -> Document:
    """Diagnoses this machine, with or without a GPU: what it has, and what it lacks.

    ``problems`` lists everything that keeps this machine, or one of its GPUs, from running prebuilt
    kernels, or an installed bundle from being used, each with the next step. ``build_versions``,
    ``providers`` and ``cache`` describe the builder, which running kernels does not need.
    ``build_problems`` lists everything that prevents building, or is None if the builder is
    not installed.
    """
    problems: list[str] = []
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    problems += (
        f"{name} is not installed; run: {install_command()}"
        for name, installed in versions.items()
        if installed is None
    )
    _attempt(default_mode, problems)  # NVGEMM_AOT may be invalid
    launcher = _attempt(native.load, problems) is not None
    driver = _driver_version()
    if driver is None:
        problems.append(
            f"no CUDA driver: {_DRIVER_LIBRARY} cannot be loaded or does not answer; install "
            "NVIDIA's driver, or give the container its GPUs"
        )
    cuda = _attempt(torch_cuda, problems) if versions["torch"] else None
    if versions["torch"] and cuda is None:
        versions_of = " or ".join(cuda_version.removeprefix("cu") for cuda_version in CUDA_VERSIONS)
        problems.append(
            f"torch {versions['torch']} is a CPU build, or broken; install one for CUDA "
            f"{versions_of}"
        )
    so_far = len(problems)
    library = _attempt(lambda: _runtime_library(cuda), problems)
    if cuda is not None and library is None and len(problems) == so_far:
        problems.append(
            f"{RUNTIME_LIBRARY} for {cuda} is missing; run: {library_install_command(cuda)}"
        )
    if library is not None and library.defect is not None:
        problems.append(
            f"{library.path} cannot be loaded: {library.defect}; run: {reinstall_command(library)}"
        )
    too_old = False
    if driver and cuda and _driver_is_older(driver, cuda):
        too_old = True
        problems.append(
            f"the driver is for CUDA {driver} and cannot load device code for {cuda}, which torch "
            f"and its kernels need; update NVIDIA's driver to one for CUDA {cuda[2:]}, or install "
            "torch and kernels for an older CUDA"
        )
    devices = (_attempt(_gpus, problems) or ()) if driver and cuda else ()
    if driver and cuda and not devices and not too_old:
        problems.append("torch sees no GPU; is CUDA_VISIBLE_DEVICES empty?")
    found_bundles = _attempt(_readable_bundles, problems)
    policy = _attempt(current_policy, problems)
    bundles = [
        {
            **_bundle_document(entry, devices, cuda, library),
            "signed_by": _attempt(functools.partial(signer, policy, entry), []),
        }
        for entry in found_bundles or ()
    ]
    if found_bundles is not None:
        # A policy that cannot be used is the problem of every bundle.
        problems += (one for one in _bundle_problems(bundles, devices) if one not in problems)
    problems += _attempt(missing_wheels, problems) or ()
    build_versions = {name: _version(name) for name in _BUILD_DISTRIBUTIONS}
    offered = _attempt(offered_providers, problems) or ()
    providers = [_provider_document(*entry) for entry in _named_providers(offered)]
    return {
        "healthy": not problems,
        "versions": versions,
        "build_versions": build_versions,
        "build_problems": _build_problems(build_versions, providers),
        "providers": providers,
        "driver": driver,
        "torch_cuda": cuda,
        "runtime_library": _library_text(library),
        "launcher": launcher,
        "gpus": [describe_device(facts) for facts in devices],
        "gpu_names": [facts.name for facts in devices],
        "policy": policy and policy_document(policy),
        "bundles": bundles,
        "measured_rankings": _measured_rankings(found_bundles or (), devices, versions["torch"]),
        "confirmed": confirmed_documents(
            _attempt(INSTALLATION.confirmed_files, problems) or (),
            [facts.name for facts in devices],
            _attempt(torch_versions, []) if versions["torch"] else None,
        ),
        "cache": _cache_document(),
        "problems": problems,
    }


def _measured_rankings(
    bundles: Iterable[FoundBundle], devices: Iterable[DeviceFacts], torch: str | None
) -> list[Document]:
    headers = [entry.bundle.header for entry in bundles if entry.bundle is not None]
    names = {facts.name for facts in devices}
    here = _attempt(torch_versions, []) if torch else None
    return rankings_document(headers, names, here)


def _named_providers(offered: Iterable[Offered]) -> list[tuple[str, str]]:
    """Returns every provider that a manifest may name, with the distribution that brings it."""
    others = (
        (provider.name, f"{provider.distribution} {provider.version}") for provider in offered
    )
    return [*((name, OWN) for name in PROVIDERS), *others]


def _provider_document(name: str, origin: str) -> Document:
    """Describes whether a provider can be created and has its toolchain; compiles nothing."""
    try:
        if origin != OWN and name in PROVIDERS:
            raise ToolchainError("nvgemm-aot's own provider with this name takes precedence")
        load_provider(name).toolchain()
    except NvgemmError as error:
        return {"name": name, "origin": origin, "problem": str(error)}
    return {"name": name, "origin": origin, "problem": None}


def _build_problems(versions: dict[str, str | None], providers: list[Document]) -> list[str] | None:
    """Returns why kernels cannot be built here, or None without any part of the builder."""
    if not any(versions.values()):
        return None
    problems = [
        f"{name} is not installed; run: {install_command('build')}"
        for name, installed in versions.items()
        if installed is None
    ]
    problems += (
        f"provider {provider['name']}: {provider['problem']}"
        for provider in providers
        if provider["problem"] and not any(name in provider["problem"] for name in versions)
    )
    _attempt(lambda: linker_version(PLATFORMS[0]), problems)
    _attempt(lambda: library_directories(Target(arch=DEFAULT_ARCHITECTURE)), problems)
    return problems


def _runtime_library(cuda: str | None) -> RuntimeLibrary | None:
    """Returns the runtime library for torch's CUDA; the newest installed for a CPU-only torch."""
    libraries = map(find_runtime_library, [cuda] if cuda else CUDA_VERSIONS)
    return next(filter(None, libraries), None)


def _attempt(look: Callable[[], T], problems: list[str]) -> T | None:
    """Calls ``look``; turns an exception into a problem, so that diagnosing never fails."""
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


def _driver_is_older(driver: str, cuda: str) -> bool:
    """Returns True if a driver, ``12.4``, has an older CUDA major version than ``cu13``."""
    return int(driver.split(".")[0]) < int(cuda.removeprefix("cu"))


def _library_text(library: RuntimeLibrary | None) -> str | None:
    if library is None:
        return None
    unknown = library.version == UNKNOWN_VERSION
    return f"{library.path} ({'unknown version' if unknown else library.version})"


def _gpus() -> tuple[DeviceFacts, ...]:
    import torch

    return tuple(device_facts("cuda", index) for index in range(torch.cuda.device_count()))


def _readable_bundles() -> list[FoundBundle]:
    """Returns all bundles; one whose pages are damaged has that as its problem."""
    bundles = []
    for entry in INSTALLATION.bundles():
        try:
            if entry.bundle is not None:
                entry.bundle.header  # noqa: B018  # reads the pages
        except NvgemmError as error:
            entry = replace(entry, bundle=None, problem=str(error))
        bundles.append(entry)
    return bundles


def _bundle_document(
    entry: FoundBundle,
    devices: tuple[DeviceFacts, ...],
    cuda: str | None,
    library: RuntimeLibrary | None,
) -> Document:
    header = entry.bundle and entry.bundle.header
    return {
        "path": str(entry.path),
        "origin": entry.origin,
        "target": header.target.key if header else None,
        "kernels": len(header.kernels) if header else 0,
        "problem": entry.problem,
        "process_refusal": _process_refusal(header, cuda, library) if header else None,
        "refusals": [entry.refusal(facts) for facts in devices],
        "products": list(header.products) if header else [],
        "ranked_for": [_ranked_for(header, facts) if header else None for facts in devices],
    }


def _ranked_for(header: Header, facts: DeviceFacts) -> str | None:
    """Returns the product whose rankings a GPU uses, or None if the bundle ranks nothing."""
    counts = Counter(header.gpu_of(ranking) for ranking in header.rankings_on(facts.name))
    return facts.name if counts[facts.name] else next(iter(counts), None)


def _process_refusal(
    header: Header, cuda: str | None, library: RuntimeLibrary | None
) -> str | None:
    """Returns why no GPU here can run a bundle; a missing library is a separate problem."""
    reason = process_refusal(header.target, host_platform(), cuda)
    if reason is not None or header.target.arch == CPU or library is None or library.defect:
        return reason
    return library_refusal(header, library, find_ffi_exports())


def _bundle_problems(bundles: list[Document], devices: tuple[DeviceFacts, ...]) -> list[str]:
    if not bundles:
        return [
            "no bundle is installed; install a kernel wheel, or name bundles in NVGEMM_AOT_BUNDLES"
        ]
    problems = [bundle["problem"] for bundle in bundles if bundle["problem"] is not None]
    foreign = [bundle["process_refusal"] for bundle in bundles]
    if not devices and None not in foreign:
        problems.append(f"no bundle serves this process: {_refusals_text(bundles, foreign)}")
    for index, facts in enumerate(devices):
        refusals = [bundle["refusals"][index] for bundle in bundles]
        if None not in refusals:
            # GPUs of one kind share a reason, which is listed once.
            device = describe_device(facts)
            reason = f"no bundle serves {device}: {_refusals_text(bundles, refusals)}"
            problems += [reason] * (reason not in problems)
    return problems


def _refusals_text(bundles: list[Document], reasons: list[str]) -> str:
    """Returns each reason once, after its bundles, unless it names its bundle itself."""
    paths: dict[str, list[str]] = {}
    for bundle, reason in zip(bundles, reasons):
        bundle_paths = paths.setdefault(reason, [])
        bundle_paths += [bundle["path"]] * (bundle["path"] not in reason)
    return "; ".join(
        ": ".join(filter(None, (", ".join(paths[reason]), reason))) for reason in paths
    )


def _cache_document() -> Document:
    """Describes the build cache, for which the user may have no directory."""
    unknown = {"directory": None, "writable": False, "entries": 0, "size_bytes": 0}
    try:
        directory = default_directory()
    except NvgemmError:
        return unknown
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
    except OSError:  # no permission to search a parent directory
        return {**unknown, "directory": str(directory)}
    sizes = []
    for entry in entry_files(directory):
        with contextlib.suppress(OSError):  # removed meanwhile, by a build
            sizes.append(entry.stat().st_size)
    return {
        "directory": str(directory),
        "writable": os.access(existing, os.W_OK | os.X_OK),
        "entries": len(sizes),
        "size_bytes": sum(sizes),
    }
