"""Build targets: GPU architecture, host platform and CUDA version."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import TargetError
from .types import Mma

CPU = "cpu"
"""Architecture for kernels that run on the host; no built-in provider builds any."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts about a GPU architecture that kernels are built for.

    Attributes:
        mma: Tensor-core instruction that its kernels multiply with.
        device: Default device profile to tune for.
        device_on_arm: Default device profile on Arm hosts, if different.
        recorded_on: Compute capability (major, minor) whose GEMMs are recorded for it; None if
            another architecture's kernels run on all its GPUs.
        narrow_layouts: Layouts for operands with 8 bits or fewer; empty for all layouts.
        has_block_scales: True if providers list block-scaled operators that compile.
        has_mixed_fp8: True if a provider multiplies two fp8 dtypes.
        default_has_groups: True if the default provider has grouped operators.
        default_has_epilogues: True if the default provider applies epilogues and fp32 scales.
        aliases: Other names, for suggestions in error messages.
    """

    mma: Mma
    device: str
    device_on_arm: str = ""
    recorded_on: tuple[int, int] | None = None
    narrow_layouts: tuple[str, ...] = ()
    has_block_scales: bool = True
    has_mixed_fp8: bool = False
    default_has_groups: bool = True
    default_has_epilogues: bool = True
    aliases: tuple[str, ...] = ()


ARCHITECTURES = {
    "sm_90a": Architecture(
        mma=Mma.WGMMA,
        device="H200",
        recorded_on=(9, 0),
        narrow_layouts=("tn",),
        has_block_scales=False,
        has_mixed_fp8=True,
        default_has_groups=False,
        default_has_epilogues=False,
        aliases=("sm90", "h100", "h200", "hopper"),
    ),
    "sm_100f": Architecture(
        mma=Mma.TCGEN05,
        device="B200",
        device_on_arm="GB200",
        recorded_on=(10, 0),
        aliases=("sm100", "sm103", "b200", "gb200", "blackwell", "b300", "gb300"),
    ),
    "sm_100a": Architecture(
        mma=Mma.TCGEN05, device="B200", device_on_arm="GB200", aliases=("sm100",)
    ),
    "sm_103a": Architecture(
        mma=Mma.TCGEN05,
        device="GB300",
        recorded_on=(10, 3),
        aliases=("sm103", "b300", "gb300"),
    ),
}
"""Supported architectures. For an ambiguous alias, earlier rows are suggested first.

No code may compare architectures: it reads a column here, or keys a table by one.
"""

DEFAULT_ARCHITECTURE = "sm_100f"
"""Architecture to build for by default."""

PLATFORMS = ("linux_x86_64", "linux_aarch64")
"""Supported host platforms, default first."""

CUDA_VERSIONS = ("cu13", "cu12")
"""Supported CUDA major versions, default first."""

_ARCH = re.compile(r"sm_([1-9][0-9]{1,2})([af]?)")


@dataclass(frozen=True, kw_only=True, order=True)
class Target:
    """GPU architecture, host platform and CUDA major version.

    Attributes:
        arch: Compiler architecture name. ``sm_90a`` runs on exactly that compute capability,
            ``sm_100f`` on its family (10.0, 10.3), ``sm_80`` on it and all newer ones; ``cpu`` on
            the host.
        platform: Host platform, e.g. ``linux_x86_64``.
        cuda: CUDA major version for the compiler and the runtime library that kernels call, e.g.
            ``cu13``.
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
        """Architecture if platform and CUDA version are the defaults, else the full key."""
        is_usual = (self.platform, self.cuda) == (PLATFORMS[0], CUDA_VERSIONS[0])
        return self.arch if is_usual else self.key

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor) in ``arch``; (0, 0) for ``cpu``."""
        if self.arch == CPU:
            return 0, 0
        digits = int(self._match[1])
        return digits // 10, digits % 10

    @property
    def suffix(self) -> str:
        """``a`` (this capability only), ``f`` (its family) or empty (it and everything newer)."""
        return "" if self.arch == CPU else self._match[2]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Returns True if a GPU with this compute capability (major, minor) runs the kernels."""
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
    """User's name for a target: an architecture and optional further parts.

    Attributes:
        arch: Architecture, from `ARCHITECTURES`.
        platform: Host platform, from `PLATFORMS`; None if omitted.
        cuda: CUDA major version, from `CUDA_VERSIONS`; None if omitted.
    """

    arch: str
    platform: str | None = None
    cuda: str | None = None

    @classmethod
    def parse(cls, text: str) -> TargetName:
        """Parses ``sm_90a``, ``sm_90a-cu12``, ``sm_90a-linux_aarch64`` or a full key.

        Raises:
            ValueError: If the text is none of these, or names an unsupported part; lists allowed
                names.
        """
        match = _TARGET_NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"allowed: {ALLOWED_TARGET_NAMES}")
        return cls(arch=match["arch"], platform=match["platform"], cuda=match["cuda"])

    @property
    def text(self) -> str:
        """Text that `parse` reads."""
        return "-".join(filter(None, (self.arch, self.platform, self.cuda)))

    def resolve(self, *, platform: str | None, cuda: str | None) -> Target:
        """Returns the target; ``platform`` and ``cuda`` fill in omitted parts.

        An unsupported or missing value becomes the default.
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
"""`ARCHITECTURES` in numeric order, ``sm_90a`` first."""


def architecture(arch: str) -> Architecture:
    """Returns an architecture's row.

    Raises:
        TargetError: If it has none; the message lists those that do.
    """
    row = ARCHITECTURES.get(arch)
    if row is None:
        raise TargetError(
            f"unknown architecture {arch!r} (known: {', '.join(ORDERED_ARCHITECTURES)})"
        )
    return row


MMA_BY_MAJOR = {Target(arch=arch).capability[0]: row.mma for arch, row in ARCHITECTURES.items()}
"""Tensor-core instruction by major compute capability, for code that was built elsewhere."""

ALLOWED_TARGET_NAMES = (
    f"{', '.join(ORDERED_ARCHITECTURES)}; each alone, or with "
    f"a platform ({', '.join(PLATFORMS)}), a CUDA version ({', '.join(CUDA_VERSIONS)}) or both, "
    "such as sm_90a-linux_aarch64-cu12"
)
"""Names that `TargetName.parse` accepts, for messages."""


@dataclass(frozen=True, kw_only=True, order=True)
class UnknownTarget(Target):
    """Target in a form that this release does not know; its kernels run nowhere."""

    def __post_init__(self) -> None:
        """Accepts any text."""

    @property
    def capability(self) -> tuple[int, int]:
        """Always (0, 0)."""
        return 0, 0

    @property
    def suffix(self) -> str:
        """Always empty."""
        return ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Returns False."""
        return False


def read_target(*, arch: str, platform: str, cuda: str) -> Target:
    """Returns a target, or an `UnknownTarget` if a part has an unknown form."""
    try:
        return Target(arch=arch, platform=platform, cuda=cuda)
    except ValueError:
        return UnknownTarget(arch=arch, platform=platform, cuda=cuda)
