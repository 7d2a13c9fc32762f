from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from nvgemm_aot.bundle import repack_runtime
from nvgemm_aot.bundle.repack_runtime import (
    encode_runtime_wheel,
    packing_refusal,
    platform_tag,
    refuse_other_runtimes,
    runtime_platform,
)
from nvgemm_runtime.errors import PackagingError, StorageError

NATIVE_PART = files("nvgemm_runtime").joinpath("_native.so").read_bytes()
STAND_IN_PATH = "nvgemm_aot/emulator/driver/_emulated_cuda.so"
STAND_IN = files("nvgemm_aot.emulator.driver").joinpath("_emulated_cuda.so").read_bytes()
PARTS = {"nvgemm_runtime/_native.so": NATIVE_PART, STAND_IN_PATH: STAND_IN}
INFO = "nvgemm_aot-1.2.dist-info"
MODULE = b"__version__ = '1.2'\n"
FILES = {
    **PARTS,
    "nvgemm_runtime/_native.json": b"{}",
    "nvgemm_aot/__init__.py": MODULE,
    f"{INFO}/METADATA": b"Metadata-Version: 2.4\nName: nvgemm-aot\nVersion: 1.2\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
    f"{INFO}/entry_points.txt": b"[console_scripts]\nnvgemm-aot = nvgemm_aot:main\n",
    f"{INFO}/licenses/LICENSE": b"Apache",
}
"""What a wheel brings."""

ADDED = {
    "nvgemm_aot/__pycache__/__init__.cpython-311.pyc": None,
    "../../../bin/nvgemm-aot": b"#!python",
    f"{INFO}/INSTALLER": b"pip",
    f"{INFO}/REQUESTED": b"",
    f"{INFO}/direct_url.json": b'{"dir_info": {}, "url": "file:///checkout"}',
    f"{INFO}/RECORD": None,
}
"""What an installer adds; a file of None has no hash."""


def record_line(path: str, data: bytes | None) -> str:
    if data is None:
        return f"{path},,\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def install(site: Path, **changed: bytes) -> Distribution:
    """Install by hand, with metadata files other than usual."""
    site = site / "lib" / "python3" / "site-packages"
    every = {**FILES, **ADDED}
    every |= {f"{INFO}/{name}.json": data for name, data in changed.items()}
    for path, data in every.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data or b"compiled")
    record = "".join(record_line(path, data) for path, data in every.items())
    (site / INFO / "RECORD").write_text(record)
    return PathDistribution(site / INFO)


def test_a_wheel_holds_what_a_wheel_brought_and_nothing_that_an_installer_added(
    tmp_path: Path,
) -> None:
    filename, data = encode_runtime_wheel(install(tmp_path))
    path = tmp_path / filename
    path.write_bytes(data)
    with WheelFile(str(path)) as wheel:  # reading checks a file against RECORD
        assert {*wheel.namelist()} == {*FILES, f"{INFO}/RECORD"}
        for name in FILES.keys() - {f"{INFO}/WHEEL"}:
            assert wheel.read(name) == FILES[name]
        tag = filename.removesuffix(".whl").partition("-py3-none-")[2]
        assert f"Tag: py3-none-{tag}\n" in wheel.read(f"{INFO}/WHEEL").decode()
    name, version, _, tags = parse_wheel_filename(filename)
    assert (name, str(version)) == ("nvgemm-aot", "1.2")
    assert tags & {*sys_tags()}, "pip takes it here"


def test_equal_installations_give_equal_bytes(tmp_path: Path) -> None:
    first, second = install(tmp_path / "first"), install(tmp_path / "second")
    assert encode_runtime_wheel(first) == encode_runtime_wheel(second)


def test_what_was_packed_and_installed_gives_the_same_wheel_again(tmp_path: Path) -> None:
    filename, data = encode_runtime_wheel(install(tmp_path))
    wheel, site = tmp_path / filename, tmp_path / "again"
    wheel.write_bytes(data)
    command = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index")
    subprocess.run([*command, "--target", site, wheel], check=True)
    assert encode_runtime_wheel(PathDistribution(site / INFO)) == (filename, data)


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    installed = install(tmp_path)
    place = Path(str(installed.locate_file("nvgemm_aot/__init__.py")))
    place.write_bytes(MODULE + b"# changed")
    with pytest.raises(PackagingError, match=r"nvgemm_aot/__init__\.py is not the file that was"):
        encode_runtime_wheel(installed)
    place.unlink()
    with pytest.raises(StorageError, match=r"__init__\.py: cannot read: No such file"):
        encode_runtime_wheel(installed)


