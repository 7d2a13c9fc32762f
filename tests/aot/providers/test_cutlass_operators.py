"""The provider against the real compiler: what it lists, and what comes out of it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.pipeline.pipeline import BuildResult, plan_build
from nvgemm_aot.providers import cute_dsl, load_provider
from nvgemm_aot.providers.cutlass_operators import CutlassOperators, toolchain
from nvgemm_aot.providers.cutlass_operators.epilogue_source import epilogue_source
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_aot.verify.device.disassembler import find_disassembler
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.support import OUTS, unsupported
from nvgemm_runtime.gemm.types import ScaleRecipe
from repository import ROOT


@pytest.fixture(scope="module")
def provider() -> CutlassOperators:
    return CutlassOperators()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_100f", "sm_103a"])
@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_offers_16_bit_kernels_in_all_layouts(
    provider: CutlassOperators, arch: str, layout: str, op: str
) -> None:
    target = build_target(arch)
    for dtype in ("bf16", "fp16"):
        signature = Signature.parse(f"{op}/{layout}/{dtype}x{dtype}/fp32/{dtype}")
        found = provider.enumerate(signature, target).candidates
        assert len(found) >= 20
        assert len({candidate.operator for candidate in found}) == len(found)
        assert {candidate.alignment_bytes for candidate in found} == {16}
        assert {candidate.workspace_bytes for candidate in found} == {0}
        assert {candidate.signature for candidate in found} == {signature}


def test_offers_nothing_that_would_not_compile(provider: CutlassOperators) -> None:
    signature = Signature.parse("mm/nn/fp8_e4m3xfp8_e4m3/fp32/bf16")
    found = provider.enumerate(signature, build_target("sm_90a"))
    assert not found.candidates
    assert any("only along k" in rejection.reason for rejection in found.rejections)


def test_offers_nothing_where_the_library_has_nothing(provider: CutlassOperators) -> None:
    signature = Signature.parse("mm/tn/int8xint8/int32/int32")
    assert provider.enumerate(signature, build_target("sm_100a")).candidates
    nothing = provider.enumerate(signature, build_target("sm_100f"))
    assert not nothing.candidates
    assert not nothing.rejections
    assert nothing.absence == "sm_100f has no operator that multiplies int8 into int32"


@pytest.mark.parametrize(
    "epilogue", ["bf16xbf16/fp32/bf16/bias", "fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row"]
)
def test_tiles_of_64_rows_are_offered_where_an_epilogue_broadcasts(
    provider: CutlassOperators, epilogue: str
) -> None:
    found = provider.enumerate(Signature.parse(f"mm/tn/{epilogue}"), build_target("sm_100f"))
    assert min(one.design.tile[0] for one in found.candidates) == 64
    assert not found.rejections


def test_preferred_clusters_that_refuse_small_problems_are_left_out(
    provider: CutlassOperators,
) -> None:
    """With a fixed number of blocks, the number of clusters is rounded down, to none."""
    found = provider.enumerate(
        Signature.parse("mm/tn/bf16xbf16/fp32/bf16"), build_target("sm_100f")
    )
    left_out = [one.operator for one in found.rejections if "launches no block" in one.reason]
    assert left_out
    assert all("PreferredCluster" in name and "static_persistent" in name for name in left_out)
    kept = {one.design.scheduler for one in found.candidates if one.design.fallback_cluster}
    assert kept == {"clc"}


FP8 = "fp8_e4m3xfp8_e4m3/fp32/bf16"
FP4 = "fp4_e2m1xfp4_e2m1/fp32/bf16"
FAMILIES = [
    (
        f"mm/tn/{FP8}/fp32_row/bias",
        "PersistentDenseGemmEFCOperator",
        "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,addend,out)",
        "no operator of sm_90a applies scales",
    ),
    (
        "bmm/nt/bf16xbf16/fp32/bf16/add",
        "PersistentDenseGemmEFCOperator",
        "tvm_ffi:gemm(a,b,stream,addend,out)",
        "no operator of sm_90a has an epilogue",
    ),
    (
        f"mm/nn/{FP8}/e8m0_1x32",
        "PersistentDenseBlockScaledGemmOperator",
        "tvm_ffi:gemm(a*,b*,scale_a*,scale_b*,out*,mnkl,stream)",
        "sm_90a has no block-scaled operator",
    ),
    (
        "grouped_mm/tn/fp16xfp16/fp32/fp16",
        "ContiguousOffset2D3DGemmDenseOperator",
        "tvm_ffi:gemm(a,b,out,offsets,stream)",
        "sm_90a has no grouped operator",
    ),
]


@pytest.mark.parametrize(("key", "kind", "convention", "absence"), FAMILIES)
def test_each_family_is_called_its_own_way_and_is_missing_on_hopper_with_the_reason(
    provider: CutlassOperators, key: str, kind: str, convention: str, absence: str
) -> None:
    signature = Signature.parse(key)
    found = provider.enumerate(signature, build_target("sm_100f"))
    assert len(found.candidates) >= 36
    for candidate in found.candidates:
        assert kind in candidate.operator
        assert candidate.calling_convention == convention
        assert candidate.alignment_bytes == 16
        assert candidate.cluster_sizes, "all are static-persistent"
    parsed = parse_calling_convention(convention)
    assert parsed is not None
    assert parsed.misfit(signature, has_workspace=False) is None
    nothing = provider.enumerate(signature, build_target("sm_90a"))
    assert not nothing.candidates
    assert nothing.absence is not None
    assert absence in nothing.absence


@pytest.mark.parametrize("kind", ["bf16xbf16/fp32/bf16/bias", f"{FP8}/fp32_row/bias"])
def test_what_it_lacks_on_hopper_names_the_provider_that_has_it(
    provider: CutlassOperators, kind: str
) -> None:
    absence = provider.enumerate(Signature.parse(f"mm/tn/{kind}"), build_target("sm_90a")).absence
    assert absence is not None
    assert "quack has such kernels: add it to the manifest's `providers`, or name none" in absence


@pytest.mark.slow
def test_blackwell_has_operators_for_all_that_the_support_table_allows(
    provider: CutlassOperators,
) -> None:
    """In one layout, with one epilogue or none: which operators there are depends on no more.

    Grouped products with a bias or with scales are quack's alone.
    """
    quack = load_provider("quack")
    combinations = itertools.product(
        (Op.MM, Op.GROUPED_MM), OUTS, DType, (None, *ScaleRecipe), (None, BIAS)
    )
    checked = 0
    for op, operand, out, scales, epilogue in combinations:
        signature = Signature(
            op=op,
            layout=Layout.TN,
            a=operand,
            b=operand,
            accumulator=DType.INT32 if operand.is_integer else DType.FP32,
            out=out,
            scales=scales,
            epilogue=epilogue,
        )
        if unsupported(signature) is None:
            arch = "sm_100a" if operand.is_integer else "sm_100f"
            is_quack = op is Op.GROUPED_MM and (epilogue, scales) != (None, None)
            of_it = (quack if is_quack else provider).enumerate(signature, build_target(arch))
            assert of_it.candidates, signature.key
            checked += 1
    assert (
        checked == 20 + 6 + 20 + 10 + 15 + 24 + 12 + 6 + 6
    )  # plain, integers, biases, blocks, fp32, groups, groups with biases and with scales


def test_what_no_target_computes_is_refused_in_the_words_of_the_support_table(
    provider: CutlassOperators,
) -> None:
    signature = Signature.parse("mm/tn/int8xint8/int32/int32/bias")
    assert provider.enumerate(signature, build_target("sm_100a")).absence == unsupported(signature)


def test_block_scaled_tiles_of_256_rows_alone_are_made_by_pairs_of_thread_blocks(
    provider: CutlassOperators,
) -> None:
    """Whatever names and metadata say: both call all of them paired."""
    signature = Signature.parse(f"mm/tn/{FP4}/e8m0_1x32")
    found = provider.enumerate(signature, build_target("sm_100f")).candidates
    assert {(c.design.tile[0], c.design.ctas_per_tile) for c in found} == {(128, 1), (256, 2)}


@pytest.mark.parametrize(
    ("key", "source"),
    [
        (
            f"mm/tn/{FP8}/fp32_row/bias",
            "def epilogue(accum, scale_a, scale_b, addend):\n"
            "    D = accum * scale_a * scale_b + addend\n"
            "    return D\n",
        ),
        (
            "mm/tn/bf16xbf16/fp32/bf16/bias_silu",
            "def epilogue(accum, addend):\n"
            "    x = accum + addend\n"
            "    D = x * sigmoid(x)\n"
            "    return D\n",
        ),
    ],
)
def test_an_epilogue_is_written_for_its_signature(key: str, source: str) -> None:
    assert epilogue_source(Signature.parse(key)) == source


def test_leaves_out_older_generations_and_empty_fusions_with_their_reasons(
    provider: CutlassOperators,
) -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    found = provider.enumerate(signature, build_target("sm_100f"))
    reasons = Counter(rejection.reason.split(":")[0] for rejection in found.rejections)
    assert reasons["designed for sm_80"] == 4
    assert any("epilogue fusion" in reason for reason in reasons)
    assert {c.design.scheduler for c in found.candidates} == {
        "clc",
        "static_persistent",
        "one_tile",
    }


def test_device_numbers_are_declared_exactly_where_they_are_compiled_in(
    provider: CutlassOperators,
) -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    for arch in ("sm_100f", "sm_90a"):
        for candidate in provider.enumerate(signature, build_target(arch)).candidates:
            persistent = candidate.design.scheduler == "static_persistent"
            assert bool(candidate.cluster_sizes) == persistent


def test_real_bundles_verify_with_their_tensor_core_instructions(
    real_bundles: dict[str, Path],
) -> None:
    assert find_disassembler() is not None, "the build extra brings nvdisasm"
    for arch, instruction in (("sm_100f", "UTCHMMA"), ("sm_90a", "HGMMA")):
        report = verify_bundle(real_bundles[arch], disassemble=True, jobs=2)
        assert report.ok, report.findings
        assert len(report.kernels) == 3
        for evidence in report.kernels:
            assert evidence.compiled_for == arch
            assert evidence.local_bytes == 0
            assert any(name.startswith(instruction) for name in evidence.instructions)


def test_small_m_gets_a_kernel_made_for_it(real_bundles: dict[str, Path]) -> None:
    with Bundle(real_bundles["sm_100f"]) as bundle:
        small = next(r for r in bundle.header.rankings if r.problem.m == 8)
        designs = [bundle.header.kernels[place.kernel].design for place in small.kernels]
    assert (8, 64) in [design.tile[:2] for design in designs]
    assert len(designs) == 2


@pytest.mark.slow
def test_code_is_the_same_in_another_process_and_another_order(
    real_build: BuildResult, kernel_cache: Cache, tmp_path: Path
) -> None:
    """Compiles one kernel a target again, the other way round, into an empty cache."""
    tasks = []
    for built in real_build.bundles:
        arch = built.header.target.arch
        target = build_target(arch)
        signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
        ranked = next(r for r in built.header.rankings if r.problem.signature == signature)
        operator = built.header.kernels[ranked.kernels[0].kernel].operator
        provider = CutlassOperators()
        candidates = provider.enumerate(signature, target).candidates
        chosen = [c for c in candidates if c.operator == operator]
        tasks += make_tasks(chosen, target, provider)
    fresh = Cache(tmp_path / "fresh")
    assert compile_all(tasks[::-1], fresh, jobs=1).compiled == len(tasks) == 2
    for task in tasks:
        assert fresh.get(task.key) == kernel_cache.get(task.key) is not None


def test_a_second_build_compiles_nothing_and_imports_no_compiler(
    real_build: BuildResult, kernel_cache: Cache, tmp_path: Path
) -> None:
    script = (
        "import sys\n"
        "from nvgemm_aot.cli.main import main\n"
        "code = main(sys.argv[1:], standalone_mode=False)\n"
        "print(sorted({'torch', 'cutlass', 'nvMatmulHeuristics'} & sys.modules.keys()))\n"
    )
    source = real_build.bundles[0].path.parent.parent / "real.yaml"
    result = subprocess.run(
        [
            *(sys.executable, "-c", script),
            *("build", source, "--estimates-only"),
            *("-o", tmp_path, "--cache-dir", kernel_cache.directory),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0 kernels compiled" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"
    for built in real_build.bundles:
        assert (tmp_path / built.path.name).read_bytes() == built.path.read_bytes()


def test_unknown_provider_names_the_known_one() -> None:
    with pytest.raises(ToolchainError, match="cutlass_operators"):
        load_provider("nonesuch")


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nvgemm_aot.providers.cutlass_operators._DISTRIBUTIONS", ("no-such-distribution",)
    )
    with pytest.raises(ToolchainError, match=r"no-such-distribution .* pip install '\.\[build"):
        CutlassOperators().toolchain()


def test_plan_of_a_real_manifest_is_diverse(tmp_path: Path, kernel_cache: Cache) -> None:
    """Every problem of quickstart gets its candidates, and not the same for small and large m."""
    quickstart = load_manifest(ROOT / "manifests" / "quickstart.yaml")
    for item in plan_build(quickstart, kernel_cache):
        chosen: dict[int, set[tuple[int, int, int]]] = {}
        for planned in item.plan.problems:
            assert len(planned.choices) == 4
            tiles = {item.plan.candidates[index].design.tile for index, _ in planned.choices}
            chosen.setdefault(planned.problem.m, set()).update(tiles)
        assert min(m for m, _, _ in chosen[1]) < min(m for m, _, _ in chosen[2048])


def test_the_compilers_variables_change_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are dropped before the compiler is imported, for the cache knows nothing of them."""
    monkeypatch.setattr(toolchain, "import_operators", lambda: None)
    monkeypatch.setattr(cute_dsl, "warm_up", lambda: None)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTLASS_OPERATORS_USE_TVM_FFI", "0")
    CutlassOperators().prepare()
    left = {name for name in os.environ if name.startswith(("CUTE_DSL_", "CUTLASS_"))}
    assert left == {"CUTE_DSL_ARCH"}, "what the compiler would ask the driver for"
    assert "builds ignore CUTE_DSL_LINEINFO=1" in caplog.text
