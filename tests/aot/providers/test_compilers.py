"""Each CUDA version's compiler, and host code for each platform: chosen, refused and used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.providers.cute_dsl import cute_setup
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_aot.verify.device.cubin import read_cubins
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.target import CUDA_VERSIONS


def test_a_process_has_room_for_one_compiler() -> None:
    program = (
        "from nvgemm_aot.providers.cute_dsl import cute_setup\n"
        "from nvgemm_runtime.errors import ToolchainError\n"
        "cute_setup.choose_cuda('cu12')\n"
        "cute_setup.set_environment()\n"
        "import cutlass\n"
        "print(cutlass.CUDA_VERSION.major)\n"
        "cute_setup.choose_cuda('cu13')\n"
        "try: cute_setup.set_environment()\n"
        "except ToolchainError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    version, refusal = done.stdout.splitlines()
    assert version == "12"
    assert "_cutlass_ir.cu12." in refusal
    assert "compile in another process" in refusal


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_setup, "_chosen_cuda", "cu11")
    with pytest.raises(ToolchainError, match="pip install nvidia-cutlass-dsl-libs-cu11==4"):
        cute_setup.set_environment()
    versions = dict.fromkeys(cute_setup.DISTRIBUTIONS, "4.8.1")
    with pytest.raises(
        ToolchainError, match=r"libs-cu11 is not installed; run: pip install .*cu11==4"
    ):
        cute_setup.for_cuda(versions, "cu11")


def test_versions_name_the_compiler_that_is_used() -> None:
    versions = cute_setup.installed_versions(cute_setup.DISTRIBUTIONS, "kernels")
    for cuda in CUDA_VERSIONS:
        named = [name for name in cute_setup.for_cuda(versions, cuda) if name[-4:-2] == "cu"]
        assert named == [f"nvidia-cutlass-dsl-libs-{cuda}"]
    assert cute_setup.for_cuda({"other": "1"}, "cu12") == {"other": "1"}


MANIFEST = """\
version: 1
name: four
providers: [quack]
candidates: 1
targets:
- sm_90a
- {arch: sm_90a, platform: linux_aarch64}
- {arch: sm_90a, cuda: cu12}
- {arch: sm_90a, cuda: cu12, platform: linux_aarch64}
gemms: [{dtype: bf16, mnk: [[128, 4096, 4096]]}]
"""


@pytest.mark.slow
def test_real_kernels_are_built_for_both_platforms_and_cuda_versions(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    (tmp_path / "four.yaml").write_text(MANIFEST)
    built = build(load_manifest(tmp_path / "four.yaml"), tmp_path / "dist", kernel_cache)
    device_code = {}
    for one in built.bundles:
        report = verify_bundle(one.path)
        assert report.ok, report.findings
        target, toolchain = one.header.target, one.header.toolchain
        libraries = {name for name in toolchain if "libs-cu" in name}
        assert libraries == {f"nvidia-cutlass-dsl-libs-{target.cuda}"}
        with Bundle(one.path) as bundle:
            [kernel] = one.header.kernels
            code = [cubin.content for cubin in read_cubins(bundle.payload(kernel))]
        device_code[target.platform, target.cuda] = code
    assert len(device_code) == 4
    for cuda in CUDA_VERSIONS:
        assert device_code["linux_x86_64", cuda] == device_code["linux_aarch64", cuda]
    assert device_code["linux_x86_64", "cu12"] != device_code["linux_x86_64", "cu13"]
    # A kernel that was compiled once for both platforms is that of a build for the second alone.
    head, _, tail = MANIFEST.partition("targets:")
    target = "{arch: sm_90a, platform: linux_aarch64}"
    text = f"{head}targets: [{target}]\ngemms:{tail.partition('gemms:')[2]}"
    (tmp_path / "alone.yaml").write_text(text)
    alone = load_manifest(tmp_path / "alone.yaml")
    [one] = build(alone, tmp_path / "alone", Cache(tmp_path / "cache")).bundles
    assert one.path.read_bytes() == (tmp_path / "dist" / one.path.name).read_bytes()
