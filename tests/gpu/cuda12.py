"""Kernels for CUDA 12 beside the library of CUDA 12, in a process without torch.

Where a package registry is, and the project's source::

    nvgemm-aot build tests/gpu/cuda12.yaml
    python tests/gpu/cuda12.py prepare DIR dist/cuda12-*.nvgemm

puts what is needed into DIR: the project's wheel, four other wheels (`PACKAGES`), the library
out of the wheel of nvidia-cutlass-dsl-libs-cu12, compressed, and the bundle. On the machine with
the GPU, whose driver may be of CUDA 12 or newer, and which needs Python alone, no network::

    python3 tests/gpu/cuda12.py run DIR

starts one process that loads the library and each kernel, and launches it on memory of CUDA's
driver with whole numbers whose sums are exact. It prints one table. The exit code is 1 where any
kernel failed, or there was none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from versions import download, list_folder, pack_library, unpack, unpack_library

PACKAGES = {
    "apache-tvm-ffi": "==0.1.15.post2",
    "zstandard": "==0.25.0",
    "numpy": "==2.2.6",
    "typing-extensions": "==4.15.0",
}
"""All that a process needs besides the project's wheel; typing-extensions is TVM-FFI's."""

LIBRARY = "4.8.1"
CUDA = "cu12"
LIMIT_S = 240
CHILD = Path(__file__).resolve().with_name("without_torch.py")


def prepare(folder: Path, bundle: Path, python: str) -> None:
    """Fill a folder with all that `run` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(bundle, folder)
    for name, version in PACKAGES.items():
        download(f"{name}{version}", folder, python)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(CHILD.parents[2])], check=True)
    pack_library(folder, LIBRARY, python, CUDA)
    list_folder(folder)


def run(folder: Path) -> int:
    """Launch every kernel; returns the exit code."""
    (bundle,) = folder.glob("*.nvgemm")
    with tempfile.TemporaryDirectory(prefix="nvgemm-cuda12-") as temporary:
        root = Path(temporary)
        for name in ("nvgemm_aot", *PACKAGES):
            unpack(folder, f"{name.replace('-', '_')}-*.whl", root)
        unpack_library(folder, LIBRARY, root, CUDA)
        done = subprocess.run(
            # -S: without this Python's own packages, of which torch may be one.
            [sys.executable, "-S", str(CHILD), str(bundle), "cuda"],
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        sys.stderr.write(done.stderr)
        return report(
            [json.loads(line) for line in done.stdout.splitlines()], root, done.returncode
        )


def report(lines: list[dict[str, str]], root: Path, code: int) -> int:
    """Print what a process said, one object a line; returns the exit code."""
    facts = next((line for line in lines if "library" in line), None)
    if facts is not None:
        if not Path(facts["library"]).is_relative_to(root):
            print(f"FAILED: {facts['library']} is not in {root}")
            return 1
        print(
            f"{facts['device']}, driver of CUDA {facts['driver']}, {CUDA} library {LIBRARY}, "
            "no torch"
        )
    kernels = [line for line in lines if "kernel" in line]
    print("\n| kernel | computes | result |\n| --- | --- | --- |")
    for line in kernels:
        print(f"| {line['kernel']} | {line['problem']} | {line['result']} |")
    failed = sum(line["result"] != "exact" for line in kernels)
    ended = f", and the process ended with {code}" if code else ""
    print(f"\n{len(kernels)} kernels, {failed} failed{ended}")
    return 1 if failed or code or not kernels else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("bundle", type=Path)
    preparing.add_argument("--python", default="3.12", help="version on the machine with the GPU")
    commands.add_parser("run").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.folder)
    prepare(arguments.folder, arguments.bundle, arguments.python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
