"""Build targets, and the GPU product that each is tuned for by default.

May import no other room of this package. The table of architectures is
`nvgemm_runtime.gemm.target.ARCHITECTURES`; `build_target` joins an architecture with a device
profile. `profile` reads the profiles (``profiles/``), and `local` makes one for a GPU in this
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import ARCHITECTURES, CUDA_VERSIONS, PLATFORMS, Target

from .profile import DeviceProfile, load_profile, profile_names

DEFAULT_DEVICE = {arch: row.device for arch, row in ARCHITECTURES.items()}
"""Default device profile by architecture, for x86-64 targets that name none."""


def default_device(arch: str, platform: str) -> str:
    """Returns the default device profile's name: the GPU that is sold with this host platform.

    Raises:
        KeyError: If no provider builds for the architecture.
    """
    row = ARCHITECTURES[arch]
    return row.device if platform == PLATFORMS[0] else row.device_on_arm or row.device


def default_devices(arch: str, platform: str) -> tuple[str, ...]:
    """Returns the device profile names for a target that names none.

    The default comes first, then all others with the target's own architecture and host platform.

    Raises:
        KeyError: If no provider builds for the architecture.
    """
    usual, capability = default_device(arch, platform), Target(arch=arch).capability
    others = (load_profile(name) for name in profile_names() if name != usual)
    return (
        usual,
        *(
            profile.name
            for profile in others
            if (profile.capability, profile.platform) == (capability, platform)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class BuildTarget:
    """A target with the GPU product whose numbers kernels are chosen and compiled with."""

    target: Target
    device: DeviceProfile


def build_target(
    arch: str,
    device: str | None = None,
    *,
    platform: str | None = None,
    cuda: str = Target.cuda,
) -> BuildTarget:
    """Resolves an architecture, and optionally a device profile's name, to a target.

    Args:
        arch: Architecture, e.g. ``sm_90a``.
        device: Device profile's name; by default the usual one for architecture and platform.
        platform: Host platform, from `PLATFORMS`; by default the device's, or x86-64 if no device
            is named.
        cuda: CUDA major version, from `CUDA_VERSIONS`.

    Raises:
        TargetError: If no provider builds for the architecture, platform or CUDA version, the
            profile does not exist, or the device cannot run that architecture's kernels.
    """
    if arch not in DEFAULT_DEVICE:
        raise TargetError(
            f"no provider builds for target {arch!r} (known: {', '.join(sorted(DEFAULT_DEVICE))})"
        )
    if platform is None:
        platform = load_profile(device).platform if device else Target.platform
    for kind, value, known in (
        ("platform", platform, PLATFORMS),
        ("CUDA version", cuda, CUDA_VERSIONS),
    ):
        if value not in known:
            raise TargetError(
                f"target {arch}: no provider builds for {kind} {value!r} "
                f"(known: {', '.join(known)})"
            )
    target = Target(arch=arch, platform=platform, cuda=cuda)
    usual = default_device(arch, platform)
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
    """Resolves an architecture and several device profiles to one target, once per device.

    Args:
        arch: Architecture, e.g. ``sm_90a``.
        devices: Device profile names; by default `default_devices`.
        platform: Host platform; by default the devices', or x86-64 if no device is named.
        cuda: CUDA major version.

    Raises:
        TargetError: See `build_target`; also if the devices have different host platforms.
    """
    if not devices:
        usual = build_target(arch, platform=platform, cuda=cuda)
        devices = default_devices(arch, usual.target.platform)
        platform = usual.target.platform
    targets = tuple(build_target(arch, device, platform=platform, cuda=cuda) for device in devices)
    platforms = {target.device.platform: target.device.name for target in targets}
    if len(platforms) > 1:
        listed = " and ".join(f"{name} ({host})" for host, name in platforms.items())
        raise TargetError(
            f"target {arch}: devices {listed} are of different host platforms; allowed: devices of "
            "one platform; write a target for each platform"
        )
    return targets
