"""The provider quack: what it lists, and what comes out of it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.pipeline.select_candidates import select
from nvgemm_aot.providers import Candidate, Enumeration, cute_dsl, load_provider
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT, STATIC_PERSISTENT
from nvgemm_aot.providers.cute_dsl import cute_setup
from nvgemm_aot.providers.heuristics.corrections import find_correction
from nvgemm_aot.providers.quack import ACCEPTED_VERSIONS, Quack, gated
from nvgemm_aot.providers.quack.designs import Design, designs
from nvgemm_aot.providers.quack.entry import compile_entry
from nvgemm_aot.providers.quack.families import FAMILIES, family_of
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.errors import TargetError, ToolchainError
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, Epilogue, GateForm, WeightOrder
from nvgemm_runtime.gemm.problem import Op, Problem, Signature
from nvgemm_runtime.gemm.target import architecture
from nvgemm_runtime.gemm.types import DType
from repository import ROOT

HOPPER = "sm_90a"

ARCHITECTURES = ["sm_90a", "sm_100f", "sm_100a", "sm_103a"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_offers_16_bit_kernels_in_all_layouts_and_results(arch: str, layout: str, op: str) -> None:
    for dtype in ("bf16", "fp16"):
        for out in ("fp32", "fp16", "bf16"):
            signature = Signature.parse(f"{op}/{layout}/{dtype}x{dtype}/fp32/{out}")
            found = Quack().enumerate(signature, build_target(arch)).candidates
            assert len(found) == len(designs(arch, signature))
            told = "clusters," if arch == HOPPER else ""
            for one in found:
                workspace = "workspace," if one.has_workspace else ""
                assert one.calling_convention == f"tvm_ffi:gemm(a,b,out,{workspace}{told}stream)"
                convention = parse_calling_convention(one.calling_convention)
                assert convention is not None
                assert convention.misfit(signature, one.has_workspace) is None
            assert {one.signature for one in found} == {signature}


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_offers_fp8_on_blackwell_in_all_layouts_and_results(
    arch: str, layout: str, op: str
) -> None:
    narrow = ("fp8_e4m3", "fp8_e5m2")
    pairs = (
        *itertools.product(narrow, ("fp32", "fp16", "bf16", *narrow)),
        *itertools.product(("bf16", "fp16"), narrow),
    )
    for dtype, out in pairs:
        signature = Signature.parse(f"{op}/{layout}/{dtype}x{dtype}/fp32/{out}")
        found = Quack().enumerate(signature, build_target(arch)).candidates
        assert len(found) == len(designs(arch, signature))
        assert {one.design.tile[2] for one in found} == {64 if dtype in ("bf16", "fp16") else 128}


@pytest.mark.parametrize(
    ("rest", "addend"), [("fp32_row", ""), ("fp32_tensor/bias", "addend,")], ids=["row", "tensor"]
)
def test_scales_reach_kernels_of_blackwell_without_a_number_of_clusters(
    rest: str, addend: str
) -> None:
    signature = Signature.parse(f"mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/{rest}")
    found = Quack().enumerate(signature, build_target("sm_100f")).candidates
    taken = {one.calling_convention for one in found}
    first = f"tvm_ffi:gemm(a,b,scale_a,scale_b,{addend}out,"
    assert taken == {f"{first}stream)", f"{first}workspace,stream)"}


@pytest.mark.parametrize("arch", ["sm_99a", "sm_80"])
def test_offers_nothing_for_an_architecture_without_kernels(arch: str) -> None:
    known = build_target(HOPPER)
    unknown = replace(known, target=replace(known.target, arch=arch))
    for rest in ("mm/tn/bf16xbf16/fp32/bf16", "mm/tn/bf16xbf16/fp32/bf16/swiglu_halves"):
        found = Quack().enumerate(Signature.parse(rest), unknown)
        assert found.candidates == ()
        assert found.absence == (
            f"quack has no kernels for {arch} (it has for sm_90a, sm_100a, sm_100f, sm_103a)"
        )
    with pytest.raises(TargetError, match=rf"'{arch}' \(known: sm_90a, sm_100a, sm_100f"):
        designs(arch, Signature.parse("mm/tn/bf16xbf16/fp32/bf16"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_family_that_gathers_no_rows_offers_no_such_designs(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = Signature.parse("gathered_grouped_mm/tn/bf16xbf16/fp32/bf16")
    assert Quack().enumerate(signature, build_target(arch)).candidates
    monkeypatch.setattr("nvgemm_aot.providers.quack.gathered_groups._GATHERING", frozenset())
    found = Quack().enumerate(signature, build_target(arch))
    assert found == Enumeration(absence=f"quack has no design of {signature.key} for {arch}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_kernels_and_designs(arch: str) -> None:
    assert family_of(arch) is FAMILIES[architecture(arch).mma]
    assert designs(arch, Signature.parse("mm/tn/bf16xbf16/fp32/bf16"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_designs_are_distinct_and_so_are_their_names(arch: str) -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    found = Quack().enumerate(signature, build_target(arch)).candidates
    assert max(Counter(one.operator for one in found).values()) == 1
    offered = designs(arch, signature)
    assert len(set(offered)) == len(offered)


@pytest.mark.parametrize(
    ("key", "arch", "reason"),
    [
        ("mm/tn/int8xint8/int32/int32", "sm_90a", "here int8 into int32"),
        ("mm/nt/fp8_e4m3xfp8_e4m3/fp32/bf16", "sm_90a", "is multiplied in layout tn alone"),
        (
            "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16",
            "sm_100f",
            "for sm_90a alone, for those of sm_100f do not compile (here fp8_e5m2 by fp8_e4m3)",
        ),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32", "sm_90a", "dense GEMMs do not compute"),
        ("grouped_mm/tt/fp8_e4m3xfp8_e4m3/fp32/bf16", "sm_90a", "has layout tn alone (here tt)"),
        ("grouped_mm/nt/bf16xbf16/fp32/bf16", "sm_90a", "has layout tn or tt alone (here nt)"),
        ("k_grouped_mm/tn/bf16xbf16/fp32/bf16", "sm_90a", "has layout nt alone (here tn)"),
    ],
)
def test_says_why_it_offers_nothing(key: str, arch: str, reason: str) -> None:
    found = Quack().enumerate(Signature.parse(key), build_target(arch))
    assert not found.candidates
    assert found.absence is not None
    assert reason in found.absence


def test_scaled_groups_take_scales_before_ends() -> None:
    signature = Signature.parse("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row")
    for arch, last in (("sm_90a", "clusters,stream"), ("sm_100f", "stream")):
        found = Quack().enumerate(signature, build_target(arch)).candidates
        taken = f"tvm_ffi:gemm(a,b,scale_a,scale_b,offsets,out,{last})"
        assert {one.calling_convention for one in found} == {taken}
        assert all("epilogue" in one.added_code for one in found)


@pytest.mark.parametrize(
    ("key", "parameters"),
    [
        ("bmm/nt/fp16xfp16/fp32/fp32/add", "a,b,addend,out,clusters,stream"),
        ("mm/tt/bf16xbf16/fp32/fp8_e5m2/bias_silu", "a,b,addend,out,clusters,stream"),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row", "a,b,scale_a,scale_b,out,clusters,stream"),
        (
            "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp32/fp32_tensor/bias",
            "a,b,scale_a,scale_b,addend,out,clusters,stream",
        ),
        ("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_row", "a,b,scale_a,scale_b,out,clusters,stream"),
    ],
)
def test_what_kernels_take_besides_a_and_b_comes_before_the_result(
    key: str, parameters: str
) -> None:
    found = Quack().enumerate(Signature.parse(key), build_target("sm_90a")).candidates
    shared = parameters.replace("clusters", "workspace,clusters")
    for one in found:
        taken = shared if one.has_workspace else parameters
        assert one.calling_convention == f"tvm_ffi:gemm({taken})"
    assert {one.has_workspace for one in found} == {True, False}
    assert {bool(one.added_code) for one in found} == {True}


def test_sums_of_fp8_leave_registers_for_a_second_level() -> None:
    """Of each thread, at most 96 accumulators of the 255 registers; then none spills."""
    for design in designs("sm_90a", Signature.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16")):
        m, n = design.tile
        groups = 1 if design.pingpong else min(m // 64, 2) if m != 192 else 3
        assert m * n / (128 * groups) <= 96, design


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("epilogue", [one for one in ALL_EPILOGUES if one.form is GateForm.JOINED])
def test_offers_gated_kernels_in_what_is_supported(arch: str, epilogue: Epilogue) -> None:
    for dtype, layout in itertools.product(("bf16", "fp16"), ("tn", "tt", "nn", "nt")):
        key = f"mm/{layout}/{dtype}x{dtype}/fp32/bf16/{epilogue.name}"
        signature = Signature.parse(key)
        found = Quack().enumerate(signature, build_target(arch))
        if epilogue.order is WeightOrder.HALVES and layout in ("tt", "nt"):
            assert "has B column-major alone, layout tn or nn" in str(found.absence)
            continue
        assert len(found.candidates) == len(gated.designs(arch, signature)) > 15
        addend = "addend," if epilogue.addend else ""
        conventions = {one.calling_convention for one in found.candidates}
        told = ("clusters,", "workspace,clusters,") if arch == HOPPER else ("",)
        assert conventions == {f"tvm_ffi:gemm(a,b,{addend}out,{one}stream)" for one in told}
        assert len({one.operator for one in found.candidates}) == len(found.candidates)
        assert all(not one.design.swapped for one in found.candidates)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("epilogue", [one for one in ALL_EPILOGUES if one.form is GateForm.JOINED])
def test_offers_gates_of_groups_in_what_is_supported(arch: str, epilogue: Epilogue) -> None:
    for dtype, layout in itertools.product(("bf16", "fp16"), ("tn", "tt")):
        key = f"grouped_mm/{layout}/{dtype}x{dtype}/fp32/bf16/{epilogue.name}"
        found = Quack().enumerate(Signature.parse(key), build_target(arch))
        if epilogue.order is WeightOrder.HALVES and layout == "tt":
            assert "has B column-major alone, layout tn (here tt)" in str(found.absence)
            continue
        assert len({one.operator for one in found.candidates}) == len(found.candidates) >= 15
        assert all("GroupedGated" in one.operator for one in found.candidates)
        addend = "addend," if epilogue.addend else ""
        told = "clusters," if arch == HOPPER else ""
        conventions = {one.calling_convention for one in found.candidates}
        assert conventions == {f"tvm_ffi:gemm(a,b,offsets,{addend}out,{told}stream)"}
        assert not any(one.has_workspace or one.design.swapped for one in found.candidates)
        assert all(one.design.tile[1] % 32 == 0 for one in found.candidates)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_design_of_groups_may_add_a_matrix(arch: str) -> None:
    told = "clusters," if arch == HOPPER else ""
    for dtype, layout, out in itertools.product(
        ("bf16", "fp16"), ("tn", "tt"), ("fp32", "fp16", "bf16")
    ):
        key = f"grouped_mm/{layout}/{dtype}x{dtype}/fp32/{out}"
        found = Quack().enumerate(Signature.parse(f"{key}/add"), build_target(arch)).candidates
        plain = Quack().enumerate(Signature.parse(key), build_target(arch)).candidates
        assert [one.design for one in found] == [one.design for one in plain]
        conventions = {one.calling_convention for one in found}
        assert conventions == {f"tvm_ffi:gemm(a,b,offsets,addend,out,{told}stream)"}


def test_cache_keys_hold_the_source_of_every_part_of_an_epilogue() -> None:
    """A change of what groups or gates do must compile their kernels anew, and no others."""
    added = {}
    for key in ("mm", "mm bias", "mm bias_silu", "mm swiglu_halves", *GROUPED_PARTS):
        op, _, epilogue = key.partition(" ")
        text = f"{op}/tn/bf16xbf16/fp32/bf16" + (f"/{epilogue}" if epilogue else "")
        found = Quack().enumerate(Signature.parse(text), build_target("sm_90a"))
        (code,) = {one.added_code for one in found.candidates}
        added[key] = [part.split()[0] for part in code.split(", ") if part]
    assert added == {
        "mm": [],
        "mm bias": ["epilogue"],
        "mm bias_silu": ["epilogue", "activation"],
        "mm swiglu_halves": ["gate", "activation"],
        **GROUPED_PARTS,
    }


GROUPED_PARTS = {
    "grouped_mm": ["groups"],
    "grouped_mm bias": ["groups", "epilogue"],
    "grouped_mm swiglu_oai_halves": ["gate", "groups", "activation"],
}
"""By operation and epilogue: the parts of this project's source in the keys."""


