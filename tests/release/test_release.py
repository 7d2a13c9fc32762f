"""What wheels/release builds, and what it refuses."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from elftools.elf.elffile import ELFFile
from wheel.wheelfile import WheelFile

import kernel_wheels
import nvgemm_runtime
import release_command
import runtime_sbom
import runtime_wheel
import steps
from nvgemm_aot.bundle import repack_runtime
from nvgemm_aot.manifest.parse import load_manifest
from repository import ROOT

SCRIPT = ROOT / "wheels" / "release"
NATIVE_PATH = "nvgemm_runtime/_native.so"
STAND_IN_PATH = "nvgemm_aot/emulator/driver/_emulated_cuda.so"
NATIVE_PART = files("nvgemm_runtime").joinpath("_native.so").read_bytes()
STAND_IN = files("nvgemm_aot.emulator.driver").joinpath("_emulated_cuda.so").read_bytes()
PARTS = {NATIVE_PATH: NATIVE_PART, STAND_IN_PATH: STAND_IN}
HERE = "x86_64" if NATIVE_PART[18] == 62 else "aarch64"  # e_machine
ELSEWHERE = "aarch64" if HERE == "x86_64" else "x86_64"
SBOM = {
    "version": "1.2",
    "compiler": "clang version 22.1.8\nTarget: x86_64",
    "tvm_ffi": "apache-tvm-ffi==0.1.9",
}


# The native parts


def findings(path: str, processor: str = HERE, **changed: Any) -> list[str]:
    """Findings about an installed native part, against limits with some changed."""
    part = replace(runtime_wheel.NATIVE_PARTS[path], **changed)
    return runtime_wheel.native_findings(PARTS[path], processor, part)


def write_wheel(path: Path, parts: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, image in parts.items():
            archive.writestr(name, image)
    return path


@pytest.mark.parametrize("path", PARTS)
def test_a_native_part_for_another_processor_is_found(path: str) -> None:
    assert any("is for EM_" in finding for finding in findings(path, ELSEWHERE))


@pytest.mark.parametrize("path", PARTS)
def test_a_compilers_own_library_is_found(path: str) -> None:
    # Installed native parts come from the machine's compiler, which needs libstdc++.
    assert any("libstdc++.so.6" in finding for finding in findings(path))


def test_another_soname_is_found() -> None:
    assert not any("soname" in finding for finding in findings(STAND_IN_PATH))
    found = findings(STAND_IN_PATH, soname="libnvgemm_aot.so")
    assert "has the soname libcuda.so.1; libnvgemm_aot.so is allowed" in found


def test_a_path_to_search_for_libraries_is_found() -> None:
    image = with_run_path(STAND_IN)
    part = runtime_wheel.NATIVE_PARTS[STAND_IN_PATH]
    found = runtime_wheel.native_findings(image, HERE, part)
    assert "looks for libraries in libcuda.so.1; no such path is allowed" in found


def with_run_path(image: bytes) -> bytes:
    """An ELF file that had DT_RUNPATH in the place of its first dynamic tag, with its soname."""
    section = ELFFile(io.BytesIO(image)).get_section_by_name(".dynamic")
    (soname,) = section.iter_tags("DT_SONAME")
    entry = struct.pack("<QQ", 29, soname.entry.d_val)  # DT_RUNPATH
    begin = section["sh_offset"]
    return image[:begin] + entry + image[begin + len(entry) :]


def test_a_wheel_with_findings_ends_the_release(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "some.whl", PARTS)
    with pytest.raises(SystemExit) as error:
        runtime_wheel.check(wheel, HERE)
    for path in PARTS:
        assert f"some.whl: {path} needs libstdc++.so.6" in str(error.value)


@pytest.mark.parametrize("path", PARTS)
def test_a_wheel_without_a_native_part_ends_the_release(path: str, tmp_path: Path) -> None:
    parts = {name: image for name, image in PARTS.items() if name != path}
    with pytest.raises(SystemExit, match=rf"some\.whl: {path} is missing"):
        runtime_wheel.check(write_wheel(tmp_path / "some.whl", parts), HERE)


def test_a_library_that_a_tool_put_into_a_wheel_ends_the_release(tmp_path: Path) -> None:
    grafted = {**PARTS, "nvgemm_aot.libs/libcuda-1c0ffee2.so.1": STAND_IN}
    with pytest.raises(SystemExit, match=r"libcuda-1c0ffee2\.so\.1 is an ELF file; only "):
        runtime_wheel.check(write_wheel(tmp_path / "some.whl", grafted), HERE)


@pytest.mark.slow
def test_native_parts_are_tried_out_in_the_wheel_and_not_where_they_are_installed(
    tmp_path: Path,
) -> None:
    site = Path(nvgemm_runtime.__file__).parents[1]
    sources = {
        str(file.relative_to(site)): file.read_bytes()
        for file in sorted((site / "nvgemm_runtime").rglob("*.py"))
    }
    runtime_wheel.try_out(write_wheel(tmp_path / "whole.whl", {**sources, **PARTS}))
    with pytest.raises(SystemExit, match=r"empty\.whl: another installation was tried"):
        runtime_wheel.try_out(write_wheel(tmp_path / "empty.whl", {}))
    damaged = {**sources, NATIVE_PATH: NATIVE_PART, STAND_IN_PATH: STAND_IN[:3000]}
    with pytest.raises(SystemExit, match=r"this failed: .*native_trial"):
        runtime_wheel.try_out(write_wheel(tmp_path / "damaged.whl", damaged))


def test_a_native_part_that_ends_the_process_ends_the_release(tmp_path: Path) -> None:
    wheel = tmp_path / "broken.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch.py", "import os; os.abort()")
    with pytest.raises(SystemExit, match=r"this failed: .*native_trial"):
        runtime_wheel.try_out(wheel)


def test_the_headers_and_the_version_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"{runtime_wheel.tvm_ffi_requirement()}"' in project
    assert f'version = "{runtime_wheel.project_version()}"' in project


# The SBOM of the runtime's wheel


def test_the_sbom_names_what_the_native_part_contains() -> None:
    parts = {NATIVE_PATH: b"code", STAND_IN_PATH: b"stand-in"}
    document = json.loads(runtime_sbom.render(native_parts=parts, **SBOM))
    components = {one["name"]: one for one in document["components"]}
    for path, content in parts.items():
        digest = {"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}
        assert components[path]["hashes"] == [digest]
    for name in ("libc++", "libc++abi", "libunwind"):
        assert (components[name]["version"], components[name]["scope"]) == ("22.1.8", "required")
    for name in ("apache-tvm-ffi", "ziglang"):
        assert components[name]["scope"] == "excluded"
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/nvgemm-aot@1.2"
    assert "timestamp" not in document["metadata"]


@pytest.mark.slow
def test_the_sbom_depends_on_content_alone() -> None:
    text = runtime_sbom.render(native_parts={"a.so": b"code"}, **SBOM)
    program = (
        "import sys, runtime_sbom; "
        f"sys.stdout.write(runtime_sbom.render(native_parts={{'a.so': b'code'}}, **{SBOM!r}))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPT, env={"PYTHONHASHSEED": "1"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert elsewhere.stdout == text
    other = json.loads(runtime_sbom.render(native_parts={"a.so": b"other"}, **SBOM))
    assert other["serialNumber"] != json.loads(text)["serialNumber"]


def test_another_compiler_than_clang_is_refused() -> None:
    with pytest.raises(SystemExit, match="must begin with 'clang version'"):
        runtime_sbom.render(native_parts={}, **{**SBOM, "compiler": "gcc 14"})


def runtime_like_wheel(folder: Path) -> Path:
    path = folder / "nvgemm_aot-0.1.0-py3-none-any.whl"
    with WheelFile(str(path), "w") as wheel:
        for part in runtime_wheel.NATIVE_PARTS:
            wheel.writestr(part, b"code")
        wheel.writestr(
            "nvgemm_aot-0.1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: nvgemm-aot\nVersion: 0.1.0\n",
        )
        wheel.writestr(
            "nvgemm_aot-0.1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        )
    return path


def test_the_sbom_is_among_the_recorded_metadata_of_the_wheel(tmp_path: Path) -> None:
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        wheel = runtime_wheel.with_sbom(runtime_like_wheel(tmp_path / name), SBOM["compiler"])
        contents.append(wheel.read_bytes())
        with WheelFile(str(wheel)) as content:  # reading checks a file against RECORD
            text = content.read("nvgemm_aot-0.1.0.dist-info/sboms/nvgemm-aot.cdx.json")
    assert json.loads(text)["specVersion"] == "1.6"
    assert contents[0] == contents[1]


# Kernel wheels


def test_every_manifest_of_the_project_is_ready_made_or_an_example() -> None:
    names = {path.stem for path in (ROOT / "manifests").glob("*.yaml")}
    assert names == {*kernel_wheels.READY_MADE, *kernel_wheels.EXAMPLES}


@pytest.mark.parametrize("name", kernel_wheels.READY_MADE)
def test_a_ready_made_manifest_is_valid_for_every_target(name: str, tmp_path: Path) -> None:
    found = kernel_wheels.find(name, ("aarch64", "x86_64"), kernel_wheels.CUDAS)
    declared = yaml.safe_load(found.manifest.read_text())
    count = len(declared["targets"])
    declared["targets"] = kernel_wheels.expand_targets(
        declared["targets"], found.processors, found.cudas
    )
    file = tmp_path / found.manifest.name
    file.write_text(yaml.safe_dump(declared, sort_keys=False))
    targets = {one.target.key for one in load_manifest(file).targets}
    assert len(targets) == 4 * count
    assert {key.split("-", 1)[1] for key in targets} == {
        f"linux_{processor}-{cuda}"
        for processor in found.processors
        for cuda in kernel_wheels.CUDAS
    }


def test_targets_are_for_every_platform_and_keep_a_device_that_is_named() -> None:
    targets = ["sm_100f", "sm_90a", {"arch": "sm_90a", "device": "H100", "cuda": "cu12"}]
    assert kernel_wheels.expand_targets(targets, ["aarch64", "x86_64"], ["cu13"]) == [
        {"arch": "sm_100f", "platform": "linux_aarch64", "cuda": "cu13"},
        {"arch": "sm_100f", "platform": "linux_x86_64", "cuda": "cu13"},
        {"arch": "sm_90a", "platform": "linux_aarch64", "cuda": "cu13"},
        {"arch": "sm_90a", "platform": "linux_x86_64", "cuda": "cu13"},
        {"arch": "sm_90a", "device": "H100", "platform": "linux_aarch64", "cuda": "cu13"},
        {"arch": "sm_90a", "device": "H100", "platform": "linux_x86_64", "cuda": "cu13"},
    ]


def test_a_manifest_that_is_not_there_ends_the_release() -> None:
    with pytest.raises(SystemExit, match=r"wheels/release: lama: no such file"):
        kernel_wheels.find("lama", ["x86_64"], ["cu13"])


def test_a_manifest_is_looked_for_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(release_command, "require", lambda *modules: None)
    monkeypatch.setattr(runtime_wheel, "build", lambda *_: begun.append("a wheel"))
    with pytest.raises(SystemExit, match="lama"):
        release_command.main(["--output", str(tmp_path), "--kernels", "lama"])
    assert begun == []


TARGETS = kernel_wheels.expand_targets(["sm_90a"], ["aarch64", "x86_64"], ["cu12", "cu13"])
KEYS = [f"{one['arch']}-{one['platform']}-{one['cuda']}" for one in TARGETS]


def built(**incomplete: int) -> dict[str, Any]:
    """What a build prints, with so many incomplete problems of a target."""
    rows = [{"target": key, "path": f"{key}.nvgemm", "incomplete": 0} for key in KEYS]
    return {"bundles": [{**row, **incomplete} for row in rows]}


def test_bundles_of_a_platform_go_into_one_wheel() -> None:
    assert kernel_wheels.bundles_by_platform(built(), TARGETS) == {
        "linux_aarch64": [Path(f"sm_90a-linux_aarch64-{cuda}.nvgemm") for cuda in ("cu12", "cu13")],
        "linux_x86_64": [Path(f"sm_90a-linux_x86_64-{cuda}.nvgemm") for cuda in ("cu12", "cu13")],
    }


def test_a_target_without_a_bundle_ends_the_release() -> None:
    found = built()
    del found["bundles"][2]
    with pytest.raises(SystemExit, match="no kernel was built for target sm_90a-linux_x86_64-cu12"):
        kernel_wheels.bundles_by_platform(found, TARGETS)


def test_kernels_that_were_lost_with_their_compiler_end_the_release() -> None:
    with pytest.raises(SystemExit, match="3 problems may get more kernels"):
        kernel_wheels.bundles_by_platform(built(incomplete=3), TARGETS)


# The command


def test_a_second_build_with_other_bytes_ends_the_release(tmp_path: Path) -> None:
    wheels = []
    for folder, content in (("a", b"same"), ("b", b"same"), ("c", b"other")):
        (tmp_path / folder).mkdir()
        wheels.append(tmp_path / folder / "one.whl")
        wheels[-1].write_bytes(content)
    release_command.compare(wheels[:1], wheels[1:2])
    with pytest.raises(SystemExit, match=r"one\.whl: a second build gave other bytes"):
        release_command.compare(wheels[:1], wheels[2:])


def test_checksums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    wheels = [tmp_path / name for name in ("b.whl", "a.whl")]
    for wheel in wheels:
        wheel.write_text(wheel.name)
    (tmp_path / "SHA256SUMS").write_text(release_command.checksums(wheels))
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    wheels[0].write_text("changed")
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 1


def test_both_platforms_and_cudas_are_built_unless_named(tmp_path: Path) -> None:
    options = release_command.parse(["--output", str(tmp_path / "dist")])
    assert (options.platform, options.cuda) == (["aarch64", "x86_64"], ["cu12", "cu13"])
    words = ["--output", str(tmp_path), "--platform", "x86_64", "--cuda", "cu13"]
    options = release_command.parse(words)
    assert (options.platform, options.cuda) == (["x86_64"], ["cu13"])


@pytest.mark.parametrize(
    "words",
    [
        ["--runtime-only", "--kernels-only"],
        ["--runtime-only", "--kernels", "quickstart"],
        ["--platform", "riscv64"],
    ],
)
def test_options_that_exclude_each_other_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        release_command.parse(["--output", str(tmp_path), *words])
    assert error.value.code == 2


def test_a_directory_with_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.whl").write_text("")
    with pytest.raises(SystemExit):
        release_command.parse(["--output", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


def test_a_missing_module_is_named_with_what_installs_it() -> None:
    release_command.require("json")
    with pytest.raises(SystemExit, match=r"no_such\.module is not installed; run .*release\]"):
        release_command.require("json", "no_such.module")


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(SystemExit, match="wheels/release: this failed: false --all"):
        steps.run("false", "--all")
    with pytest.raises(SystemExit, match="this failed: false"):
        steps.read("false")


@pytest.mark.slow
def test_kernel_wheels_of_both_platforms_are_built_checked_and_listed(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="links kernels for Arm")
    manifest = tmp_path / "tiny.yaml"
    manifest.write_text(
        "version: 1\nname: tiny\ndescription: One GEMM.\ntargets: [sm_90a]\ncandidates: 1\n"
        "providers: [cutlass_operators]\n"
        "gemms:\n  - {dtype: bf16, mnk: [[64, 4096, 4096]]}\n"
    )
    words = ["--kernels-only", "--kernels", str(manifest), "--cuda", "cu13"]
    release_command.main(["--output", str(tmp_path / "dist"), *words])
    names = [
        f"nvgemm_kernels_tiny-{nvgemm_runtime.__version__}-py3-none-manylinux_2_28_{processor}.whl"
        for processor in ("aarch64", "x86_64")
    ]
    found = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert found == ["SHA256SUMS", *names]
    sums = (tmp_path / "dist" / "SHA256SUMS").read_text()
    assert [line.split()[1] for line in sums.splitlines()] == names
    for name, processor in zip(names, ("aarch64", "x86_64")):
        with zipfile.ZipFile(tmp_path / "dist" / name) as wheel:
            assert f"nvgemm_kernels_tiny/sm_90a-linux_{processor}-cu13.nvgemm" in wheel.namelist()
            info = f"nvgemm_kernels_tiny-{nvgemm_runtime.__version__}.dist-info"
            metadata = wheel.read(f"{info}/METADATA").decode()
        assert "Summary: One GEMM." in metadata


def test_a_release_and_a_repacked_wheel_have_the_same_native_parts() -> None:
    assert set(runtime_wheel.NATIVE_PARTS) == set(repack_runtime.NATIVE_PARTS)
