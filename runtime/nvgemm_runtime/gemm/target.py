"""Targets: what a bundle's kernels were compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass

CPU = "cpu"
"""Architecture of kernels that run on the host itself; no provider of the product builds any."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is known of an architecture that is built for.

    Attributes:
        device: Profile of the GPU product that it is tuned for by default.
        device_on_arm: That of the product beside Arm processors, where it is another one.
        recorded_on: Compute capability (major, minor) of the GPUs whose GEMMs are recorded for it;
            None where another architecture's kernels run on all of them.
        narrow_layouts: Layouts in which it multiplies values of 8 bits and fewer; empty for all.
        has_block_scales: Whether there are operators with them: what the providers list for it, and
            what of that compiles.
        grouped_provider: Name of the provider of groups, where the usual one has none; empty where
            it has some.
        epilogue_provider: Name of the provider of epilogues and of fp32 scales, where the usual one
            has neither; empty where it has both.
        mixed_fp8_provider: Name of the provider that multiplies fp8 of two types; empty where none
            does.
        aliases: What people call it who look for its name.
    """

    device: str
    device_on_arm: str = ""
    recorded_on: tuple[int, int] | None = None
    narrow_layouts: tuple[str, ...] = ()
    has_block_scales: bool = True
    grouped_provider: str = ""
    epilogue_provider: str = ""
    mixed_fp8_provider: str = ""
    aliases: tuple[str, ...] = ()


ARCHITECTURES = {
    "sm_90a": Architecture(
        device="H200",
        recorded_on=(9, 0),
        narrow_layouts=("tn",),
        has_block_scales=False,
        grouped_provider="quack",
        epilogue_provider="quack",
        mixed_fp8_provider="quack",
        aliases=("sm90", "h100", "h200", "hopper"),
    ),
    "sm_100f": Architecture(
        device="B200",
        device_on_arm="GB200",
        recorded_on=(10, 0),
        aliases=("sm100", "sm103", "b200", "gb200", "blackwell", "b300", "gb300"),
    ),
    "sm_100a": Architecture(device="B200", device_on_arm="GB200", aliases=("sm100",)),
    "sm_103a": Architecture(
        device="GB300", recorded_on=(10, 3), aliases=("sm103", "b300", "gb300")
    ),
}
"""What can be built for. Where a name may mean several, the first is suggested first."""

DEFAULT_ARCHITECTURE = "sm_100f"
"""What to build for where nothing says."""

PLATFORMS = ("linux_x86_64", "linux_aarch64")
"""Host platforms that are built for, the usual one first."""

CUDA_VERSIONS = ("cu13", "cu12")
"""CUDA major versions that are built for, the usual one first."""

_ARCH = re.compile(r"sm_([1-9][0-9]{1,2})([af]?)")


@dataclass(frozen=True, kw_only=True, order=True)
class Target:
    """GPU architecture, host platform and CUDA major version.

    Attributes:
        arch: Architecture as the compiler names it: ``sm_90a`` runs on exactly that compute
            capability, ``sm_100f`` on its family (10.0, 10.3), ``sm_80`` on it and all newer;
            ``cpu`` on the host.
        platform: Host platform, e.g. ``linux_x86_64``.
        cuda: CUDA major version of the compiler that made the kernels and of the runtime library
            that they call, e.g. ``cu13``.
    """

    arch: str
    platform: str = PLATFORMS[0]
    cuda: str = CUDA_VERSIONS[0]

    def __post_init__(self) -> None:
        if self.arch != CPU and _ARCH.fullmatch(self.arch) is None:
            raise ValueError(
                f"architecture {self.arch!r} is not of the form sm_90a, sm_100f, sm_80"
            )
        if re.fullmatch(r"[a-z]+_[a-z0-9_]+", self.platform) is None:
            raise ValueError(f"platform {self.platform!r} is not of the form linux_x86_64")
        if re.fullmatch(r"cu[1-9][0-9]*", self.cuda) is None:
            raise ValueError(f"CUDA version {self.cuda!r} is not of the form cu13")

    @property
    def key(self) -> str:
        """Canonical text, e.g. ``sm_100f-linux_x86_64-cu13``."""
        return f"{self.arch}-{self.platform}-{self.cuda}"

    @property
    def short_name(self) -> str:
        """The architecture where platform and CUDA version are the usual ones, else the key."""
        is_usual = (self.platform, self.cuda) == (PLATFORMS[0], CUDA_VERSIONS[0])
        return self.arch if is_usual else self.key

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor) that ``arch`` names; (0, 0) for ``cpu``."""
        if self.arch == CPU:
            return 0, 0
        digits = int(self._match[1])
        return digits // 10, digits % 10

    @property
    def suffix(self) -> str:
        """``a`` (this capability only), ``f`` (its family) or empty (it and everything newer)."""
        return "" if self.arch == CPU else self._match[2]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability (major, minor) can run this target's kernels."""
        if self.arch == CPU:
            return False
        if self.suffix == "a":
            return capability == self.capability
        if self.suffix == "f":
            return capability[0] == self.capability[0] and capability >= self.capability
        return capability >= self.capability

    @property
    def _match(self) -> re.Match[str]:
        match = _ARCH.fullmatch(self.arch)
        assert match is not None  # __post_init__ refuses anything else
        return match