@pytest.mark.parametrize("op", ["mm", "grouped_mm"])
def test_cutlass_operators_offers_no_gate_and_says_who_does(op: str) -> None:
    signature = Signature.parse(f"{op}/tn/bf16xbf16/fp32/bf16/swiglu_halves")
    for arch in ("sm_90a", "sm_100f"):
        found = load_provider("cutlass_operators").enumerate(signature, build_target(arch))
        assert not found.candidates
        assert "quack has such kernels: add it to the manifest's `providers`, or name none" in str(
            found.absence
        )


@pytest.mark.parametrize("rest", ["", "/bias", "/fp32_row", "/fp32_tensor/bias"])
def test_cutlass_operators_multiplies_no_two_types_and_says_who_does(rest: str) -> None:
    signature = Signature.parse(f"mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16{rest}")
    beside = "quack has such kernels: add it to the manifest's `providers`, or name none"
    for arch in ARCHITECTURES:
        found = load_provider("cutlass_operators").enumerate(signature, build_target(arch))
        assert not found.candidates
        assert "multiplies fp8_e5m2 by fp8_e4m3" in str(found.absence)
        assert (beside in str(found.absence)) == (arch == HOPPER)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["grouped_mm/tn", "grouped_mm/tt", "k_grouped_mm/nt"])
