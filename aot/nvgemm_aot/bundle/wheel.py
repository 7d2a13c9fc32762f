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
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX, ENTRY_POINT_GROUP
from nvgemm_runtime.installed.signatures import SIGNATURE_SUFFIX, bundle_subject

from ..storage.files import space_hint
from .packed_signatures import packed_signatures
from .sbom import RUNTIME, BundledFile, render_sbom
from .wheel_description import cuda_versions, fill_template, read_template, render_description
from .wheel_names import WheelIdentity, platform_tag

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


@dataclass(frozen=True, kw_only=True)
class PackedBundle:
    """A checked bundle on its way into a wheel.

    Attributes:
        path: File that it was read from.
        header: Its header.
        data: The file's bytes.
        signatures: Its signature file, or None.
    """

    path: Path
    header: Header
    data: bytes
    signatures: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Wheels that belong together because one would be too large.

    Attributes:
        number: Number of the wheel, from 1, which requires all others.
        identities: All wheels' names, in order.
        headers: Headers of all bundles in them.
    """

    number: int
    identities: Sequence[WheelIdentity]
    headers: Sequence[Header]

    @property
    def required(self) -> list[WheelIdentity]:
        """Wheels that this one requires: the first all others, each other one the first."""
        first, *others = self.identities
        return others if self.number == 1 else [first]


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


def encode_wheel(
    identity: WheelIdentity,
    contents: Mapping[str, PackedBundle],
    *,
    summary: str | None = None,
    confirmed: Mapping[str, bytes] | None = None,
    parts: Parts | None = None,
) -> tuple[str, bytes]:
    """Packs bundles, one per target, into a wheel; equal bundles give equal bytes.

    Args:
        identity: The wheel's names and version.
        contents: Bundles from `read_bundles`.
        summary: One line about the wheel (line breaks become spaces); by default derived from the
            bundles.
        confirmed: Files with confirmations, by name.
        parts: The wheels that this one is a part of, or None.

    Returns:
        The wheel's file name and its bytes, however many.

    Raises:
        PackagingError: If the bundles' platforms differ or have no wheel tag, or the summary is not
            valid.
    """
    headers = [packed.header for packed in contents.values()]
    tag = platform_tag(headers)
    filename = identity.filename(tag)
    line = _summary_line(summary, parts.headers if parts else headers, parts)
    files = _wheel_files(identity, contents, tag, line, parts)
    beside = {f"{identity.package}/{inner}": text for inner, text in (confirmed or {}).items()}
    beside |= {
        f"{identity.package}/{key}{BUNDLE_SUFFIX}{SIGNATURE_SUFFIX}": packed.signatures
        for key, packed in contents.items()
        if packed.signatures is not None
    }
    return filename, encode_archive(filename, {**beside, **files})


def read_bundles(bundles: Sequence[Path]) -> list[PackedBundle]:
    """Reads and checks bundles for wheels; returns them sorted by target and problem.

    Raises:
        PackagingError: If there is no bundle, or two bundles have one target and are no parts of
            one bundle.
        BundleFormatError: If a bundle breaks a rule of the format.
        SignatureError: If a signature is for other content, or the policy refuses a bundle.
        StorageError: If a file cannot be read.
    """
    if not bundles:
        raise PackagingError("a wheel needs at least one bundle (got 0)")
    contents: list[PackedBundle] = []
    for path in bundles:
        with Bundle(path) as bundle:
            header = bundle.header
            for other in contents:
                is_part = not set(other.header.part_of).isdisjoint(header.part_of)
                is_same = other.header.build_key == header.build_key
                if other.header.target == header.target and (is_same or not is_part):
                    raise PackagingError(
                        f"{other.path} and {path} are both for target {header.target.key}, a wheel "
                        f"holds one bundle a target: merge them (nvgemm-aot merge {other.path} "
                        f"{path} -o OUT{BUNDLE_SUFFIX}), or pack them in wheels of different names"
                    )
            bundle.check_body()
            for kernel in header.kernels:
                bundle.payload(kernel)
            contents.append(
                PackedBundle(
                    path=path,
                    header=header,
                    data=bundle.content(),
                    signatures=packed_signatures(path, bundle_subject(bundle.prefix)),
                )
            )
    return sorted(contents, key=_bundle_order)


def _bundle_order(packed: PackedBundle) -> tuple[str, list[Problem], str]:
    header = packed.header
    return (
        header.target.key,
        [ranking.problem for ranking in header.rankings[:1]],
        header.build_key,
    )


def _summary_line(summary: str | None, headers: Sequence[Header], parts: Parts | None) -> str:
    suffix = f" (part {parts.number} of {len(parts.identities)})" if parts else ""
    if summary is None:
        archs = ", ".join(dict.fromkeys(map(_arch_and_devices, headers)))
        return f"Ahead-of-time compiled GEMM kernels for {archs}{suffix}"
    line = " ".join(summary.split())
    if not line.isprintable() or not 1 <= len(line) <= MAX_SUMMARY_CHARACTERS:
        raise PackagingError(
            f"the summary must be 1 to {MAX_SUMMARY_CHARACTERS} printable characters "
            f"(got {len(line)}: {line!r:.80})"
        )
    return line[: MAX_SUMMARY_CHARACTERS - len(suffix)] + suffix


def _arch_and_devices(header: Header) -> str:
    """Returns an architecture, followed by the devices it is ranked for if there are several."""
    devices = f" ({', '.join(header.devices)})" if header.further_devices else ""
    return f"{header.target.arch}{devices}"


def _wheel_files(
    identity: WheelIdentity,
    contents: Mapping[str, PackedBundle],
    tag: str,
    summary: str,
    parts: Parts | None,
) -> dict[str, bytes]:
    """Returns every file except RECORD, by path; metadata last, as the wheel format recommends."""
    info = identity.dist_info
    headers = [packed.header for packed in contents.values()]
    bundles = {
        f"{identity.package}/{key}{BUNDLE_SUFFIX}": packed for key, packed in contents.items()
    }
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
            BundledFile(path=path, sha256=sha256_hex(packed.data), header=packed.header)
            for path, packed in bundles.items()
        ],
        required=[(one.distribution, one.version) for one in parts.required] if parts else [],
    )
    return {
        f"{identity.package}/__init__.py": fill_template("__init__.py.in", targets=archs).encode(),
        **{path: packed.data for path, packed in bundles.items()},
        **{f"{info}/licenses/{name}": text for name, text in licences.items()},
        f"{info}/sboms/{identity.distribution}.cdx.json": sbom,
        f"{info}/METADATA": _metadata(identity, headers, summary, sorted(licences), parts),
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
    identity: WheelIdentity,
    headers: Sequence[Header],
    summary: str,
    licences: list[str],
    parts: Parts | None,
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
        *_requirements(headers, parts),
        ("Description-Content-Type", "text/markdown; charset=UTF-8; variant=GFM"),
    ]
    head = "".join(f"{name}: {value}\n" for name, value in fields)
    description = render_description(
        identity.distribution,
        headers,
        summary,
        parts=[one.distribution for one in parts.identities] if parts else (),
        cudas=cuda_versions(parts.headers if parts else headers),
    )
    return f"{head}\n{description}".encode()


def _requirements(headers: Sequence[Header], parts: Parts | None) -> list[tuple[str, str]]:
    """Returns a wheel's requirements: its other parts, and the runtime.

    The runtime comes with the library for the kernels' CUDA version. If the bundles need several
    CUDA versions, each version has an extra that brings its library, because pip does not know
    which torch is installed. The first of several parts has the extras for all of them.
    """
    required = parts.required if parts else ()
    fields = [("Requires-Dist", f"{one.distribution}=={one.version}") for one in required]
    cudas = cuda_versions(parts.headers if parts else headers)
    if len(cudas) < 2:
        return [*fields, ("Requires-Dist", runtime_requirement(__version__, cudas))]
    fields.append(("Requires-Dist", runtime_requirement(__version__, [])))
    for cuda in cudas if parts is None or parts.number == 1 else ():
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
