"""Packs bundles into a wheel: data only, found by the runtime through an entry point.

Every byte follows from the bundles, the name and version, and this release: entries are stored in a
fixed order with a fixed time, mode and host system, and are not compressed. Bundles are compressed
already, and DEFLATE's output depends on the machine's zlib.
"""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import files as distribution_files
from pathlib import Path
from zipfile import ZIP_STORED, ZipInfo

from wheel.wheelfile import WheelFile  # type: ignore[import-untyped]

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.format import Header, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import PackagingError, StorageError
from nvgemm_runtime.installed.discover import (
    BUNDLE_SUFFIX,
    DISTRIBUTION_PREFIX,
    ENTRY_POINT_GROUP,
)

from ..storage.files import space_hint, write_atomic
from .confirmed_contents import confirmed_contents
from .packed_signatures import packed_signatures
from .sbom import RUNTIME, BundledFile, render_sbom
from .wheel_description import cuda_versions, fill_template, read_template, render_description

MAX_WHEEL_BYTES = 95 << 20
"""Largest wheel, in bytes. The public index takes files up to 100 MB unless a project asks for
more; 95 MiB (99.6 MB) is below that by either meaning of the unit."""

PLATFORM_TAGS = {
    "linux_x86_64": "manylinux_2_28_x86_64",
    "linux_aarch64": "manylinux_2_28_aarch64",
}
"""Platform tag of a wheel, by the target's host platform.

A kernel links only against libtvm_ffi.so and libcute_dsl_runtime.so, without undefined symbols, so
it runs wherever these two do. The narrowest tag among their wheels is that of
nvidia-cutlass-dsl-libs-cu13 and -cu12; a kernel wheel has the same.
"""

LICENSE_EXPRESSION = "Apache-2.0 AND BSD-3-Clause"
"""Licence of every kernel wheel. Kernels are compiled from nvidia-cutlass-operators (BSD-3-Clause),
quack-kernels and nvgemm-aot (Apache-2.0); bundle metadata and launcher code are Apache-2.0."""

REQUIRES_PYTHON = ">=3.10"
"""The runtime's own lower bound. The runtime itself sets the upper bound."""

MAX_SUMMARY_CHARACTERS = 512
"""Longest summary that the public index takes."""

_ENTRY_TIME = (1980, 1, 1, 0, 0, 0)  # The earliest time in the zip format.
_ENTRY_MODE = stat.S_IFREG | 0o644
_UNIX = 3  # zip's "version made by" host system, which says how to read the mode.


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


class _ReproducibleWheel(WheelFile):  # type: ignore[misc]
    """A `WheelFile` whose entries carry no trace of when and where they were written.

    The library takes times from the clock or SOURCE_DATE_EPOCH, also for the RECORD that it writes,
    and this process's environment must stay unchanged.
    """

    def writestr(self, name: str, data: bytes | str, compress_type: int | None = None) -> None:
        entry = ZipInfo(name, date_time=_ENTRY_TIME)
        entry.create_system = _UNIX
        entry.external_attr = _ENTRY_MODE << 16
        entry.compress_type = ZIP_STORED
        super().writestr(entry, data, ZIP_STORED)


def write_wheel(
    bundles: Sequence[Path], *, name: str, version: str, out_dir: Path, summary: str | None = None
) -> Path:
    """Encodes bundles with `encode_wheel` and writes the wheel to a directory, made if missing.

    Returns:
        The wheel's path.

    Raises:
        PackagingError, BundleFormatError: See `encode_wheel`.
        StorageError: If a file cannot be read or written; nothing is left half-written.
    """
    filename, data = encode_wheel(bundles, name=name, version=version, summary=summary)
    write_atomic(out_dir / filename, data)
    return out_dir / filename