def test_offers_groups_without_a_workspace_but_a_counter(arch: str, kind: str) -> None:
    """Tiles of groups cannot be counted on the host, and a swapped kernel has no groups.

    On Hopper, a counter may hand out tiles of groups along k, which differ in length.
    """
    for dtype, out in itertools.product(("bf16", "fp16"), ("fp32", "fp16", "bf16")):
        signature = Signature.parse(f"{kind}/{dtype}x{dtype}/fp32/{out}")
        found = Quack().enumerate(signature, build_target(arch)).candidates
        told = "clusters," if arch == HOPPER else ""
        dynamic = [one for one in found if one.design.scheduler == DYNAMIC_PERSISTENT]
        assert bool(dynamic) is (arch == HOPPER and kind.startswith("k_"))
        for one in found:
            counter = "workspace," if one in dynamic else ""
            assert one.calling_convention == f"tvm_ffi:gemm(a,b,offsets,out,{counter}{told}stream)"
            assert one.has_workspace is (one in dynamic)
            assert one.workspace is None or one.workspace.fault(signature.op) is None
            assert not one.design.swapped
        assert len({one.operator for one in found}) == len(found) >= 15
        assert all("Grouped" in one.operator and one.added_code for one in found)
        assert any(one.design.cluster == (1, 1) for one in found)


