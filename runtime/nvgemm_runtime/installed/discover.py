"""Finds bundles: in installed kernel wheels, without importing any, and by environment variable."""

from __future__ import annotations

import csv
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from ..errors import SignatureError, StorageError
from ..settings import BUNDLES_VARIABLE, POLICY_VARIABLE, printable_path
from .ownership import writable_by_others

ENTRY_POINT_GROUP = "nvgemm_aot.bundles"
"""Entry point group of kernel wheels. Each value is the package whose directory holds bundles."""

DISTRIBUTION_PREFIX = "nvgemm-kernels-"
"""Prefix of a kernel wheel's distribution name, before its manifest's name."""

BUNDLE_SUFFIX = ".nvgemm"
"""Suffix of bundle file names."""

CONFIRMED_SUFFIX = ".confirmed.json"
"""Suffix of names of files with confirmations; see `bundle.confirmations`."""

PREFIX_BYTES = 48
"""Size of a bundle's first bytes, `bundle.format.PREFIX`, with the digest of the header."""

_LEFT_BY_PIP = "~"
"""Prefix of directories left by an interrupted pip uninstall."""

_PACKAGE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class InstalledBundle:
    """Bundle that an installed distribution contains, or should contain.

    Attributes:
        path: Absolute file path, unread; for an unreadable distribution, its metadata's path.
        distribution: Distribution name in its metadata, or None.
        version: Distribution version, or None.
        problem: Reason that there is no bundle to open, with the next step, or None.
        confirmed_files: Files with confirmations in the same distribution, unread.
    """

    path: Path
    distribution: str | None
    version: str | None
    problem: str | None = None
    confirmed_files: tuple[Path, ...] = ()

    @property
    def origin(self) -> str:
        """Name of the distribution in messages."""
        if self.distribution is None:
            return f"a kernel wheel at {self.path}"
        return f"{self.distribution} {self.version}"

    @property
    def requirement(self) -> str | None:
        """Distribution and version as a pip requirement, if known."""
        return None if self.distribution is None else f"{self.distribution}=={self.version}"


def find_wheel_bundles() -> tuple[InstalledBundle, ...]:
    """Finds every bundle in every installed kernel wheel.

    Reads only metadata: an entry point in group `ENTRY_POINT_GROUP` names a package, and the
    installer's RECORD lists the bundles in that package. A file that is listed and missing, and a
    damaged distribution, come with their problem and do not hide the others. If ``sys.path`` has a
    distribution twice, the first counts, as for imports.

    Returns:
        Bundles ordered by distribution and path, each file once.
    """
    bundles_by_path: dict[str, InstalledBundle] = {}
    seen_names: set[str] = set()
    for distribution in distributions():
        if _metadata_path(distribution).name.startswith(_LEFT_BY_PIP):
            continue
        name = version = None
        try:
            packages = _declared_packages(distribution)
            if not packages:
                continue
            name, version = _name_and_version(distribution)
            key = canonical_name(name)
            if key in seen_names:
                continue
            seen_names.add(key)
            bundles = list(_bundles(distribution, packages, name, version))
        except Exception as error:  # third-party metadata can be wrong in any way
            problem = (
                f"{describe_distribution(distribution)} cannot be used: "
                f"{str(error) or type(error).__name__}; reinstall or uninstall it"
            )
            path = _metadata_path(distribution)
            bundles = [
                InstalledBundle(path=path, distribution=name, version=version, problem=problem)
            ]
        for bundle in bundles:
            bundles_by_path.setdefault(os.path.realpath(bundle.path), bundle)
    return tuple(
        sorted(
            bundles_by_path.values(), key=lambda bundle: (bundle.distribution or "", bundle.path)
        )
    )


def canonical_name(name: str) -> str:
    """Returns a distribution name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, kw_only=True)
class BundleFile:
    """File that should be a bundle.

    Attributes:
        path: File path.
        origin: Distribution and version that contain it, the variable that names it, or the JIT
            cache.
        problem: Reason that it must not or cannot be opened, or None.
        requirement: Distribution and version as a pip requirement, if known.
        confirmed_files: Files with confirmations in the same distribution, unread.
        is_refused: True if the policy is the problem.
        checked_prefix: First bytes that the policy accepted, which the opened file must have; None
            without a policy.
    """

    path: Path
    origin: str
    problem: str | None
    requirement: str | None = None
    confirmed_files: tuple[Path, ...] = ()
    is_refused: bool = False
    checked_prefix: bytes | None = None


def find_bundles() -> tuple[BundleFile, ...]:
    """Finds every bundle named in NVGEMM_AOT_BUNDLES or installed, in this order.

    Each file comes once. A named file that others can write has that as its problem, because
    loading a bundle runs its code. Installed wheels are next to code that runs anyway. With a
    policy, a bundle that it refuses has that as its problem, wherever it is.
    """
    installed = (
        BundleFile(
            path=bundle.path,
            origin=bundle.origin,
            problem=bundle.problem,
            requirement=bundle.requirement,
            confirmed_files=bundle.confirmed_files,
        )
        for bundle in find_wheel_bundles()
    )
    files_by_path: dict[str, BundleFile] = {}
    for file in (*_named_bundles(), *installed):
        files_by_path.setdefault(os.path.realpath(file.path), file)
    if not os.environ.get(POLICY_VARIABLE):
        return tuple(files_by_path.values())
    return tuple(
        file if file.problem is not None else _checked(file) for file in files_by_path.values()
    )


def _checked(file: BundleFile) -> BundleFile:
    """Returns a bundle with the policy's refusal as its problem, or with the accepted prefix."""
    from .policy_checks import check_bundle  # not in processes without a policy
    from .regular_files import read_regular

    try:
        prefix = read_regular(file.path, PREFIX_BYTES)
    except (OSError, StorageError):
        return replace(file, checked_prefix=b"")  # opening it fails, and gives the reason
    try:
        check_bundle(file.path, prefix)
    except SignatureError as error:
        return replace(file, problem=str(error), is_refused=True)
    return replace(file, checked_prefix=prefix)


