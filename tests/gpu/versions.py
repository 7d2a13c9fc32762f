"""Kernels beside every pair of versions of the two libraries that they are loaded with.

Where a package registry is, and the project's source::

    python tests/gpu/versions.py prepare DIR BUNDLE...

puts what the pairs need into DIR: the project's wheel, wheels of TVM-FFI and zstandard, the library
out of each wheel of nvidia-cutlass-dsl-libs-cu13, compressed, and the bundles, those of
``nvgemm-aot build tests/gpu/versions.yaml``: one for the GPU to be tried, and one of equal
signatures for another architecture. A library that is in DIR already is not downloaded again. On
the machine with the GPU, which needs Python with torch and numpy, and no network::

    python tests/gpu/versions.py run DIR

starts two processes for each pair, pairs side by side: one launches, one fails on purpose. It
prints one table.
The exit code is 1 where any pair failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from zipfile import ZipFile

TVM_FFI = ("0.1.9", "0.1.11", "0.1.15.post2")
"""The oldest that is allowed, the one that serving engines pin, and the newest."""

LIBRARY = ("4.5.2", "4.6.0", "4.7.1", "4.8.1")
"""The oldest that is allowed, and one of each minor version since."""

DISTRIBUTIONS = "nvidia-cutlass-dsl-libs"
"""What the distributions of the library are called, before the CUDA version."""

LIBRARY_NAME = "libcute_dsl_runtime.so"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
LIMIT_S = 120
"""A process that takes longer is ended; by then it should have said where it hangs."""

HERE = Path(__file__).resolve().parent
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 4}]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process said: its answer, or the last line of its errors."""

    answer: dict[str, str] | None
    error: str

    @property
    def text(self) -> str:
        return self.error if self.answer is None else self.answer["result"]


def prepare(folder: Path, bundles: list[Path], python: str) -> None:
    """Fill a folder with all that `run` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for bundle in bundles:
        shutil.copy(bundle, folder)
    for version in TVM_FFI:
        download(f"apache-tvm-ffi=={version}", folder, python)
    download("zstandard", folder, python)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(HERE.parents[1])], check=True)
    for version in LIBRARY:
        pack_library(folder, version, python)
    list_folder(folder)


def pack_library(folder: Path, version: str, python: str, cuda: str = "cu13") -> None:
    """Put the library of a release into a folder, compressed; what is there already stays."""
    packed = folder / packed_name(version, cuda)
    if packed.exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        download(f"{DISTRIBUTIONS}-{cuda}=={version}", Path(temporary), python)
        (wheel,) = Path(temporary).glob("*.whl")
        with ZipFile(wheel) as archive:
            (name,) = (
                name
                for name in archive.namelist()
                if name.endswith(f"lib/{LIBRARY_NAME}") and "stubs" not in name
            )
            data = lzma.compress(archive.read(name), filters=FILTERS)
    packed.write_bytes(data)


def packed_name(version: str, cuda: str) -> str:
    """File of a library in the folder of `prepare`."""
    return f"{LIBRARY_NAME}-{cuda}-{version}.xz"


def list_folder(folder: Path) -> None:
    """Print what is to be carried to the machine with the GPU."""
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>10,} {path.name}")
    print(f"{sum(path.stat().st_size for path in folder.iterdir()):>10,} in all")


def download(requirement: str, folder: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary", ":all:", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, requirement], check=True)


def run(folder: Path) -> int:
    """Try every pair; returns the exit code."""
    bundles = sorted(folder.glob("*.nvgemm"))
    with tempfile.TemporaryDirectory(prefix="nvgemm-versions-") as temporary:
        root = Path(temporary)
        for pattern in ("nvgemm_aot-*.whl", "zstandard-*.whl"):
            unpack(folder, pattern, root / "common")
        for version in TVM_FFI:
            unpack(folder, f"apache_tvm_ffi-{version}-*.whl", root / f"ffi-{version}")
        for version in LIBRARY:
            unpack_library(folder, version, root / f"library-{version}")
        pairs = list(itertools.product(TVM_FFI, LIBRARY))

        def tried(pair: tuple[str, str]) -> list[Outcome]:
            ffi, library = pair
            parts = [root / f"library-{library}", root / f"ffi-{ffi}", root / "common"]
            found = [_child(part, parts, bundles) for part in ("launches", "failure")]
            print(f"tvm-ffi {ffi}, library {library}: tried", file=sys.stderr)
            return found

        with ThreadPoolExecutor(max_workers=min(len(pairs), os.cpu_count() or 1)) as pool:
            tries = list(pool.map(tried, pairs))
    outcomes = [outcome for found in tries for outcome in found]
    rows = [(*pair, *(one.text for one in found)) for pair, found in zip(pairs, tries)]
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    if answers:
        day = datetime.now(timezone.utc).date()
        print(f"{answers[0]['device']}, torch {answers[0]['torch']}, {day}; bundles:")
        print("\n".join(f"  {bundle.name}" for bundle in bundles))
    print("\n| tvm-ffi | runtime library | launches | a launch that CUDA refuses |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    failed = len(outcomes) - len(answers)
    print(f"\n{len(rows)} pairs, {failed} of {len(outcomes)} processes failed")
    return 1 if failed else 0


def unpack(folder: Path, pattern: str, into: Path) -> None:
    """Unpack the one wheel of a folder that has such a name."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder}: {len(found)} files {pattern}, must be 1; run: prepare")
    with ZipFile(found[0]) as archive:
        archive.extractall(into)


def unpack_library(folder: Path, version: str, into: Path, cuda: str = "cu13") -> None:
    """Lay out a packed library as an installed distribution."""
    inner = "lib" if version.startswith("4.5.") else f"{cuda}/lib"
    place = into / "nvidia_cutlass_dsl" / inner / LIBRARY_NAME
    place.parent.mkdir(parents=True)
    place.write_bytes(lzma.decompress((folder / packed_name(version, cuda)).read_bytes()))
    distribution = f"{DISTRIBUTIONS}-{cuda}"
    info = into / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)


def _child(part: str, parts: list[Path], bundles: list[Path]) -> Outcome:
    """One process that has these folders first on its path; it must have loaded from them."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*parts, HERE])),
        "NVGEMM_AOT_BUNDLES": os.pathsep.join(map(str, bundles)),
        "NVGEMM_AOT_CACHE": str(parts[0].parent / "cache"),
    }
    command = [sys.executable, str(HERE / "versions_child.py"), part]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Outcome(answer=None, error=f"FAILED: not done within {LIMIT_S} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        sys.stderr.write(done.stderr)
        return Outcome(answer=None, error=f"FAILED ({done.returncode}): {lines[-1]:.150}")
    answer = json.loads(done.stdout.splitlines()[-1])
    for key, part_of in (("library_file", parts[0]), ("tvm_ffi_file", parts[1])):
        if not Path(answer[key]).is_relative_to(part_of):
            return Outcome(answer=None, error=f"FAILED: {answer[key]} is not in {part_of}")
    return Outcome(answer=answer, error="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("bundles", type=Path, nargs="+")
    preparing.add_argument("--python", default="3.12", help="version on the machine with the GPU")
    commands.add_parser("run").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.folder)
    prepare(arguments.folder, arguments.bundles, arguments.python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