@pytest.mark.parametrize(
    ("arch", "rest"),
    [
        ("sm_90a", "tn/bf16xbf16/fp32/bf16"),
        ("sm_90a", "tt/bf16xbf16/fp32/bf16"),
        ("sm_100f", "tt/bf16xbf16/fp32/bf16"),
        ("sm_100f", "tn/bf16xbf16/fp32/bf16/bias"),
    ],
)
def test_cutlass_operators_says_who_computes_groups(arch: str, rest: str) -> None:
    signature = Signature.parse(f"grouped_mm/{rest}")
    found = load_provider("cutlass_operators").enumerate(signature, build_target(arch))
    assert not found.candidates
    assert "quack has such kernels: add it" in str(found.absence)


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


def test_on_hopper_one_tile_covers_any_small_m_with_few_rows_wasted() -> None:
    """A width for each 16 rows, so that no m is padded to the next power of two."""
    offered = designs(HOPPER, Signature.parse("mm/tn/bf16xbf16/fp32/bf16"))
    widths = {one.tile[1] for one in offered if one.swapped and one.splits == 1}
    assert widths == {*range(16, 257, 16)}


def by_estimate(m: int, n: int, k: int) -> list[Candidate]:
    """All designs for Hopper that can run a problem, fastest first."""
    problem = Problem(signature=Signature.parse("mm/tn/bf16xbf16/fp32/bf16"), m=m, n=n, k=k)
    target = build_target(HOPPER)
    found = Quack().enumerate(problem.signature, target).candidates
    model = Quack().runtime_model(target)
    correction = find_correction(target, model.name)
    assert correction is not None
    times = correction.corrected(
        problem,
        found,
        [model.estimate_ns(problem, one.block_shape) for one in found],
        target.device.sm_count.value,
    )
    assert None not in times
    return [found[place] for place in sorted(range(len(found)), key=lambda one: times[one] or 0)]


