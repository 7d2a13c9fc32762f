"""Reasons to refuse kernels: by this release, in this process, or on one device."""

from __future__ import annotations

import math

from ..bundle.calling_convention import KNOWN_FORM, parse_calling_convention
from ..bundle.format import Header, Kernel
from ..bundle.imported_symbols import FIRST_RELEASE, NEWEST_RUN, OLDEST_RUN, needed_symbols
from ..errors import UPGRADE, NvgemmError, one_line
from ..gemm.target import CPU, CUDA_VERSIONS, PLATFORMS, Target, UnknownTarget
from .device import RUNTIME_LIBRARY, UNKNOWN_VERSION, DeviceFacts, RuntimeLibrary

MAX_CLUSTER_SIZE = 16
"""Most thread blocks per cluster on any device: kMaxClusterSize in csrc/driver/cuda_driver.cpp."""

_FFI_DISTRIBUTION = "apache-tvm-ffi"

_RANGE = f">={OLDEST_RUN},<{NEWEST_RUN[0]}.{NEWEST_RUN[1] + 1}"
"""Runtime library releases that kernels were tested with: the range in the extras."""


def unlaunchable(kernel: Kernel) -> str | None:
    """Returns why this release cannot launch a kernel on any device, or None."""
    convention = parse_calling_convention(kernel.calling_convention)
    if convention is None:
        return (
            f"calling convention {kernel.calling_convention!r}, this release calls {KNOWN_FORM}; "
            f"{UPGRADE}"
        )
    misfit = convention.misfit(kernel.signature, kernel.has_workspace)
    if misfit is not None:
        return f"calling convention {kernel.calling_convention!r}: {misfit}"
    size = math.prod(kernel.design.cluster)
    if convention.takes_clusters and size > MAX_CLUSTER_SIZE:
        return f"its cluster has {size} thread blocks, must have at most {MAX_CLUSTER_SIZE}"
    return None if kernel.workspace is None else kernel.workspace.fault(kernel.signature.op)


def timing_refusal(kernel: Kernel, wants_determinism: bool) -> str | None:
    """Returns the reason to exclude a nondeterministic kernel if determinism is wanted, or None."""
    if kernel.is_deterministic or not wants_determinism:
        return None
    return (
        "results depend on timing, and the program asked for deterministic algorithms "
        "(torch.use_deterministic_algorithms)"
    )


def kernel_refusals(header: Header, facts: DeviceFacts) -> list[str | None]:
    """Returns per kernel the reason why a device that can use its bundle cannot launch it, or None.

    ``header.kernels`` come first, at their indices, then the unknown ones.
    """

    def misfit(kernel: Kernel) -> str | None:
        library = facts.runtime_library
        if facts.capability is None or library is None:  # CPU kernels need no library
            return None
        return imports_refusal(header, kernel, library, facts.ffi_exports)

    return [
        *(
            unlaunchable(kernel)
            or timing_refusal(kernel, facts.wants_determinism)
            or misfit(kernel)
            for kernel in header.kernels
        ),
        *(kernel.why for kernel in header.unknown_kernels),
    ]


def describe_fault(error: Exception) -> str:
    """Describes why a bundle that raised this error is excluded."""
    if isinstance(error, NvgemmError):
        return str(error)
    return (
        f"internal error, {type(error).__name__}: {one_line(str(error)) or 'no message'}; "
        "please report it with the bundle"
    )


def needs_compact(calling_convention: str) -> bool:
    """Returns True if this calling convention passes no strides, so operands must be compact."""
    convention = parse_calling_convention(calling_convention)
    return convention is not None and convention.needs_compact


def refusal(header: Header, facts: DeviceFacts) -> str | None:
    """Returns why a device cannot run a bundle's kernels, or None."""
    target = header.target
    reason = _unknown_refusal(target) or _platform_refusal(target, facts.platform)
    if reason is not None:
        return reason
    reason = device_refusal(target, facts)
    if reason is not None or facts.capability is None:
        return reason
    reason = _cuda_refusal(target, facts.cuda)
    if reason is None:
        reason = library_refusal(header, facts.runtime_library, facts.ffi_exports)
    return reason


def device_refusal(target: Target, facts: DeviceFacts) -> str | None:
    """Returns why a target is for another device than this one, or None.

    An unknown target is never refused here.
    """
    if isinstance(target, UnknownTarget):
        return None
    if (target.arch == CPU) != (facts.kind == "cpu"):
        return f"built for {target.arch}, this device is {describe_device(facts)}"
    if facts.capability is not None and not target.runs_on(facts.capability):
        return f"{target.arch} kernels do not run on {describe_device(facts)}"
    return None


def process_refusal(target: Target, platform: str, cuda: str | None) -> str | None:
    """Returns why no device in a process can run a target's kernels, or None.

    ``cuda`` is torch's; a CPU build has None and has no GPU to refuse.
    """
    reason = _unknown_refusal(target) or _platform_refusal(target, platform)
    if reason is None and target.arch != CPU and cuda is not None:
        return _cuda_refusal(target, cuda)
    return reason


