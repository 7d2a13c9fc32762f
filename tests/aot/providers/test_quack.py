"""The provider quack: what it lists, and what comes out of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nvgemm_aot.build.pipeline import build
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.providers.quack.designs import HOPPER, Design, designs
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.types import DType

ARCHITECTURES = ["sm_90a", "sm_100f", "sm_100a", "sm_103a"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_offers_16_bit_kernels_in_all_layouts_and_results(arch: str, layout: str, op: str) -> None:
    for dtype in ("bf16", "fp16"):
        for out in ("fp32", "fp16", "bf16"):
            signature = Signature.parse(f"{op}/{layout}/{dtype}x{dtype}/fp32/{out}")
            found = Quack().enumerate(signature, build_target(arch)).candidates
            assert len(found) == len(designs(arch))
            told = "clusters," if arch == HOPPER else ""
            for one in found:
                workspace = "workspace," if one.design.splits > 1 else ""
                assert one.calling_convention == f"tvm_ffi:gemm(a,b,out,{workspace}{told}stream)"
                convention = parse_calling_convention(one.calling_convention)
                assert convention is not None
                assert convention.misfit(signature, one.has_workspace) is None
            assert {one.signature for one in found} == {signature}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_designs_are_distinct_and_so_are_their_names(arch: str) -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    found = Quack().enumerate(signature, build_target(arch)).candidates
    assert max(Counter(one.operator for one in found).values()) == 1
    assert len(set(designs(arch))) == len(designs(arch))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", "GEMMs of fp16 and bf16 into"),
        ("mm/tn/bf16xbf16/fp32/fp8_e4m3", "here bf16 into fp8_e4m3"),
        ("mm/tn/bf16xbf16/fp32/bf16/bias", "plain GEMMs do not compute"),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16", "plain GEMMs do not compute"),
    ],
)
def test_says_why_it_offers_nothing(key: str, reason: str) -> None:
    found = Quack().enumerate(Signature.parse(key), build_target("sm_90a"))
    assert not found.candidates
    assert found.absence is not None
    assert reason in found.absence


def test_a_swapped_design_is_stated_along_the_problem() -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    found = Quack().enumerate(signature, build_target("sm_90a")).candidates
    swapped = [one for one in found if one.design.swapped]
    assert len(swapped) > 30
    (one,) = (
        one
        for one in swapped
        if "pingpong" in one.operator and "cluster1x2x1_tile128x192x64" in one.operator
    )
    assert one.design.tile == (192, 128, 64)
    assert one.design.cluster == (2, 1)
    assert one.block_shape.tile == (128, 192, 64)
    assert one.block_shape.cluster == (1, 2)
    assert one.cluster_sizes == (), "launches are told how many clusters run at once"


def test_kernels_that_split_k_have_a_counter_and_a_partial_result_for_each_tile() -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    found = Quack().enumerate(signature, build_target("sm_90a")).candidates
    splitting = [one for one in found if one.design.splits > 1]
    assert {one.design.splits for one in splitting} == {2, 4, 8}
    assert len(splitting) < len(found) / 4
    assert all(one.workspace is None for one in found if one.design.splits == 1)
    problem = Problem(signature=signature, m=100, n=1000, k=8192)
    for one in splitting:
        assert one.workspace is not None
        m, n, _ = one.design.tile
        tiles = one.workspace.tiles(problem)
        assert one.workspace.tile == (m, n)
        assert tiles >= -(-100 // m) * -(-1000 // n)
        assert tiles % (one.design.cluster[0] * one.design.cluster[1]) == 0
        room = 4 * tiles + 4 * m * n * tiles
        assert room <= one.workspace.size_bytes(problem) <= room + 256
        zeroed = 4 * tiles if one.is_deterministic else one.workspace.size_bytes(problem)
        assert zeroed <= one.workspace.zeroed_bytes(problem) <= zeroed + 127
        assert f"_split_k{one.design.splits}_" in one.operator
        assert one.is_deterministic == one.operator.endswith("_serial")


def test_two_parts_are_never_added_in_any_order() -> None:
    """Their sum is the same, so nothing would be gained by zeros for the partial results."""
    assert all(one.splits > 2 for one in designs(HOPPER) if one.in_any_order)


def test_k_of_a_tile_counts_bytes() -> None:
    design = Design(tile=(64, 16), cluster=(1, 1), tile_k_blocks=2)
    assert design.tile_k(DType.BF16) == 128
    assert design.tile_k(DType.FP8_E4M3) == 256


def test_blackwell_pairs_blocks_where_the_cluster_is_even() -> None:
    assert Design(tile=(256, 128), cluster=(2, 1)).ctas_per_tile("sm_100f") == 2
    assert Design(tile=(128, 128), cluster=(1, 1)).ctas_per_tile("sm_100f") == 1
    assert Design(tile=(128, 128), cluster=(2, 1)).ctas_per_tile(HOPPER) == 1


def test_without_the_library_the_error_names_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "nvgemm_aot.providers.quack._DISTRIBUTIONS", ("nvidia-cutlass-dsl", "no-such-quack")
    )
    with pytest.raises(ToolchainError, match=r"no-such-quack is not installed; run: pip install"):
        Quack().toolchain()


def test_listing_imports_neither_library_nor_compiler() -> None:
    code = (
        "import sys\n"
        "from nvgemm_aot.providers import load_provider\n"
        "from nvgemm_aot.targets import build_target\n"
        "from nvgemm_runtime.gemm.problem import Signature\n"
        "signature = Signature.parse('mm/tn/bf16xbf16/fp32/bf16')\n"
        "assert load_provider('quack').enumerate(signature, build_target('sm_90a')).candidates\n"
        "print(sorted({'cutlass', 'quack', 'torch'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


MANIFEST = """
version: 1
name: both
targets: [{arch}]
providers: [{providers}]
candidates: 2
gemms:
  - dtype: bf16
    layout: nt
    mnk: [[16, 512, {k}]]
