"""Names of kernel wheels: their parts, and the wheels in a directory that would clash with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.errors import PackagingError, StorageError
from nvgemm_runtime.installed.discover import DISTRIBUTION_PREFIX

PLATFORM_TAGS = {
    "linux_x86_64": "manylinux_2_28_x86_64",
    "linux_aarch64": "manylinux_2_28_aarch64",
}
"""Platform tag of a wheel, by the target's host platform.

A kernel links only against libtvm_ffi.so and libcute_dsl_runtime.so, without undefined symbols, so
it runs wherever these two do. The narrowest tag among their wheels is that of
nvidia-cutlass-dsl-libs-cu13 and -cu12; a kernel wheel has the same.
"""

_MAX_NAME_CHARACTERS = 180
"""Most characters in a wheel's name and version. File systems allow 255 bytes per file name, which
also contains the tag, and a suffix while the file is written."""


@dataclass(frozen=True, kw_only=True)
class WheelIdentity:
    """Normalised names for a wheel and its package, and the version."""

    distribution: str
    package: str
    version: str

    @property
    def dist_info(self) -> str:
        """Name of the wheel's metadata folder."""
        return f"{self.package}-{self.version}.dist-info"

    def filename(self, tag: str) -> str:
        """Returns the wheel's file name for a platform tag."""
        return f"{self.package}-{self.version}-py3-none-{tag}.whl"


def identify(name: str, version: str) -> WheelIdentity:
    """Normalises a wheel's name and version.

    Raises:
        PackagingError: If no wheel can have them, with the allowed form.
    """
    from packaging.utils import InvalidName, canonicalize_name
    from packaging.version import InvalidVersion, Version

    try:
        distribution = DISTRIBUTION_PREFIX + canonicalize_name(name, validate=True)
    except InvalidName as error:
        raise PackagingError(
            f"wheel name {name!r} is not valid: letters, digits, '-', '_' and '.' are allowed, "
            "with a letter or digit at both ends"
        ) from error
    try:
        normalized = str(Version(version))
    except InvalidVersion as error:
        raise PackagingError(
            f"wheel version {version!r} is not a Python package version, e.g. 1.0 or 2026.1.post1"
        ) from error
    if (length := len(distribution) + len(normalized)) > _MAX_NAME_CHARACTERS:
        raise PackagingError(
            f"wheel {distribution[:40]}… version {normalized[:20]}: name and version have {length} "
            f"characters, at most {_MAX_NAME_CHARACTERS} fit a file's name; shorten them"
        )
    return WheelIdentity(
        distribution=distribution, package=distribution.replace("-", "_"), version=normalized
    )


def refuse_other_versions(directory: Path, identity: WheelIdentity) -> None:
    """Refuses a directory with another version of a kernel wheel or of one of its parts.

    A pattern such as ``nvgemm_kernels_mine-*.whl`` would match both, and pip would then install
    neither.

    Raises:
        PackagingError: If the directory has such a wheel, with its name.
        StorageError: If the directory cannot be listed.
    """
    for name in _wheels_and_parts(directory, identity):
        if name.split("-")[1] != identity.version:
            raise PackagingError(
                f"{directory / name} is another version than {identity.version}, which this "
                "command writes, and pip cannot install both: remove it, or choose another "
                "directory with --out"
            )


def refuse_other_parts(
    directory: Path, identity: WheelIdentity, filenames: Collection[str]
) -> None:
    """Refuses a directory with a part that wheels for the same platform do not belong to.

    Args:
        directory: The wheels' directory.
        identity: Names and version of the first wheel.
        filenames: All wheels to be written.

    Raises:
        PackagingError: If the directory has such a part, with its name.
        StorageError: If the directory cannot be listed.
    """
    tags = {name.rpartition("-")[2] for name in filenames}
    for name in _wheels_and_parts(directory, identity):
        if name not in filenames and name.rpartition("-")[2] in tags:
            raise PackagingError(
                f"{directory / name} is a part of other wheels than those that this command "
                "writes: remove it, or choose another directory with --out"
            )


def _wheels_and_parts(directory: Path, identity: WheelIdentity) -> list[str]:
    """Returns the file names of a kernel wheel and its parts in a directory, sorted."""
    parts = [
        name
        for name in list_wheels(directory, f"{identity.package}_part[0-9]*")
        if re.fullmatch(rf"{identity.package}_part\d+", name.split("-")[0])
    ]
    return [*list_wheels(directory, identity.package), *parts]


def list_wheels(directory: Path, package: str) -> list[str]:
    """Returns the sorted file names of a package's wheels; none if the directory does not exist.

    The package may be a pattern.

    Raises:
        StorageError: If the directory cannot be listed.
    """
    try:
        return sorted(path.name for path in directory.glob(f"{package}-*.whl"))
    except OSError as error:
        raise StorageError(f"{directory}: cannot be listed: {error.strerror}") from error


def platform_tag(headers: Sequence[Header]) -> str:
    """Returns a wheel's platform tag.

    Raises:
        PackagingError: If the bundles' platforms differ or have no tag.
    """
    platforms = sorted({header.target.platform for header in headers})
    if len(platforms) > 1:
        raise PackagingError(
            f"the bundles are for different platforms ({', '.join(platforms)}): "
            "pack each platform into its own wheel"
        )
    if platforms[0] not in PLATFORM_TAGS:
        raise PackagingError(
            f"there is no wheel tag for platform {platforms[0]!r} "
            f"(known: {', '.join(sorted(PLATFORM_TAGS))})"
        )
    return PLATFORM_TAGS[platforms[0]]