def _named_bundles() -> Iterator[BundleFile]:
    for path in named_paths():
        if path.name.endswith(CONFIRMED_SUFFIX):
            continue
        try:
            files = files_at(path, BUNDLE_SUFFIX)
            # A directory may hold confirmations alone.
            if not files and not files_at(path, CONFIRMED_SUFFIX):
                raise FileNotFoundError(errno.ENOENT, f"holds no {BUNDLE_SUFFIX} file")
        except OSError as error:
            reason = f"{printable_path(path)}: {error.strerror}"
            yield BundleFile(path=path, origin=BUNDLES_VARIABLE, problem=reason)
            continue
        yield from (owned_file(file, BUNDLES_VARIABLE) for file in files)


def named_paths() -> list[Path]:
    """Returns the files and directories that NVGEMM_AOT_BUNDLES names."""
    names = os.environ.get(BUNDLES_VARIABLE, "").split(os.pathsep)
    return [Path(os.path.abspath(name)) for name in names if name]  # noqa: PTH100


def files_at(path: Path, suffix: str) -> list[Path]:
    """Returns a directory's files with a suffix, by name; a path to anything else is returned.

    Raises:
        OSError: If the directory cannot be listed.
    """
    if not path.is_dir():
        return [path]
    # Not glob, which skips unreadable directories.
    names = sorted(name for name in os.listdir(path) if name.endswith(suffix))  # noqa: PTH208
    return [path / name for name in names]


def owned_file(file: Path, origin: str) -> BundleFile:
    """Returns a file, with a problem if others can write it or it does not exist."""
    # Per file: a dangling link says nothing about its neighbours.
    try:
        problem = writable_by_others(file)
    except OSError as error:
        problem = f"{printable_path(file)}: {error.strerror}"
    return BundleFile(path=file, origin=origin, problem=problem)


def _declared_packages(distribution: Distribution) -> tuple[str, ...]:
    """Returns the packages that the distribution's entry points name."""
    # Most distributions hold no bundles; their entry points may be malformed and are not parsed.
    if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
        return ()
    values = [
        point.value for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP
    ]
    for value in values:
        if _PACKAGE.fullmatch(value) is None:
            rule = f"its entry point in {ENTRY_POINT_GROUP} must name a package"
            raise ValueError(f"{rule} (got {value!r})")
    return tuple(values)


def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Returns name and version."""
    metadata = distribution.metadata
    for field in ("Name", "Version"):
        if field not in metadata or not metadata[field]:
            raise ValueError(f"its metadata has no {field}")
    return metadata["Name"], metadata["Version"]


def _bundles(
    distribution: Distribution, packages: tuple[str, ...], name: str, version: str
) -> Iterator[InstalledBundle]:
    """Yields the bundles directly inside ``packages``."""
    # Read here, because `Distribution.files` silently drops missing files from Python 3.12 on.
    record = distribution.read_text("RECORD")
    if record is None:
        raise ValueError("it has no RECORD, so its files are unknown")
    directories = {PurePosixPath(*package.split(".")) for package in packages}
    entries = [PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row]
    bundles = [
        entry for entry in entries if entry.suffix == BUNDLE_SUFFIX and entry.parent in directories
    ]
    confirmed = [
        entry
        for entry in entries
        if entry.name.endswith(CONFIRMED_SUFFIX) and entry.parent in directories
    ]
    if not bundles:
        raise ValueError(f"its RECORD lists no {BUNDLE_SUFFIX} file in {', '.join(packages)}")
    confirmed_files = tuple(_located(distribution, entry) for entry in confirmed)
    for entry in bundles:
        path = _located(distribution, entry)
        problem = None
        if not path.is_file():
            problem = f"{path} is missing, but the RECORD of {name} lists it; reinstall {name}"
        yield InstalledBundle(
            path=path,
            distribution=name,
            version=version,
            problem=problem,
            confirmed_files=confirmed_files,
        )


def _located(distribution: Distribution, entry: PurePosixPath) -> Path:
    located = distribution.locate_file(entry)
    if not isinstance(located, os.PathLike):
        raise ValueError("it is installed in an archive, bundles must be plain files")
    return Path(os.path.abspath(located))  # noqa: PTH100


def describe_distribution(distribution: Distribution) -> str:
    """Returns the distribution's name, or its metadata path if it has no name."""
    try:
        name = distribution.metadata["Name"]
    except Exception:  # third-party metadata, as above
        name = None
    return f"distribution {name}" if name else f"the distribution of {_metadata_path(distribution)}"


def _metadata_path(distribution: Distribution) -> Path:
    """Returns the path of a distribution's metadata."""
    # The directory's path has no public name.
    path = getattr(distribution, "_path", None) or distribution.locate_file("")
    return Path(os.path.abspath(str(path)))  # noqa: PTH100


def user_directory(variable: str, base_variable: str, base: str) -> Path:
    """Returns the directory that a variable names, else ``nvgemm-aot`` in an XDG base directory.

    Args:
        variable: Variable that names the directory.
        base_variable: XDG's variable for the base directory.
        base: Base directory without it, below the user's home.

    Raises:
        RuntimeError: If the user has no home directory and no variable names another directory.
    """
    if directory := os.environ.get(variable):
        return Path(directory)
    named = os.environ.get(base_variable)
    return (Path(named) if named else Path.home() / base) / "nvgemm-aot"
