"""Packs the installed nvgemm-aot back into a wheel, for the machines that run its kernels.

No registry has nvgemm-aot yet, so a GPU machine gets the runtime from the build machine. The wheel
holds the files that the installation's RECORD lists, each checked against its hash there. Equal
installations give equal bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nvgemm_runtime.errors import PackagingError, StorageError

from ..verify.host.elf import MalformedElfError, open_elf, reading
from .sbom import RUNTIME
from .wheel import encode_archive
from .wheel_names import list_wheels

RUNTIME_PACKAGE = "nvgemm_aot"
"""Prefix of runtime wheel names."""

NATIVE_PARTS = ("nvgemm_runtime/_native.so", "nvgemm_aot/emulator/driver/_emulated_cuda.so")
"""ELF files in a runtime wheel; the second is the emulator's stand-in for the CUDA driver."""

_PLATFORMS = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
"""Processor in a wheel's platform tag, by the machine in an ELF header."""

_SYSTEM_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1"}
"""Libraries with symbol versions that manylinux tags limit, in addition to glibc's."""

_GLIBC_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux-.*\.so\.\d+")

_DEPENDENCIES = {"libtorch_cpu.so", "libtvm_ffi.so"}
"""Libraries that the wheel's own dependencies bring."""

_NEWEST_SYMBOLS = {
    28: {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    31: {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    34: {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    35: {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (11, 0, 0)},
    39: {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
"""Newest symbol versions that a manylinux tag allows, by the tag's glibc minor version, from
auditwheel's ``policy/manylinux-policy.json``. Tags below 2.28 are not used, because torch's own
wheels have none."""

_INSTALLERS_FILES = {
    "INSTALLER",
    "RECORD",
    "REQUESTED",
    "direct_url.json",
    "uv_build.json",
    "uv_cache.json",
}
"""Metadata files that pip and uv add to an installation."""


def packing_refusal(installed: Distribution | None = None) -> str | None:
    """Returns why an installation is not packed, with the next step, or None if it is.

    An editable installation has no list of its checkout's modules.
    """
    installed = installed or distribution(RUNTIME)
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    checkout = shlex.quote(unquote(urlsplit(origin["url"]).path))
    return (
        f"{RUNTIME} is an editable installation; to build its wheel, run: pip wheel --no-deps "
        f"--wheel-dir DIRECTORY {checkout}"
    )


def encode_runtime_wheel(installed: Distribution | None = None) -> tuple[str, bytes]:
    """Packs an installation, by default the running one, into a wheel.

    Returns:
        The wheel's file name and its bytes.

    Raises:
        PackagingError: If a file is missing or differs from the installed one.
        StorageError: If a file cannot be read.
    """
    installed = installed or distribution(RUNTIME)
    files = {
        path: _read_installed(installed, path, digest)
        for path, digest in _recorded_digests(installed).items()
    }
    for part in NATIVE_PARTS:
        if part not in files:
            raise PackagingError(
                f"{installed.locate_file('')}: RECORD of {RUNTIME} does not list {part}; "
                f"install {RUNTIME} again from its checkout"
            )
    (info,) = {path.partition("/")[0] for path in files if ".dist-info/" in path}
    tag = platform_tag({part: files[part] for part in NATIVE_PARTS})
    described = files[f"{info}/WHEEL"].decode()
    files[f"{info}/WHEEL"] = re.sub(
        "^Tag: .*$", f"Tag: py3-none-{tag}", described, flags=re.MULTILINE
    ).encode()
    filename = f"{info.removesuffix('.dist-info')}-py3-none-{tag}.whl"
    return filename, encode_archive(filename, files)


def runtime_platform(filename: str) -> str:
    """Returns a runtime wheel's platform in the form of targets: ``linux_x86_64``."""
    return re.sub(r".*-(?:manylinux_\d+_\d+|linux)_(\w+)\.whl", r"linux_\1", filename)


def refuse_other_runtimes(directory: Path, filename: str) -> None:
    """Refuses a directory with another runtime wheel for the same platform.

    A pattern such as ``nvgemm_aot-*.whl`` would match both, and pip would then install neither.

    Raises:
        PackagingError: If the directory has such a wheel, with its name.
        StorageError: If the directory cannot be listed.
    """
    for name in list_wheels(directory, RUNTIME_PACKAGE):
        if name != filename and runtime_platform(name) == runtime_platform(filename):
            raise PackagingError(
                f"{directory / name} is another runtime wheel than {filename}, which this command "
                "writes, and pip cannot install both: remove it, or choose another directory with "
                "--out"
            )


def platform_tag(images: Mapping[str, bytes]) -> str:
    """Returns the lowest manylinux tag, from 2.28 on, that native parts meet; else ``linux_…``.

    Args:
        images: ELF files by their paths in the wheel.

    Raises:
        PackagingError: If an image is no ELF file for a known processor, or two differ in theirs.
    """
    needs = {part: _needs(part, image) for part, image in images.items()}
    processors = {part: processor for part, (processor, _) in needs.items()}
    if len(set(processors.values())) > 1:
        found = ", ".join(f"{part} is for {one}" for part, one in processors.items())
        raise PackagingError(f"{found}; one processor is allowed: install {RUNTIME} again")
    processor = next(iter(processors.values()))
    minors = [minor for _, minor in needs.values()]
    if None in minors:
        return f"linux_{processor}"
    return f"manylinux_2_{max(minor for minor in minors if minor is not None)}_{processor}"


def _needs(part: str, image: bytes) -> tuple[str, int | None]:
    """Returns a native part's processor and oldest glibc minor version, None without a tag."""
    try:
        elf = open_elf(image)
        with reading("the native part"):
            processor = _PLATFORMS[elf["e_machine"]]
            libraries = {
                tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
            }
            section = elf.get_section_by_name(".gnu.version_r")
            versions = [version.name for _, needed in section.iter_versions() for version in needed]
    except MalformedElfError as error:
        raise PackagingError(f"{part}: {error}; install {RUNTIME} again") from error
    known = _SYSTEM_LIBRARIES | _DEPENDENCIES
    foreign = [library for library in libraries - known if not _GLIBC_LIBRARIES.fullmatch(library)]
    return processor, None if foreign else _oldest_glibc(versions)


def _oldest_glibc(versions: list[str]) -> int | None:
    """Returns the oldest glibc minor version whose manylinux tag allows these symbol versions."""
    oldest = min(_NEWEST_SYMBOLS)
    for version in versions:
        name, _, text = version.rpartition("_")
        if not re.fullmatch(r"\d+(\.\d+)+", text):
            return None
        number = tuple(map(int, text.split(".")))
        if name == "GLIBC":
            oldest = max(oldest, number[1])
            continue
        allowing = [
            minor for minor, newest in _NEWEST_SYMBOLS.items() if number <= newest.get(name, ())
        ]
        if not allowing:
            return None
        oldest = max(oldest, min(allowing))
    return oldest


def _recorded_digests(installed: Distribution) -> dict[str, str]:
    """Returns a wheel's files with hashes, metadata last, without compiled Python and scripts.

    Reads RECORD directly, because ``Distribution.files`` omits missing files since Python 3.12.
    """
    digests = {}
    for path, digest, _ in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        folder, _, name = path.rpartition("/")
        is_added = folder.endswith(".dist-info") and name in _INSTALLERS_FILES
        if not is_added and not {"..", "__pycache__"} & {*path.split("/")}:
            digests[path] = digest
    return dict(sorted(digests.items(), key=lambda item: (".dist-info/" in item[0], item[0])))


def _read_installed(installed: Distribution, path: str, recorded: str) -> bytes:
    """Reads a file and checks that it is the installed one."""
    file = Path(str(installed.locate_file(path)))
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StorageError(f"{file}: cannot read: {error.strerror}") from error
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    if recorded != f"sha256={digest}":
        raise PackagingError(
            f"{file} is not the file that was installed: its sha256 differs from RECORD's; "
            f"install {RUNTIME} again from its checkout"
        )
    return data