@pytest.mark.parametrize("m", [72, 80, 96, 112, 144, 160])
def test_the_swapped_tile_estimated_to_be_the_fastest_wastes_few_rows(m: int) -> None:
    """At m = 80 a tile of width 128 computes 48 rows of nothing."""
    first = next(one for one in by_estimate(m, 28672, 4096) if one.design.swapped)
    assert -m % first.design.tile[0] <= 16, first.operator


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_kernels_that_split_k_have_a_counter_and_a_partial_result_for_each_tile(arch: str) -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    found = Quack().enumerate(signature, build_target(arch)).candidates
    splitting = [one for one in found if one.design.splits > 1]
    every = {2, 4, 6, 8, 16} if arch == HOPPER else {2, 4}
    assert {one.design.splits for one in splitting} == every
    assert len(splitting) < len(found) / 4
    problem = Problem(signature=signature, m=100, n=1000, k=8192)
    for one in splitting:
        assert one.workspace is not None
        m, n, _ = one.design.tile
        m, n = (m, n) if one.design.swapped else (m // one.design.ctas_per_tile, n)
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


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("mm/tn/bf16xbf16/fp32/bf16", 12),
        ("bmm/nt/fp16xfp16/fp32/fp8_e4m3/bias_silu", 12),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", 6),
        ("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_row/bias", 6),
        ("mm/tn/bf16xbf16/fp32/bf16/swiglu_halves", 5),
        ("mm/tt/fp16xfp16/fp32/fp16/swiglu_oai_interleaved", 5),
    ],
)
def test_a_dynamic_schedule_has_a_static_twin_and_one_counter(key: str, count: int) -> None:
    signature = Signature.parse(key)
    found = Quack().enumerate(signature, build_target("sm_90a")).candidates
    by_name = {one.operator: one for one in found}
    dynamic = [one for one in found if one.design.scheduler == DYNAMIC_PERSISTENT]
    assert len(dynamic) == count
    batch = 3 if signature.op is Op.BMM else 1
    problem = Problem(signature=signature, m=100_000, n=40_000, k=512, batch=batch)
    for one in dynamic:
        twin = by_name[one.operator.replace("_dynamic", "")]
        assert twin.design == replace(one.design, scheduler=STATIC_PERSISTENT)
        assert twin.block_shape == one.block_shape
        assert twin.preference < one.preference
        assert twin.workspace is None
        assert one.workspace is not None
        assert one.workspace.zeroed_once == 4
        assert one.workspace.size_bytes(problem) == one.workspace.zeroed_bytes(problem) == 128
        assert one.is_deterministic, "a cluster computes its tile as a whole, whichever it takes"
    rest = [one for one in found if one.design.splits == 1 and one not in dynamic]
    assert all(one.workspace is None for one in rest)


