"""A provider in a package of its own, from its manifest to a launch: tests/provider_package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from zipfile import ZipFile

import pytest

from foreign_packages import PACKAGE, BuiltPackage
from nvgemm_aot.providers import cute_dsl, interface
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match
from synthetic_facts import H200

pytestmark = pytest.mark.slow

KEY = "mm/tn/bf16xbf16/fp32/bf16"


def test_the_command_builds_its_kernels_and_states_its_version(built_package: BuiltPackage) -> None:
    (made,) = built_package.document["bundles"]
    assert made["providers"] == {"tiny_gemm": 1}
    assert not made["failures"]
    with Bundle(built_package.bundle) as bundle:
        (kernel,) = bundle.header.kernels
        assert kernel.provider == "tiny_gemm"
        assert kernel.alignment_bytes == 2
        assert bundle.header.toolchain["nvgemm-tiny-gemm"] == "1.0"
    with ZipFile(built_package.document["wheels"][0]["path"]) as wheel:
        assert any(name.endswith(".nvgemm") for name in wheel.namelist())


def test_verify_proves_what_its_kernel_shows_and_says_what_it_does_not(
    built_package: BuiltPackage,
) -> None:
    document = json.loads(built_package.run("verify", str(built_package.bundle), "--json"))
    (report,) = document
    assert report["ok"], report["findings"]
    (kernel,) = report["kernels"]
    assert kernel["alignment_bytes"] == [2]
    assert kernel["clusters"] == [[1, 1]]
    assert kernel["operands"].startswith("a: Tensor([n0, n1], bfloat16), b: Tensor(")
    said = "\n".join(report["notes"])
    assert "operator names from tiny_gemm are not parsed" in said
    assert "shared-memory" not in said, "it has none"
    if report["disassembler"] is not None:
        assert kernel["instructions"].keys() == {"HMMA.16816.F32.BF16"}
        assert "multiplies with HMMA; bf16 on sm_90a calls for HGMMA" in said


def test_doctor_lists_it(built_package: BuiltPackage) -> None:
    said = built_package.run("doctor", status=32)
    assert re.search(r"provider tiny_gemm +from nvgemm-tiny-gemm 1\.0\n", said)


def test_the_runtime_serves_sizes_that_others_do_not(built_package: BuiltPackage) -> None:
    with Bundle(built_package.bundle) as bundle:
        index = Index([BundleView(name="", header=bundle.header)], H200)
    found = index.match(Problem.parse(f"{KEY}/m3n5k7"), 2)
    assert isinstance(found, Match)


def test_it_imports_public_names_alone() -> None:
    """What is promised to providers is enough to write one."""
    public = {
        "nvgemm_aot.providers.interface": set(interface.__all__),
        "nvgemm_aot.providers.cute_dsl": set(cute_dsl.__all__),
    }
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^ *from (nvgemm\S*) import (\([^)]*\)|.*)$", text, re.MULTILINE
        ):
            named = set(re.findall(r"\w+", names))
            if module == "nvgemm_aot.providers":
                assert named == {"cute_dsl"}
            else:
                assert named <= public[module], (path, module)
        assert (
            set(re.findall(r"\bcute_dsl\.(\w+)", text)) <= public["nvgemm_aot.providers.cute_dsl"]
        )


def test_public_names_stay() -> None:
    """Of version 1 of the interface none may go; see docs/develop/providers.md."""
    assert interface.INTERFACE_VERSION == 1
    assert {
        *("CLC", "DYNAMIC_PERSISTENT", "GROUP", "INTERFACE_VERSION", "ONE_TILE", "PLAIN"),
        "SCHEDULERS",
        *("STATIC_PERSISTENT", "Activation", "BlockShape", "BuildTarget", "CallingConvention"),
        *("Candidate", "ClusterLimit", "CompileError", "DType", "DeviceProfile", "Enumeration"),
        *("Epilogue", "Fact", "KernelDesign", "Layout", "Op", "Problem", "Provider"),
        *("Rejection", "Role", "RuntimeModel", "ScaleRecipe", "Signature", "Target"),
        *("ToolchainError", "extra_roles", "installed_versions", "matmul_heuristics"),
        *("role_dtype", "role_shape", "roles", "unsupported"),
    } <= set(interface.__all__)
    assert {
        *("DISTRIBUTIONS", "FUNCTION_NAME", "compile_object", "cute_type", "export_object"),
        *("installed_versions", "recipe", "sample_tensors", "set_environment", "warm_up"),
    } <= set(cute_dsl.__all__)
    for module in (interface, cute_dsl):
        for name in module.__all__:
            assert hasattr(module, name)


def test_a_package_that_is_gone_is_named_with_the_next_step(built_package: BuiltPackage) -> None:
    code = "from nvgemm_aot.__main__ import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "build",
            str(built_package.manifest),
            "-o",
            str(built_package.out),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 14
    assert "unknown provider 'tiny_gemm' (known: cutlass_operators, gathered, quack)" in done.stderr
    assert "install the package that defines it" in done.stderr