def encode_wheel(
    bundles: Sequence[Path],
    *,
    name: str,
    version: str,
    summary: str | None = None,
    confirmed: Sequence[Path] = (),
) -> tuple[str, bytes]:
    """Packs bundles, one per target, into a wheel; equal bundles in any order give equal bytes.

    Signature files beside them are packed too.

    Args:
        bundles: Bundle files.
        name: Suffix of the distribution's name after ``nvgemm-kernels-``; normalised.
        version: The wheel's version; normalised.
        summary: One line about the wheel (line breaks become spaces); by default derived from the
            bundles.
        confirmed: Files with confirmations of the bundles' kernels, one for each GPU product,
            minor torch version and CUDA version.

    Returns:
        The wheel's file name and its bytes.

    Raises:
        PackagingError: If there is no bundle, two bundles have one target, their platforms differ
            or have no wheel tag, the name, version or summary is not valid, confirmations fit no
            kernel or each other, or the wheel exceeds `MAX_WHEEL_BYTES`.
        BundleFormatError: If a bundle breaks a rule of the format.
        RankingsError: If a file with confirmations breaks a rule of its format.
        SignatureError: If a file's signature is for other content, or the policy refuses it.
        StorageError: If a file cannot be read.
    """
    identity = identify(name, version)
    contents = _read_bundles(bundles, identity)
    headers = [header for header, _ in contents.values()]
    confirmed_files = confirmed_contents(confirmed, headers)
    tag = _platform_tag(headers)
    filename = f"{identity.package}-{identity.version}-py3-none-{tag}.whl"
    line = _summary_line(summary, headers)
    files = _wheel_files(identity, contents, tag, line)
    beside = {f"{identity.package}/{inner}": text for inner, text in confirmed_files.items()}
    beside |= packed_signatures(bundles, {inner: data for inner, (_, data) in contents.items()})
    data = encode_archive(filename, {**beside, **files})
    _check_size(len(data), len(contents))
    return filename, data


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
    """Refuses a directory with another version of a kernel wheel.

    A pattern such as ``nvgemm_kernels_mine-*.whl`` would match both, and pip would then install
    neither.

    Raises:
        PackagingError: If the directory has such a wheel, with its name.
        StorageError: If the directory cannot be listed.
    """
    for name in list_wheels(directory, identity.package):
        if name.split("-")[1] != identity.version:
            raise PackagingError(
                f"{directory / name} is another version than {identity.version}, which this "
                "command writes, and pip cannot install both: remove it, or choose another "
                "directory with --out"
            )


def list_wheels(directory: Path, package: str) -> list[str]:
    """Returns the sorted file names of a package's wheels; none if the directory does not exist.

    Raises:
        StorageError: If the directory cannot be listed.
    """
    try:
        return sorted(path.name for path in directory.glob(f"{package}-*.whl"))
    except OSError as error:
        raise StorageError(f"{directory}: cannot be listed: {error.strerror}") from error


def _read_bundles(
    bundles: Sequence[Path], identity: WheelIdentity
) -> dict[str, tuple[Header, bytes]]:
    """Returns each bundle's header and bytes, by path inside the wheel, sorted."""
    if not bundles:
        raise PackagingError("a wheel needs at least one bundle (got 0)")
    contents: dict[str, tuple[Header, bytes]] = {}
    sources: dict[str, Path] = {}
    size_bytes = 0
    for path in bundles:
        with Bundle(path) as bundle:
            inner = f"{identity.package}/{bundle.header.target.key}{BUNDLE_SUFFIX}"
            if inner in contents:
                devices = dict.fromkeys((*contents[inner][0].devices, *bundle.header.devices))
                raise PackagingError(
                    f"{sources[inner]} and {path} are both for target "
                    f"{bundle.header.target.key}, a wheel holds one bundle a target: build them "
                    f"from one manifest (devices: [{', '.join(devices)}]), or pack them in wheels "
                    "of different names"
                )
            size_bytes += bundle.file_bytes
            _check_size(size_bytes, len(bundles))
            bundle.check_body()
            for kernel in bundle.header.kernels:
                bundle.payload(kernel)
            contents[inner] = (bundle.header, bundle.content())
            sources[inner] = path
    return dict(sorted(contents.items()))


def _check_size(size_bytes: int, bundle_count: int) -> None:
    if size_bytes <= MAX_WHEEL_BYTES:
        return
    advice = (
        "pack each target into its own wheel (nvgemm-aot wheel BUNDLE --name NAME)"
        if bundle_count > 1
        else "split the manifest in two and pack each part's bundle under its own name"
    )
    raise PackagingError(
        f"the wheel would have {size_bytes / 2**20:.1f} MiB or more, at most "
        f"{MAX_WHEEL_BYTES / 2**20:.1f} MiB is allowed, so that any index takes it: {advice}, or "
        "lower the manifest's candidates per problem"
    )


def _platform_tag(headers: Sequence[Header]) -> str:
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


def _summary_line(summary: str | None, headers: Sequence[Header]) -> str:
    if summary is None:
        archs = ", ".join(dict.fromkeys(map(_arch_and_devices, headers)))
        return f"Ahead-of-time compiled GEMM kernels for {archs}"
    line = " ".join(summary.split())
    if not line.isprintable() or not 1 <= len(line) <= MAX_SUMMARY_CHARACTERS:
        raise PackagingError(
            f"the summary must be 1 to {MAX_SUMMARY_CHARACTERS} printable characters "
            f"(got {len(line)}: {line!r:.80})"
        )
    return line


def _arch_and_devices(header: Header) -> str:
    """Returns an architecture, followed by the devices it is ranked for if there are several."""
    devices = f" ({', '.join(header.devices)})" if header.further_devices else ""
    return f"{header.target.arch}{devices}"


