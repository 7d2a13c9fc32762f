"""The product's whole way from a manifest to an installed wheel, with kernels for the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import cpu_provider
from cpu_provider import CpuModel, CpuProvider, problem
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.main import main
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.pipeline.target_plan import look_up_plan, make_plan
from nvgemm_aot.providers.base import BlockShape
from nvgemm_aot.providers.heuristics.estimates import MatmulHeuristics
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.verify.bundle import HOST_ONLY, verify_bundle
from nvgemm_aot.verify.findings import Check
from nvgemm_aot.verify.kernel_inspection import inspect_kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES
from nvgemm_runtime.gemm.target import Target
from synthetic_content import synthetic_content
from written_wheels import write_wheel

pytestmark = pytest.mark.slow


def test_builds_every_signature_with_several_kernels(cpu_bundle: BuiltBundle) -> None:
    header = cpu_bundle.header
    assert not cpu_bundle.failures
    assert {r.problem.signature for r in header.rankings} == set(cpu_provider.SIGNATURES)
    assert len(header.kernels) == len(cpu_provider.SIGNATURES) * len(cpu_provider.TILES)
    assert header.target == Target(arch="cpu")
    assert header.sources[0].by == CpuModel.name


def test_the_providers_model_ranks(tmp_path: Path, kernel_cache: Cache) -> None:
    single, square = problem(sizes=(1, 4, 64)), problem(sizes=(64, 64, 64))
    header = cpu_provider.build_bundle([single, square], tmp_path, kernel_cache).header
    best = {
        ranking.problem: header.kernels[ranking.kernels[0].kernel].operator
        for ranking in header.rankings
    }
    assert best == {single: "Cpu_1x1", square: "Cpu_16x16"}


def test_another_model_makes_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, provider = Cache(tmp_path), CpuProvider()
    declared = cpu_provider.manifest([problem()]).declared
    first = make_plan(look_up_plan(declared, cpu_provider.TARGET, provider, cache), cache)
    assert look_up_plan(declared, cpu_provider.TARGET, provider, cache).stored == first
    monkeypatch.setattr(CpuModel, "name", "counting 2")
    assert look_up_plan(declared, cpu_provider.TARGET, provider, cache).stored is None


def test_verify_checks_host_code_and_says_what_does_not_apply(cpu_bundle: BuiltBundle) -> None:
    report = verify_bundle(cpu_bundle.path)
    assert report.ok, report.findings
    assert report.notes == (HOST_ONLY,)
    assert report.disassembler is None
    assert {evidence.disassembled_by for evidence in report.kernels} == {"no device code"}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"calling_convention": "c:gemm"}, Check.CALLING_CONVENTION),
        ({"calling_convention": "tvm_ffi:gemm(a,b,stream)"}, Check.CALLING_CONVENTION),
        ({"calling_convention": "tvm_ffi:other(a,b,out,stream)"}, Check.HOST_EXPORTS),
        ({"workspace_bytes": 4}, Check.WORKSPACE),
    ],
)
def test_verify_finds_entries_that_host_code_contradicts(
    cpu_bundle: BuiltBundle, change: dict[str, object], check: Check
) -> None:
    with Bundle(cpu_bundle.path) as bundle:
        kernel = bundle.header.kernels[0]
        _, gaps = inspect_kernel(
            replace(kernel, **change),
            bundle.payload(kernel),
            target=bundle.header.target,
            profiles=(),
            disassembler=None,
        )
    assert check in {gap.check for gap in gaps}


def test_verify_finds_gpu_kernels_in_a_cpu_bundle(
    real_bundles: dict[str, Path], tmp_path: Path
) -> None:
    with Bundle(real_bundles["sm_90a"]) as bundle:
        payload = bundle.payload(bundle.header.kernels[0])
    content = synthetic_content(kernels=1, problems=0)
    kernels = (replace(content.kernels[0], payload=payload),)
    path = tmp_path / "mixed.nvgemm"
    write_bundle(path, replace(content, target=Target(arch="cpu"), kernels=kernels))
    assert {finding.check for finding in verify_bundle(path).findings} == {
        Check.HOST_SYMBOLS,
        Check.HOST_LIBRARIES,
    }


def test_the_wheel_is_for_the_platform(cpu_bundle: BuiltBundle, tmp_path: Path) -> None:
    wheel = write_wheel([cpu_bundle.path], name="cpu", version="1.0", out_dir=tmp_path)
    assert wheel.name == "nvgemm_kernels_cpu-1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        inner = "nvgemm_kernels_cpu/cpu-linux_x86_64-cu13.nvgemm"
        assert archive.read(inner) == cpu_bundle.path.read_bytes()


def test_naming_a_runtime_model_loads_nothing() -> None:
    """Plans are looked up by the model's name, and a plan that is found must be quick."""
    script = (
        "import sys; from nvgemm_aot.providers.heuristics.estimates import MatmulHeuristics\n"
        "assert MatmulHeuristics('H200_SXM', 1, 132).name.startswith('nvidia-matmul-heuristics ')\n"
        "assert 'nvMatmulHeuristics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_device_that_the_model_does_not_know_is_named() -> None:
    model = MatmulHeuristics("GTX_1", 1, 132)
    with pytest.raises(ToolchainError, match=r"nvidia-matmul-heuristics .* not model 'GTX_1'"):
        model.estimate_ns(problem(), BlockShape(tile=(64, 64, 64), cluster=(1, 1)))


def test_builds_kernels_that_take_more_than_a_and_b(fused_bundle: BuiltBundle) -> None:
    header = fused_bundle.header
    assert not fused_bundle.failures
    assert {r.problem.signature for r in header.rankings} == set(cpu_provider.FUSED)
    assert {kernel.calling_convention for kernel in header.kernels} == {
        "tvm_ffi:gemm(a,b,out,stream)",  # gates without a bias
        "tvm_ffi:gemm(a,b,stream,addend,out)",
        "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,out)",
        "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,addend,out)",
        "tvm_ffi:gemm(a*,b*,scale_a*,scale_b*,out*,mnkl,stream)",
        "tvm_ffi:gemm(a,b,out,offsets,stream)",
        "tvm_ffi:gemm(a,b,stream,offsets,addend,out)",
        "tvm_ffi:gemm(a,b,stream,offsets,addend,sums,out)",
        "tvm_ffi:gemm(a,b,out,offsets,rows,stream)",
        "tvm_ffi:gemm(a,b,stream,offsets,rows,addend,out)",
        "tvm_ffi:gemm(a,b,out,rows,stream)",
    }


def test_inspect_lists_each_form_of_gates(fused_bundle: BuiltBundle) -> None:
    result = CliRunner().invoke(main, ["inspect", str(fused_bundle.path)])
    assert result.exit_code == 0, result.output
    for epilogue in ALL_EPILOGUES:
        if epilogue.form is not None:
            layout = "tt" if epilogue.form.row.has_sums else "tn"
            key = f"grouped_mm/{layout}/bf16xbf16/fp32/bf16/{epilogue.name}"
            assert re.search(rf"^signature {re.escape(key)} .*kernels$", result.stdout, re.M), key


def test_verify_knows_every_way_in_which_kernels_are_called(
    fused_bundle: BuiltBundle, tmp_path: Path, kernel_cache: Cache
) -> None:
    with_workspace, with_counters = (
        cpu_provider.build_bundle(
            [problem()], tmp_path / str(number), kernel_cache, provider=provider
        )
        for number, provider in enumerate(
            (cpu_provider.WithWorkspace(), cpu_provider.WithCounters())
        )
    )
    for bundle in (fused_bundle, with_workspace, with_counters):
        report = verify_bundle(bundle.path)
        assert report.ok, report.findings