@pytest.mark.parametrize(
    "key",
    [
        "mm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/swiglu_halves",
    ],
)
def test_no_dynamic_schedule_ranks_before_its_twin(key: str) -> None:
    """Neither by the model, nor corrected: what was measured says nothing about it."""
    signature = Signature.parse(key)
    target = build_target("sm_90a")
    provider = Quack()
    found = provider.enumerate(signature, target).candidates
    model = provider.runtime_model(target)
    correction = find_correction(target, model.name)
    assert correction is not None
    multiprocessors = target.device.sm_count.value

    def corrected(
        problem: Problem, candidates: Sequence[Candidate], times: Sequence[int | None]
    ) -> list[int | None]:
        return correction.corrected(problem, candidates, times, multiprocessors)

    seen = 0
    for m, n, k in ((8192, 14336, 4096), (4096, 4096, 4096), (500, 28672, 4096), (16, 4096, 4096)):
        for limit, most in ((4, 0), (8, 1), (128, 12)):
            problem = Problem(signature=signature, m=m, n=n, k=k)
            chosen = select(problem, found, model.estimate_ns, limit, corrected).choices
            names = [choice.candidate.operator for choice in chosen]
            dynamic = [name for name in names if "_dynamic_" in name]
            assert len(dynamic) <= most
            for name in dynamic:
                assert names.index(name.replace("_dynamic", "")) < names.index(name)
            seen += len(dynamic)
    assert seen >= 4


def test_two_parts_are_never_added_in_any_order() -> None:
    """Their sum is the same, so nothing would be gained by zeros for the partial results."""
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    assert all(one.splits > 2 for one in designs(HOPPER, signature) if one.in_any_order)


@pytest.mark.parametrize(
    "key",
    [
        "mm/tn/bf16xbf16/fp32/bf16/bias",
        "bmm/nt/fp16xfp16/fp32/fp32/add",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row",
        "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp16/fp32_tensor/bias",
    ],
)
def test_sums_of_what_does_more_than_multiply_are_split_in_a_fixed_order_alone(key: str) -> None:
    found = Quack().enumerate(Signature.parse(key), build_target("sm_90a")).candidates
    assert {one.design.splits for one in found} >= {1, 2, 4}
    assert all(one.is_deterministic for one in found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_gated_kernels_share_a_counter_of_tiles_at_most(arch: str) -> None:
    """Parts of a sum have nothing to join; a tile that a counter hands out is summed as a whole."""
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16/swiglu_halves")
    found = Quack().enumerate(signature, build_target(arch)).candidates
    assert {one.design.splits for one in found} == {1}
    assert any(one.has_workspace for one in found) == (arch == HOPPER)
    assert all(one.is_deterministic for one in found)


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
    monkeypatch.setattr("nvgemm_aot.providers.quack._LIBRARY", "no-such-quack")
    said = (
        r"no-such-quack is not installed; run: pip install '\.\[build\]' in .*, or build without "
        r"it: set providers: \[cutlass_operators\] in the manifest$"
    )
    with pytest.raises(ToolchainError, match=said):
        Quack().toolchain()


def test_without_the_compiler_no_other_provider_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_dsl, "DISTRIBUTIONS", ("no-such-dsl",))
    with pytest.raises(ToolchainError, match=r"no-such-dsl is not installed; run: .*dot$"):
        Quack().toolchain()


