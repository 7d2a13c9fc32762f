"""The runtime's wheel for one processor: built by zig, with a check of its native part."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
import tempfile
import zipfile
from importlib import resources
from pathlib import Path
from platform import machine

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

import runtime_sbom
from steps import REPOSITORY, read, run_module, stop

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
"""By processor: the machine that the native part's ELF header must name."""

NEWEST_GLIBC = (2, 28)
"""As the wheel's tag, manylinux_2_28, promises."""

ALLOWED_LIBRARIES = re.compile(
    r"(libtorch_cpu|libtvm_ffi)\.so|(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux-.*\.so\.\d+"
)
"""Libraries that torch, TVM-FFI and glibc bring."""

NATIVE_PART = "nvgemm_runtime/_native.so"


def check(wheel: Path, processor: str) -> None:
    """Stop if the native part of a wheel does not run wherever the wheel's tag says.

    It is tried out where it is for this machine's processor; then torch must be installed.
    """
    with zipfile.ZipFile(wheel) as content:
        findings = native_findings(content.read(NATIVE_PART), processor)
    if findings:
        stop("\n".join(f"{wheel.name}: {NATIVE_PART} {finding}" for finding in findings))
    if processor == machine():
        try_out(wheel)


def try_out(wheel: Path) -> None:
    """Stop if the native part does not load beside torch, or an error of its operators is lost."""
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as content:
            content.extractall(scratch)
        trial = Path(__file__).with_name("native_trial.py")
        tried = read(sys.executable, trial, PYTHONPATH=scratch)
        if not Path(tried).is_relative_to(scratch):
            stop(f"{wheel.name}: another installation was tried: {tried}")


def native_findings(image: bytes, processor: str) -> list[str]:
    """What keeps a native part from running where its wheel's tag says; empty if nothing does."""
    elf = ELFFile(io.BytesIO(image))
    findings = []
    if elf["e_machine"] != MACHINES[processor]:
        findings.append(f"is for {elf['e_machine']}; {MACHINES[processor]} is allowed")
    for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
        if not ALLOWED_LIBRARIES.fullmatch(tag.needed):
            findings.append(f"needs {tag.needed}, which no dependency of the wheel brings")
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for library, versions in section.iter_versions():
                for version in versions:
                    number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
                    if number is None:
                        findings.append(
                            f"needs {version.name} of {library.name}; GLIBC_ is allowed"
                        )
                    elif (int(number[1]), int(number[2])) > NEWEST_GLIBC:
                        findings.append(f"needs {version.name}; GLIBC_2.28 is the newest allowed")
    return findings


def build(processor: str, output: Path, cache: Path | None = None) -> Path:
    """Build the wheel into a directory; its tag is ``manylinux_2_28`` and it contains an SBOM.

    ``cache`` is used in place of the user's cache of zig, which keeps objects.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tools = Path(scratch)
        zig = Path(str(resources.files("ziglang"))) / "zig"
        compiler = tools / "c++"
        compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(str(zig))} c++ "$@"\n')
        compiler.chmod(0o755)
        platform = f"manylinux_2_28_{processor}"
        built = tools / "built"
        options = {
            "CMAKE_TOOLCHAIN_FILE": REPOSITORY / "cmake/zig.cmake",
            "NVGEMM_ZIG_PROCESSOR": processor,
            "NVGEMM_ZIG_CXX": compiler,
            "NVGEMM_TVM_FFI_LIBRARY": _tvm_ffi_library(platform, tools),
        }
        pins = tools / "pins.txt"
        pins.write_text(_build_pins())
        environment = {"PIP_CONSTRAINT": str(pins), "PIP_BUILD_CONSTRAINT": str(pins)}
        environment |= {} if cache is None else {"ZIG_GLOBAL_CACHE_DIR": str(cache)}
        run_module("pip", "wheel", "-q", "--no-deps", "--wheel-dir", built,
            *(f"--config-settings=cmake.define.{name}={value}" for name, value in options.items()),
            REPOSITORY, **environment)  # fmt: skip
        run_module("wheel", "tags", "--remove", "--platform-tag", platform, *built.glob("*.whl"))
        wheel = with_sbom(next(built.glob("*.whl")), read(compiler, "--version"))
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, output / wheel.name))


def tvm_ffi_requirement() -> str:
    """The TVM-FFI that the native part is built with, as pyproject.toml pins it."""
    found = re.search(r'^requires = .*"(apache-tvm-ffi==[^"]+)"', _project(), re.MULTILINE)
    if found is None:
        stop("pyproject.toml: build-system.requires has no apache-tvm-ffi==VERSION")
    return found[1]


def project_version() -> str:
    """The version that pyproject.toml states."""
    found = re.search(r'^version = "([^"]+)"', _project(), re.MULTILINE)
    if found is None:
        stop("pyproject.toml: project.version is missing")
    return found[1]


def _project() -> str:
    return (REPOSITORY / "pyproject.toml").read_text()


def _build_pins() -> str:
    """The build backend's version of constraints.txt: a wheel names the backend that made it."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("scikit-build-core=="))


def _tvm_ffi_library(platform: str, folder: Path) -> Path:
    """The library that the target's wheel of TVM-FFI contains."""
    run_module("pip", "download", "-q", "--no-deps", "--only-binary=:all:",
        "--platform", platform, "--dest", folder, tvm_ffi_requirement())  # fmt: skip
    (package,) = folder.glob("apache_tvm_ffi-*.whl")
    library = folder / "libtvm_ffi.so"
    with zipfile.ZipFile(package) as wheel:
        library.write_bytes(wheel.read("tvm_ffi/lib/libtvm_ffi.so"))
    return library


def with_sbom(wheel: Path, compiler: str) -> Path:
    """The same wheel, with an SBOM among its metadata (PEP 770)."""
    unpacked = wheel.parent / "unpacked"
    run_module("wheel", "unpack", "--dest", unpacked, wheel)
    (root,) = unpacked.iterdir()
    (info,) = root.glob("*.dist-info")
    sbom = runtime_sbom.render(
        version=project_version(),
        native_part=NATIVE_PART,
        content=(root / NATIVE_PART).read_bytes(),
        compiler=compiler,
        tvm_ffi=tvm_ffi_requirement(),
    )
    (info / "sboms").mkdir()
    (info / "sboms" / "nvgemm-aot.cdx.json").write_text(sbom)
    wheel.unlink()
    run_module("wheel", "pack", "--dest-dir", wheel.parent, root)
    return wheel
