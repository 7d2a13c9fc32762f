"""Why kernels cannot be used: by this release, in this process, or on one of its devices."""

from __future__ import annotations

from .calling_convention import KNOWN_FORM, parse_calling_convention
from .errors import NvgemmError
from .facts import RUNTIME_LIBRARY, UNKNOWN_VERSION, DeviceFacts, RuntimeLibrary
from .format import Header, Kernel
from .header_decoder import UPGRADE
from .one_line import one_line
from .target import CPU, Target, UnknownTarget


def unlaunchable(kernel: Kernel) -> str | None:
    """Why this release cannot launch a kernel, whatever the device, or None."""
    convention = parse_calling_convention(kernel.calling_convention)
    if convention is None:
        return (
            f"calling convention {kernel.calling_convention!r}, this release calls {KNOWN_FORM}; "
            f"{UPGRADE}"
        )
    misfit = convention.misfit(kernel.signature, kernel.workspace_bytes)
    return misfit and f"calling convention {kernel.calling_convention!r}: {misfit}"


def left_out(header: Header) -> list[str | None]:
    """Why this release cannot launch each kernel of a bundle, or None; unknown kernels last."""
    return [
        *(unlaunchable(kernel) for kernel in header.kernels),
        *(kernel.why for kernel in header.unknown_kernels),
    ]


def describe_fault(error: Exception) -> str:
    """Why a bundle cannot be used with which something went wrong, foreseen or not."""
    if isinstance(error, NvgemmError):
        return str(error)
    return (
        f"internal error, {type(error).__name__}: {one_line(str(error)) or 'no message'}; "
        "please report it with the bundle"
    )


def needs_compact(calling_convention: str) -> bool:
    """Whether kernels that are so called take operands without gaps alone: they get no strides."""
    convention = parse_calling_convention(calling_convention)
    return convention is not None and convention.needs_compact


def refusal(header: Header, facts: DeviceFacts) -> str | None:
    """Why a device cannot run a bundle's kernels, or None."""
    target = header.target
    if isinstance(target, UnknownTarget):
        return f"target {target.key} is unknown to this release; {UPGRADE}"
    reason = _platform_refusal(target, facts.platform)
    if reason is not None:
        return reason
    if (target.arch == CPU) != (facts.kind == "cpu"):
        return f"built for {target.arch}, this device is {describe(facts)}"
    if facts.capability is None:
        return None
    if not target.runs_on(facts.capability):
        return f"{target.arch} kernels do not run on {describe(facts)}"
    reason = _cuda_refusal(target, facts.cuda)
    return library_refusal(header, facts.runtime_library) if reason is None else reason


def process_refusal(target: Target, platform: str, cuda: str | None) -> str | None:
    """Why no device of a process can run a target's kernels, or None.

    Args:
        target: What the kernels were built for.
        platform: Of the process, e.g. ``linux_x86_64``.
        cuda: CUDA major version that torch was built for; None for a CPU build, which shows no GPU
            that could be refused.
    """
    reason = _platform_refusal(target, platform)
    if reason is None and target.arch != CPU and cuda is not None:
        return _cuda_refusal(target, cuda)
    return reason


def _platform_refusal(target: Target, platform: str) -> str | None:
    if target.platform == platform:
        return None
    return f"built for platform {target.platform}, this is {platform}"


def _cuda_refusal(target: Target, cuda: str | None) -> str | None:
    if target.cuda == cuda:
        return None
    return f"built for {target.cuda}, torch uses {cuda or 'no CUDA'}"


def library_refusal(header: Header, library: RuntimeLibrary | None) -> str | None:
    """Why a bundle's kernels cannot use the installed library that they call, or None.

    A library of unknown version is none: see `unknown_version_warning`.
    """
    distribution = library_distribution(header)
    if library is None:
        return (
            f"{RUNTIME_LIBRARY} for {header.target.cuda}, which kernels call, is not installed; "
            f"run: pip install {distribution}"
        )
    built_with = header.toolchain.get(distribution)
    if built_with is None or library.version == UNKNOWN_VERSION:
        return None
    if not _compatible(built_with, library.version):
        return (
            f"built with {distribution} {built_with}, {library.version} is installed: versions "
            "must agree in major and minor, and the installed one must not be older; "
            f"run: pip install '{distribution}>={built_with}'"
        )
    return None


def unknown_version_warning(header: Header, library: RuntimeLibrary) -> str | None:
    """What to say of a library that is used though nothing tells its version, or None."""
    distribution = library_distribution(header)
    built_with = header.toolchain.get(distribution)
    if built_with is None or library.version != UNKNOWN_VERSION:
        return None
    return (
        f"{library.path} is of unknown version, for {distribution} has no metadata here; kernels "
        f"were built with {built_with}, and another minor or an older version may crash; "
        f"run: pip install '{distribution}>={built_with}'"
    )


def library_distribution(header: Header) -> str:
    """Distribution of the library that a bundle's kernels call; its toolchain names its version."""
    return f"nvidia-cutlass-dsl-libs-{header.target.cuda}"


def describe(facts: DeviceFacts) -> str:
    """A device in words."""
    if facts.capability is None:
        return facts.name
    return f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}"


def _compatible(built_with: str, installed: str) -> bool:
    built, found = version_numbers(built_with), version_numbers(installed)
    return built[:2] == found[:2] and found >= built


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: ``4.8.1.dev0`` gives (4, 8, 1)."""
    leading: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        leading.append(int(part))
    return tuple(leading)