def _wheel_files(
    identity: WheelIdentity,
    contents: dict[str, tuple[Header, bytes]],
    tag: str,
    summary: str,
) -> dict[str, bytes]:
    """Returns every file except RECORD, by path; metadata last, as the wheel format recommends."""
    info = identity.dist_info
    headers = [header for header, _ in contents.values()]
    archs = ", ".join(dict.fromkeys(header.target.arch for header in headers))
    licences = {
        "Apache-2.0.txt": _apache_licence(),
        "BSD-3-Clause.txt": read_template("licenses/BSD-3-Clause.txt").encode(),
    }
    sbom = render_sbom(
        distribution=identity.distribution,
        version=identity.version,
        license_expression=LICENSE_EXPRESSION,
        files=[
            BundledFile(path=path, sha256=sha256_hex(data), header=header)
            for path, (header, data) in contents.items()
        ],
    )
    return {
        f"{identity.package}/__init__.py": fill_template("__init__.py.in", targets=archs).encode(),
        **{path: data for path, (_, data) in contents.items()},
        **{f"{info}/licenses/{name}": text for name, text in licences.items()},
        f"{info}/sboms/{identity.distribution}.cdx.json": sbom,
        f"{info}/METADATA": _metadata(identity, headers, summary, sorted(licences)),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: {RUNTIME} {__version__}\n"
            f"Root-Is-Purelib: false\nTag: py3-none-{tag}\n"
        ).encode(),
        f"{info}/entry_points.txt": (
            f"[{ENTRY_POINT_GROUP}]\n{identity.distribution} = {identity.package}\n"
        ).encode(),
    }


def encode_archive(filename: str, files: Mapping[str, bytes]) -> bytes:
    """Encodes files, by path, as a wheel with a RECORD; equal files give equal bytes.

    Raises:
        StorageError: If the temporary directory cannot hold the wheel.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nvgemm-wheel-") as directory:
            path = Path(directory, filename)
            wheel = _ReproducibleWheel(str(path), "w")
            try:
                with wheel:
                    for name, data in files.items():
                        wheel.writestr(name, data)
            except OSError:
                wheel.fp = None  # else it is written once more when it is collected
                raise
            return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot write the wheel to a temporary directory: {error}; {space_hint(error)}, or "
            "set TMPDIR"
        ) from error


def _metadata(
    identity: WheelIdentity, headers: Sequence[Header], summary: str, licences: list[str]
) -> bytes:
    # Not by `packaging.metadata`: it writes field names in lower case, which twine does not find.
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", identity.distribution),
        ("Version", identity.version),
        ("Summary", summary),
        ("License-Expression", LICENSE_EXPRESSION),
        *(("License-File", name) for name in licences),
        ("Classifier", "Operating System :: POSIX :: Linux"),
        ("Classifier", "Topic :: Scientific/Engineering :: Artificial Intelligence"),
        ("Requires-Python", REQUIRES_PYTHON),
        *_requirements(headers),
        ("Description-Content-Type", "text/markdown; charset=UTF-8; variant=GFM"),
    ]
    head = "".join(f"{name}: {value}\n" for name, value in fields)
    description = render_description(identity.distribution, headers, summary)
    return f"{head}\n{description}".encode()


def _requirements(headers: Sequence[Header]) -> list[tuple[str, str]]:
    """Returns a wheel's requirements: the runtime, with the library for its kernels' CUDA version.

    If the bundles need several CUDA versions, each version has an extra that brings its library,
    because pip does not know which torch is installed.
    """
    cudas = cuda_versions(headers)
    if len(cudas) < 2:
        return [("Requires-Dist", runtime_requirement(__version__, cudas))]
    fields = [("Requires-Dist", runtime_requirement(__version__, []))]
    for cuda in cudas:
        requirement = f'{runtime_requirement(__version__, [cuda])}; extra == "{cuda}"'
        fields += [("Provides-Extra", cuda), ("Requires-Dist", requirement)]
    return fields


def runtime_requirement(builder_version: str, extras: Sequence[str]) -> str:
    """Returns a wheel's requirement for the runtime: this release or a later compatible one.

    ``extras`` are the runtime's extras that the wheel needs, such as ``cu13``.

    The lower bound is the release that packed the wheel, the oldest one known to read its bundles:
    earlier releases refuse element types and calling conventions that it added. The upper bound is
    the next release that may stop reading them or move the library versions that kernels call: the
    next minor version before 1.0, the next major one after.
    """
    from packaging.version import Version

    version = Version(builder_version)
    upper = f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"
    extras_text = f"[{','.join(extras)}]" if extras else ""
    return f"{RUNTIME}{extras_text}>={version.public},<{upper}"


def _apache_licence() -> bytes:
    """Reads the Apache-2.0 text from this distribution's own metadata."""
    with contextlib.suppress(PackageNotFoundError):
        for file in distribution_files(RUNTIME) or ():
            if file.match("*.dist-info/licenses/LICENSE"):
                return file.read_binary()
    raise PackagingError(f"{RUNTIME}'s metadata holds no licence text: reinstall {RUNTIME}")
