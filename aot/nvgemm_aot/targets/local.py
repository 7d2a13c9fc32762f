"""Makes device profiles for the GPUs in this machine.

A build for another machine takes its numbers from shipped profiles. Here the driver gives the
product's name, its multiprocessors and its shared memory, so kernels can also be compiled for a GPU
without a shipped profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import (
    CPU,
    CUDA_VERSIONS,
    DEFAULT_ARCHITECTURE,
    PLATFORMS,
    Target,
)
from nvgemm_runtime.matching.device import host_platform

from . import DEFAULT_DEVICE, BuildTarget, default_device
from .profile import DeviceProfile, Fact, load_profile, profile_names

_DRIVER = "read from the driver of this machine"

_NONE = Fact(value=1, basis="estimated", source="a CPU has none; nothing is computed from it")

CPU_PROFILE = DeviceProfile(
    name=CPU,
    driver_name=CPU,
    capability=(0, 0),
    platform=host_platform(),
    heuristics_gpu="none",
    sm_count=_NONE,
    shared_memory_per_block_bytes=_NONE,
    registers_per_thread=_NONE,
    max_active_clusters={},
)
"""Profile for the host itself, used by CPU kernel providers."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device as described by the process that uses it; fields as in `DeviceFacts`.

    Attributes:
        shared_memory_bytes: Most shared memory that a thread block can opt in to, or None if
            unknown.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None
    multiprocessors: int | None
    shared_memory_bytes: int | None
    platform: str
    cuda: str | None

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Device:
        """Reads the document that `nvgemm_runtime.jit.client` writes."""
        capability = document["capability"]
        return cls(**{**document, "capability": None if capability is None else tuple(capability)})


def targets_for(device: Device) -> tuple[BuildTarget, ...]:
    """Returns the targets whose kernels a device runs, in the order in which to try them.

    A family's target comes first, because its kernels serve more devices. Some operators exist only
    for one exact architecture.

    Raises:
        TargetError: If nothing can be built for the device.
    """
    if device.kind == CPU:
        return (BuildTarget(target=Target(arch=CPU, platform=device.platform), device=CPU_PROFILE),)
    for kind, value, built in (
        ("platform", device.platform, PLATFORMS),
        ("CUDA version of torch", device.cuda, CUDA_VERSIONS),
    ):
        if value not in built:
            known = " and ".join(built)
            raise TargetError(f"{kind} {value}: kernels are compiled for {known} only")
    assert device.cuda is not None  # it is in `CUDA_VERSIONS`
    usual = Target(arch=DEFAULT_ARCHITECTURE, platform=device.platform, cuda=device.cuda)
    capability = device.capability
    fitting = [
        arch
        for arch in sorted(DEFAULT_DEVICE)
        if capability is not None and Target(arch=arch).runs_on(capability)
    ]
    if not fitting:
        raise TargetError(
            f"{device.name}, compute capability {_capability_text(capability)}: kernels are "
            f"compiled for {', '.join(sorted(DEFAULT_DEVICE))} only"
        )
    profile = profile_of(device)
    family_first = sorted(fitting, key=lambda arch: Target(arch=arch).suffix != "f")
    return tuple(
        BuildTarget(target=replace(usual, arch=arch), device=profile) for arch in family_first
    )


def profile_of(device: Device) -> DeviceProfile:
    """Returns a GPU's profile: the shipped one if name and driver agree, else a derived one.

    Raises:
        TargetError: If no shipped profile has its compute capability.
    """
    same_capability = [
        profile
        for profile in map(load_profile, profile_names())
        if profile.capability == device.capability
    ]
    if not same_capability:
        raise TargetError(
            f"{device.name}: no device profile has compute capability "
            f"{_capability_text(device.capability)}"
        )
    same_name = [profile for profile in same_capability if profile.driver_name == device.name]
    usual = {default_device(arch, device.platform) for arch in DEFAULT_DEVICE}
    default = [profile for profile in same_capability if profile.name in usual]
    base = [*same_name, *default, *same_capability][0]
    return base if same_name and _agrees(base, device) else _derive(base, device)


def _agrees(profile: DeviceProfile, device: Device) -> bool:
    return profile.sm_count.value == device.multiprocessors and (
        device.shared_memory_bytes in (None, profile.shared_memory_per_block_bytes.value)
    )


def _derive(base: DeviceProfile, device: Device) -> DeviceProfile:
    """Derives the profile for another product with the same capability from the driver's numbers.

    The number of concurrent clusters depends on how multiprocessors are grouped, which the driver
    does not report. The base's number is scaled and rounded down: too small a number leaves
    multiprocessors idle, too large a number costs balance.
    """
    count = device.multiprocessors
    if not count:
        raise TargetError(f"{device.name}: the driver reports no number of multiprocessors")
    memory = device.shared_memory_bytes
    rule = f"{base.name}'s number times {count} of {base.sm_count.value} SMs, rounded down"
    return replace(
        base,
        name=device.name,
        driver_name=device.name,
        sm_count=Fact(value=count, basis="measured", source=_DRIVER),
        shared_memory_per_block_bytes=base.shared_memory_per_block_bytes
        if memory is None
        else Fact(value=memory, basis="measured", source=_DRIVER),
        max_active_clusters={
            size: Fact(value=count, basis="measured", source=f"{_DRIVER}: one block an SM")
            if size == 1
            else Fact(
                value=max(1, min(fact.value * count // base.sm_count.value, count // size)),
                basis="estimated",
                source=rule,
            )
            for size, fact in base.max_active_clusters.items()
        },
    )


def _capability_text(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
