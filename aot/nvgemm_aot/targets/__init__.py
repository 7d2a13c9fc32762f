"""The targets that can be built for, and the GPU product each is tuned for by default.

May import no other room of this package. The table of architectures is
`nvgemm_runtime.gemm.target.ARCHITECTURES`; `build_target` joins one with a device profile.
`profile` reads the profiles (``profiles/``), and `local` makes one for a GPU of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import ARCHITECTURES, CUDA_VERSIONS, PLATFORMS, Target

from .profile import DeviceProfile, load_profile, profile_names

DEFAULT_DEVICE = {arch: row.device for arch, row in ARCHITECTURES.items()}
"""By architecture: the device profile of targets for x86-64 that name none."""


def usual_device(arch: str, platform: str) -> str:
    """Name of the device profile of a target that names none: the GPU beside such processors.

    Raises:
        KeyError: If the architecture is not built for.
    """
    row = ARCHITECTURES[arch]
    return row.device if platform == PLATFORMS[0] else row.device_on_arm or row.device


def usual_devices(arch: str, platform: str) -> tuple[str, ...]:
    """Names of the device profiles of a target that names none.

    The usual one comes first, then all others whose own architecture and host platform are the
    target's.

    Raises:
        KeyError: If the architecture is not built for.
    """
    usual, capability = usual_device(arch, platform), Target(arch=arch).capability
    others = (load_profile(name) for name in profile_names() if name != usual)
    return (
        usual,
        *(one.name for one in others if (one.capability, one.platform) == (capability, platform)),
    )


@dataclass(frozen=True, kw_only=True)
class BuildTarget:
    """A target, and the GPU product whose numbers kernels are chosen and compiled with."""

    target: Target
    device: DeviceProfile


def build_target(
    arch: str,
    device: str | None = None,
    *,
    platform: str | None = None,
    cuda: str = Target.cuda,
) -> BuildTarget:
    """Resolve an architecture, and optionally a device profile's name, to a target.

    Args:
        arch: Architecture, e.g. ``sm_90a``.
        device: Name of a device profile; by default the usual one of architecture and platform.
        platform: Host platform, of `PLATFORMS`; by default that of the device, if one is named,
            else x86-64.
        cuda: CUDA major version, of `CUDA_VERSIONS`.

    Raises:
        TargetError: If the architecture, platform or CUDA version is not built for, the profile
            does not exist, or the device cannot run that architecture's kernels.
    """
    if arch not in DEFAULT_DEVICE:
        raise TargetError(
            f"no provider builds for target {arch!r} (known: {', '.join(sorted(DEFAULT_DEVICE))})"
        )
    if platform is None:
        platform = load_profile(device).platform if device else Target.platform
    for what, found, known in (
        ("platform", platform, PLATFORMS),
        ("CUDA version", cuda, CUDA_VERSIONS),
    ):
        if found not in known:
            raise TargetError(
                f"target {arch}: nothing is built for {what} {found!r} (known: {', '.join(known)})"
            )
    target = Target(arch=arch, platform=platform, cuda=cuda)
    usual = usual_device(arch, platform)
    profile = load_profile(device or usual)
    if not target.runs_on(profile.capability):
        major, minor = profile.capability
        raise TargetError(
            f"target {arch}: device {profile.name} has compute capability {major}.{minor} "
            f"and cannot run {arch} kernels; leave the device out for {usual}"
        )
    return BuildTarget(target=target, device=profile)


def build_targets(
    arch: str,
    devices: Sequence[str] = (),
    *,
    platform: str | None = None,
    cuda: str = Target.cuda,
) -> tuple[BuildTarget, ...]:
    """Resolve an architecture and several device profiles to one target, once for each device.

    Args:
        arch: Architecture, e.g. ``sm_90a``.
        devices: Names of device profiles; by default `usual_devices`.
        platform: Host platform; by default that of the devices, if any are named, else x86-64.
        cuda: CUDA major version.

    Raises:
        TargetError: As `build_target`, or if devices are of different host platforms.
    """
    if not devices:
        usual = build_target(arch, platform=platform, cuda=cuda)
        devices = usual_devices(arch, usual.target.platform)
        platform = usual.target.platform
    found = tuple(build_target(arch, one, platform=platform, cuda=cuda) for one in devices)
    platforms = {one.device.platform: one.device.name for one in found}
    if len(platforms) > 1:
        named = " and ".join(f"{name} ({host})" for host, name in platforms.items())
        raise TargetError(
            f"target {arch}: devices {named} are of different host platforms; allowed: devices of "
            "one platform; write a target for each platform"
        )
    return found