def _unknown_refusal(target: Target) -> str | None:
    if not isinstance(target, UnknownTarget):
        return None
    return f"target {target.key} is unknown to this release; {UPGRADE}"


def _platform_refusal(target: Target, platform: str) -> str | None:
    if target.platform == platform:
        return None
    mismatch = f"built for platform {target.platform}, this is {platform}"
    if platform not in PLATFORMS:
        return mismatch
    return f"{mismatch}; install its wheel for {platform}, or build for platform: {platform}"


def _cuda_refusal(target: Target, cuda: str | None) -> str | None:
    if target.cuda == cuda:
        return None
    mismatch = f"built for {target.cuda}, torch uses {cuda or 'no CUDA'}"
    torch_for = f"install a torch for CUDA {target.cuda[2:]}"
    if cuda not in CUDA_VERSIONS:
        return f"{mismatch}; {torch_for}"
    return f"{mismatch}; build for cuda: {cuda}, or {torch_for}"


def library_refusal(
    header: Header, library: RuntimeLibrary | None, ffi_exports: frozenset[str] | None
) -> str | None:
    """Returns why no kernel in a bundle loads with the installed libraries, or None.

    Exported symbols decide, whatever the library versions.
    """
    if library is None:
        return (
            f"{RUNTIME_LIBRARY} for {header.target.cuda}, which kernels call, is not installed; "
            f"run: {library_install_command(header.target.cuda)}"
        )
    if library.defect is not None:
        return (
            f"{library.path}, which kernels call, cannot be loaded: {library.defect}; "
            f"run: {reinstall_command(library)}"
        )
    reasons = [imports_refusal(header, kernel, library, ffi_exports) for kernel in header.kernels]
    if None in reasons:
        return None
    return "; ".join(dict.fromkeys(map(str, reasons))) or None  # each once


def imports_refusal(
    header: Header,
    kernel: Kernel,
    library: RuntimeLibrary,
    ffi_exports: frozenset[str] | None,
) -> str | None:
    """Returns the symbols that a kernel imports and the installed libraries lack, or None.

    Exports of None are unknown, and count as complete.
    """
    imports = needed_symbols(header, kernel)
    for exports, imported, name, version in (
        (library.exports, imports.device, library_distribution(header), library.version),
        (ffi_exports, imports.ffi, _FFI_DISTRIBUTION, None),
    ):
        missing = sorted(imported - exports) if exports is not None else []
        if missing:
            installed = name if version in (None, UNKNOWN_VERSION) else f"{name} {version}"
            return (
                f"kernels import {', '.join(missing)}, which the installed {installed} does not "
                f"export; run: pip install '{name}{_version_bound(header, name, missing)}'"
            )
    return None


def library_install_command(cuda: str) -> str:
    """Returns the command that installs the library for a CUDA version such as ``cu12``."""
    bound = _RANGE if cuda in CUDA_VERSIONS else ""  # newer CUDA needs a newer nvgemm-aot
    return f"pip install 'nvidia-cutlass-dsl-libs-{cuda}{bound}'"


def reinstall_command(library: RuntimeLibrary) -> str:
    """Returns the command that reinstalls a damaged library, in the same release if known."""
    bound = _RANGE if library.version == UNKNOWN_VERSION else f"=={library.version}"
    distribution = f"nvidia-cutlass-dsl-libs-{library.cuda}"
    return f"pip install --force-reinstall --no-deps '{distribution}{bound}'"


def untested_version_warning(library: RuntimeLibrary) -> str | None:
    """Returns a warning for a library newer than any that kernels were tested with, or None."""
    numbers = version_numbers(library.version)
    if numbers[:2] <= NEWEST_RUN:
        return None
    newest = ".".join(map(str, NEWEST_RUN))
    return (
        f"{library.path} is version {library.version}, newer than {newest}, the newest that "
        "kernels were run with: it exports all symbols that they import, but is untested; "
        f"{UPGRADE}, or run: pip install 'nvidia-cutlass-dsl-libs-{library.cuda}"
        f"=={newest}.*'"
    )


def _version_bound(header: Header, distribution: str, missing: list[str]) -> str:
    """Returns the distribution versions that export missing symbols, such as ``>=4.7``.

    If unknown, returns the tested runtime library range; empty for TVM-FFI.
    """
    since = [FIRST_RELEASE.get(name) for name in missing]
    if None not in since:
        return f">={max(map(str, since), key=version_numbers)}"
    built_with = header.toolchain.get(distribution)
    if built_with is None:
        return "" if distribution == _FFI_DISTRIBUTION else _RANGE
    return f">={built_with}"


def library_distribution(header: Header) -> str:
    """Returns the distribution name for the library that a bundle's kernels call."""
    return f"nvidia-cutlass-dsl-libs-{header.target.cuda}"


def describe_device(facts: DeviceFacts) -> str:
    """Describes a device for messages."""
    if facts.capability is None:
        return facts.name
    return f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}"


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns a version's leading numbers, for comparisons: ``4.8.1.dev0`` gives (4, 8, 1)."""
    leading: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        leading.append(int(part))
    return tuple(leading)