@pytest.mark.parametrize("version", ["0.6.4", "0.7.0"])
def test_another_release_of_the_library_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    honest = cute_setup.version

    def versions(name: str) -> str:
        return version if name == "quack-kernels" else honest(name)

    monkeypatch.setattr(cute_setup, "version", versions)
    path = tmp_path / "both.yaml"
    path.write_text(MANIFEST.format(arch="sm_90a", providers="cutlass_operators, quack", k=256))
    said = rf"quack-kernels {version} is installed, must be 0\.6\.5.*run: pip install 'quack-ker"
    with pytest.raises(ToolchainError, match=said):
        build(load_manifest(path), tmp_path / "out", Cache(tmp_path / "cache"), jobs=1)
    assert not (tmp_path / "out").exists()


def test_the_extra_installs_a_release_that_is_accepted() -> None:
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r'"(quack-kernels[^"]*)"', text)
    assert all(Requirement(line).specifier.contains(one) for one in ACCEPTED_VERSIONS)


def test_a_library_that_does_not_import_is_an_error_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "quack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "dsl.py").write_text("raise AttributeError('no such thing in this compiler')")
    code = (
        "from nvgemm_aot.providers.quack.entry import import_library\n"
        "from nvgemm_runtime.errors import ToolchainError\n"
        "try:\n"
        "    import_library()\n"
        "except ToolchainError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "AttributeError: no such thing in this compiler; run: pip install" in done.stdout
    # Its metadata is there, so pip would change nothing without --force-reinstall.
    assert f"--force-reinstall --no-deps quack-kernels=={version('quack-kernels')}" in done.stdout


class WithAnImpossibleDesign(Quack):
    """Offers a tile that no instruction multiplies, before all others."""

    name = "test_quack:WithAnImpossibleDesign"

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        found = super().enumerate(signature, target).candidates
        fitting = [one for one in found if "cooperative_cluster1x1x1_tile64x128x64" in one.operator]
        listed = [replace(one, provider=self.name) for one in fitting]
        shape = replace(listed[0].block_shape, tile=(64, 100, 64))
        design = replace(listed[0].design, tile=(64, 100, 64))
        return Enumeration(
            candidates=(
                replace(listed[0], operator="impossible", design=design, block_shape=shape),
                *listed,
            )
        )

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        if candidate.operator != "impossible":
            return super().compile(candidate, target)
        impossible = Design(tile=(64, 100), cluster=(1, 1))
        compile_entry(impossible, candidate.signature, target.target.arch)
        raise AssertionError("it compiles")


@pytest.mark.slow
def test_a_design_that_does_not_compile_is_named_and_the_others_are_built(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(MANIFEST.format(arch="sm_90a", providers=WithAnImpossibleDesign.name, k=256))
    result = build(load_manifest(path), tmp_path / "out", kernel_cache, jobs=1)
    (bundle,) = result.bundles
    assert [kernel.operator for kernel in bundle.header.kernels] == [
        "quack.GemmDefaultSm90_cooperative_cluster1x1x1_tile64x128x64"
    ]
    (failure,) = bundle.failures
    assert failure.task.candidate.operator == "impossible"
    assert "compile() of provider 'test_quack:WithAnImpossibleDesign' raised" in failure.reason
    assert not result.unserved


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


def test_beside_another_provider_it_offers_the_same() -> None:
    target = build_target("sm_90a")
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    alone, both = load_provider("quack"), load_provider("cutlass_operators+quack")
    found = alone.enumerate(signature, target).candidates
    assert both.enumerate(signature, target).candidates[-len(found) :] == found
