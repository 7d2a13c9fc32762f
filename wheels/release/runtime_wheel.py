"""The runtime's wheel for one processor: built by zig, with a check of its native parts."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from platform import machine

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

import runtime_sbom
from steps import REPOSITORY, read, run_module, stop

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
"""By processor: the machine that a native part's ELF header must name."""

NEWEST_GLIBC = (2, 28)
"""As the wheel's tag, manylinux_2_28, promises."""

_GLIBC = r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux-.*\.so\.\d+"


@dataclass(frozen=True, kw_only=True)
class NativePart:
    """Limits of one ELF file in the wheel.

    Attributes:
        soname: Name under which the loader knows it once it is loaded.
        libraries: Libraries that it may need.
    """

    soname: str
    libraries: re.Pattern[str]


NATIVE_PARTS = {
    # torch and TVM-FFI bring their libraries.
    "nvgemm_runtime/_native.so": NativePart(
        soname="libnvgemm_aot.so", libraries=re.compile(rf"(libtorch_cpu|libtvm_ffi)\.so|{_GLIBC}")
    ),
    # The emulator's stand-in for the CUDA driver, which takes the driver's place once loaded.
    "nvgemm_aot/emulator/driver/_emulated_cuda.so": NativePart(
        soname="libcuda.so.1", libraries=re.compile(_GLIBC)
    ),
}
"""ELF files that the wheel must have, and no others, by their paths in it."""


def check(wheel: Path, processor: str) -> None:
    """Stop if a native part of a wheel does not run wherever the wheel's tag says.

    They are tried out where they are for this machine's processor; then torch must be installed.
    """
    with zipfile.ZipFile(wheel) as content:
        images = {name: content.read(name) for name in content.namelist()}
    parts = {name: image for name, image in images.items() if image.startswith(b"\x7fELF")}
    findings = [f"{name} is missing" for name in NATIVE_PARTS.keys() - parts.keys()]
    for name, image in parts.items():
        if name in NATIVE_PARTS:
            found = native_findings(image, processor, NATIVE_PARTS[name])
        else:
            found = [f"is an ELF file; only {' and '.join(NATIVE_PARTS)} are allowed"]
        findings += [f"{name} {finding}" for finding in found]
    if findings:
        stop("\n".join(f"{wheel.name}: {finding}" for finding in findings))
    if processor == machine():
        try_out(wheel)


def try_out(wheel: Path) -> None:
    """Stop if a native part does not load beside torch, or an error of an operator is lost."""
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as content:
            content.extractall(scratch)
        trial = Path(__file__).with_name("native_trial.py")
        tried = read(sys.executable, trial, *NATIVE_PARTS, PYTHONPATH=scratch)
        if not Path(tried).is_relative_to(scratch):
            stop(f"{wheel.name}: another installation was tried: {tried}")


def native_findings(image: bytes, processor: str, part: NativePart) -> list[str]:
    """Lists what keeps a native part from running where its wheel's tag says."""
    elf = ELFFile(io.BytesIO(image))
    findings = []
    if elf["e_machine"] != MACHINES[processor]:
        findings.append(f"is for {elf['e_machine']}; {MACHINES[processor]} is allowed")
    dynamic = elf.get_section_by_name(".dynamic")
    sonames = [tag.soname for tag in dynamic.iter_tags("DT_SONAME")]
    if sonames != [part.soname]:
        findings.append(f"has the soname {' '.join(sonames) or 'none'}; {part.soname} is allowed")
    for tag in (*dynamic.iter_tags("DT_RPATH"), *dynamic.iter_tags("DT_RUNPATH")):
        path = tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath
        findings.append(f"looks for libraries in {path}; no such path is allowed")
    for tag in dynamic.iter_tags("DT_NEEDED"):
        if not part.libraries.fullmatch(tag.needed):
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
        native_parts={name: (root / name).read_bytes() for name in NATIVE_PARTS},
        compiler=compiler,
        tvm_ffi=tvm_ffi_requirement(),
    )
    (info / "sboms").mkdir()
    (info / "sboms" / "nvgemm-aot.cdx.json").write_text(sbom)
    wheel.unlink()
    run_module("wheel", "pack", "--dest-dir", wheel.parent, root)
    return wheel