def test_an_editable_installation_says_how_its_wheel_is_made(tmp_path: Path) -> None:
    direct = {"dir_info": {"editable": True}, "url": "file:///my%20checkout"}
    problem = packing_refusal(install(tmp_path, direct_url=json.dumps(direct).encode()))
    assert problem is not None
    assert "editable installation" in problem
    assert problem.endswith("pip wheel --no-deps --wheel-dir DIRECTORY '/my checkout'")
    assert packing_refusal(install(tmp_path)) is None


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_native_part_is_an_error(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FILES, part)
    with pytest.raises(PackagingError, match=f"RECORD .* does not list {re.escape(part)}"):
        encode_runtime_wheel(install(tmp_path))


# The platform tag


@pytest.mark.parametrize(
    ("versions", "minor"),
    [
        (["GLIBC_2.2.5", "GLIBC_2.27", "GLIBCXX_3.4.21", "CXXABI_1.3.9", "GCC_3.0"], 28),
        (["GLIBC_2.34"], 34),
        (["GLIBC_2.38"], 38),
        (["GLIBC_2.14", "GLIBCXX_3.4.26"], 31),
        (["GLIBC_2.14", "CXXABI_1.3.13"], 34),
        (["GLIBC_2.38", "GLIBCXX_3.4.32"], 39),
        (["GLIBCXX_3.4.34"], None),
        (["GLIBC_ABI_DT_RELR"], None),
        (["OTHER_1.0"], None),
    ],
)
def test_a_tag_is_as_new_as_the_newest_symbol(versions: list[str], minor: int | None) -> None:
    assert repack_runtime._oldest_glibc(versions) == minor


def test_the_native_parts_of_this_machine_have_a_tag_that_pip_takes_here() -> None:
    assert platform_tag(PARTS) in {tag.platform for tag in sys_tags()}


def test_a_library_that_nothing_brings_makes_a_wheel_for_this_machine_alone() -> None:
    foreign = NATIVE_PART.replace(b"libtvm_ffi.so", b"libfoo_bar.so")
    assert platform_tag({**PARTS, "nvgemm_runtime/_native.so": foreign}).startswith("linux_")
    foreign = STAND_IN.replace(b"libgcc_s.so.1", b"libcuda.so.12")
    assert platform_tag({**PARTS, STAND_IN_PATH: foreign}).startswith("linux_")


def test_the_tag_is_that_of_the_part_with_the_newest_symbols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    minors = iter([28, 39])
    monkeypatch.setattr(repack_runtime, "_oldest_glibc", lambda versions: next(minors))
    assert platform_tag(PARTS).startswith("manylinux_2_39_")


def test_parts_for_two_processors_are_refused() -> None:
    other = bytes([183 if STAND_IN[18] == 62 else 62])  # EM_AARCH64, EM_X86_64
    foreign = STAND_IN[:18] + other + STAND_IN[19:]
    with pytest.raises(PackagingError, match=r"_emulated_cuda\.so is for .*; one processor is"):
        platform_tag({**PARTS, STAND_IN_PATH: foreign})


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("image", [b"", b"no ELF file", NATIVE_PART[:3000]])
def test_a_damaged_native_part_is_refused(image: bytes, part: str) -> None:
    with pytest.raises(PackagingError, match=rf"{part}: .*; install nvgemm-aot again"):
        platform_tag({**PARTS, part: image})


# Other wheels of the runtime

WRITTEN = "nvgemm_aot-0.2.0-py3-none-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    "name",
    [
        "nvgemm_aot-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
        "nvgemm_aot-0.2.0-py3-none-manylinux_2_34_x86_64.whl",
        "nvgemm_aot-0.2.0-py3-none-linux_x86_64.whl",
    ],
)
def test_another_wheel_of_the_runtime_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(PackagingError, match=f"{name} is another runtime wheel than"):
        refuse_other_runtimes(tmp_path, WRITTEN)


def test_wheels_that_pip_does_not_confuse_are_left(tmp_path: Path) -> None:
    refuse_other_runtimes(tmp_path / "missing", WRITTEN)
    for name in (WRITTEN, "nvgemm_aot-0.2.0-py3-none-manylinux_2_28_aarch64.whl", "other.whl"):
        (tmp_path / name).touch()
    refuse_other_runtimes(tmp_path, WRITTEN)


def test_platforms_are_those_of_targets() -> None:
    assert runtime_platform(WRITTEN) == "linux_x86_64"
    assert runtime_platform("nvgemm_aot-1-py3-none-linux_aarch64.whl") == "linux_aarch64"