@dataclass(frozen=True, kw_only=True)
class TargetName:
    """What a person names of a target: its architecture, and as much of the rest as matters.

    Attributes:
        arch: Architecture, of `ARCHITECTURES`.
        platform: Host platform, of `PLATFORMS`; None where it is not named.
        cuda: CUDA major version, of `CUDA_VERSIONS`; None where it is not named.
    """

    arch: str
    platform: str | None = None
    cuda: str | None = None

    @classmethod
    def parse(cls, text: str) -> TargetName:
        """Read ``sm_90a``, ``sm_90a-cu12``, ``sm_90a-linux_aarch64`` or a whole key.

        Raises:
            ValueError: If it is none of these, or nothing is built for it; says what is allowed.
        """
        match = _TARGET_NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"allowed: {ALLOWED_TARGET_NAMES}")
        return cls(arch=match["arch"], platform=match["platform"], cuda=match["cuda"])

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return "-".join(filter(None, (self.arch, self.platform, self.cuda)))

    def resolve(self, *, platform: str | None, cuda: str | None) -> Target:
        """The target, with this platform and CUDA version where they are not named.

        One that nothing is built for counts as the usual one, and so does None.
        """
        platform, cuda = self.platform or platform, self.cuda or cuda
        return Target(
            arch=self.arch,
            platform=platform if platform in PLATFORMS else PLATFORMS[0],
            cuda=cuda if cuda in CUDA_VERSIONS else CUDA_VERSIONS[0],
        )


_TARGET_NAME = re.compile(
    rf"(?P<arch>{'|'.join(ARCHITECTURES)})"
    rf"(?:-(?P<platform>{'|'.join(PLATFORMS)}))?(?:-(?P<cuda>{'|'.join(CUDA_VERSIONS)}))?"
)

ORDERED_ARCHITECTURES = tuple(sorted(ARCHITECTURES, key=lambda arch: (len(arch), arch)))
"""`ARCHITECTURES` in the order in which people count them: ``sm_90a`` first."""

ALLOWED_TARGET_NAMES = (
    f"{', '.join(ORDERED_ARCHITECTURES)}; each alone, or with "
    f"a platform ({', '.join(PLATFORMS)}), a CUDA version ({', '.join(CUDA_VERSIONS)}) or both, "
    "such as sm_90a-linux_aarch64-cu12"
)
"""What `TargetName.parse` reads, in words."""


@dataclass(frozen=True, kw_only=True, order=True)
class UnknownTarget(Target):
    """A target of a form that this release does not know: nothing here runs its kernels."""

    def __post_init__(self) -> None:
        """Take any text."""

    @property
    def capability(self) -> tuple[int, int]:
        """Nothing."""
        return 0, 0

    @property
    def suffix(self) -> str:
        """Nothing."""
        return ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Never."""
        return False


def read_target(*, arch: str, platform: str, cuda: str) -> Target:
    """A target, or an `UnknownTarget` where a part is not of a known form."""
    try:
        return Target(arch=arch, platform=platform, cuda=cuda)
    except ValueError:
        return UnknownTarget(arch=arch, platform=platform, cuda=cuda)