"""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100f", marks=pytest.mark.slow)])
def test_a_bundle_of_both_providers_verifies_and_comes_out_equal(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(MANIFEST.format(arch=arch, providers="quack, cutlass_operators", k=256))
    manifest = load_manifest(path)
    assert manifest.providers == ("quack", "cutlass_operators")
    first, again = (
        build(manifest, tmp_path / name, Cache(tmp_path / f"cache-{name}"), jobs=1)
        for name in ("first", "again")
    )
    assert first.compiled == again.compiled == len(first.bundles[0].header.kernels)
    file = first.bundles[0].path
    assert file.read_bytes() == again.bundles[0].path.read_bytes()
    report = verify_bundle(file, disassemble=True)
    assert report.ok, report.findings
    with Bundle(file) as bundle:
        assert "quack" in {kernel.provider for kernel in bundle.header.kernels}
        assert bundle.header.toolchain["quack-kernels"]


def test_beside_another_provider_it_offers_the_same() -> None:
    target = build_target("sm_90a")
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    alone, both = load_provider("quack"), load_provider("cutlass_operators+quack")
    found = alone.enumerate(signature, target).candidates
    assert both.enumerate(signature, target).candidates[-len(found) :] == found


def test_kernels_that_split_k_verify(tmp_path: Path, kernel_cache: Cache) -> None:
    """What device code shows agrees: sums in memory, the order of them, and who is waited for."""
    path = tmp_path / "split.yaml"
    text = MANIFEST.format(arch="sm_90a", providers="quack", k=16384)
    path.write_text(text.replace("candidates: 2", "candidates: 4"))
    (built,) = build(load_manifest(path), tmp_path, kernel_cache).bundles
    splitting = [kernel for kernel in built.header.kernels if kernel.design.splits > 1]
    assert {kernel.is_deterministic for kernel in splitting} == {True, False}
    report = verify_bundle(built.path, disassemble=True)
    assert report.ok, report.findings
    texts = {one.id: one.operands or "" for one in report.kernels}
    assert all("workspace: Tensor([n" in texts[kernel.id] for kernel in splitting)
    assert all("clusters: int32, stream: Stream" in text for text in texts.values())
