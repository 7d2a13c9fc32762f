"""The targets that can be built for, and the GPU product each is tuned for by default.

May import no other room of this package. The table of architectures is
`nvgemm_runtime.gemm.target.ARCHITECTURES`; `build_target` joins one with a device profile.
`profile` reads the profiles (``profiles/``), and `local` makes one for a GPU of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import ARCHITECTURES, Target

from .profile import DeviceProfile, load_profile

DEFAULT_DEVICE = {arch: row.device for arch, row in ARCHITECTURES.items()}
"""By architecture: the device profile of manifests that name none."""


@dataclass(frozen=True, kw_only=True)
class BuildTarget:
    """A target, and the GPU product whose numbers kernels are chosen and compiled with."""

    target: Target
    device: DeviceProfile


def build_target(arch: str, device: str | None = None) -> BuildTarget:
    """Resolve an architecture, and optionally a device profile's name, to a target.

    Raises:
        TargetError: If the architecture is not buildable, the profile does not exist, or the
            device cannot run that architecture's kernels.
    """
    if arch not in DEFAULT_DEVICE:
        raise TargetError(
            f"no provider builds for target {arch!r} (known: {', '.join(sorted(DEFAULT_DEVICE))})"
        )
    target = Target(arch=arch)
    profile = load_profile(device or DEFAULT_DEVICE[arch])
    if not target.runs_on(profile.capability):
        major, minor = profile.capability
        raise TargetError(
            f"target {arch}: device {profile.name} has compute capability {major}.{minor} "
            f"and cannot run {arch} kernels; leave the device out for {DEFAULT_DEVICE[arch]}"
        )
    return BuildTarget(target=target, device=profile)
