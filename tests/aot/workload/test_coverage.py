"""Coverage of recordings by bundles, with the percentages worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from nvgemm_aot.cli.coverage.command import coverage_document, coverage_text
from nvgemm_aot.cli.coverage.coverage_gate import require_coverage
from nvgemm_aot.cli.terminal.printing import percent_text
from nvgemm_aot.targets import build_target, build_targets
from nvgemm_aot.workload.coverage import (
    SERVED,
    GemmCoverage,
    Sizes,
    Status,
    TargetCoverage,
    Weight,
    call_of,
    cover,
    read_undeclarable,
    readings,
)
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured
from nvgemm_runtime.errors import CoverageError
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, Epilogue, GateForm
from nvgemm_runtime.gemm.problem import Layout, Problem, Signature
from nvgemm_runtime.matching.device import UNKNOWN_VERSION
from nvgemm_runtime.recording.text import Recording, gemm_line
from recorded_gemms import (
    DECLARED,
    FP16,
    OTHER_SIZE,
    OTHER_TYPE,
    RECORDING,
    content,
    problem,
    recording,
    view,
)

BIAS = GemmCoverage(
    gemm="addmm of fp32[16, 64] and fp32[64, 64] into fp32[16, 64]",
    problem=None,
    sizes=Sizes(16, 64, 64),
    count=2,
    reasons=("no bundled kernel adds a bias",),
)


def only(targets: tuple[TargetCoverage, ...]) -> TargetCoverage:
    [target] = targets
    return target


def shortfall(targets: tuple[TargetCoverage, ...], least: int | str, **options: Any) -> str:
    """What the gate says of targets that are not covered so well by count."""
    with pytest.raises(CoverageError) as raised:
        require_coverage(targets, Decimal(least), by=Weight.COUNT, **options)
    return str(raised.value)


def test_each_problem_is_declared_served_by_signature_or_missed() -> None:
    target = only(cover(RECORDING, [view(content())]))
    declared, other, missed = target.gemms
    assert [one.status.value for one in target.gemms] == ["declared", "signature", "missed"]
    assert [one.count for one in target.gemms] == [3, 1, 4]
    assert declared.ranked_as == other.ranked_as == DECLARED
    assert declared.bundle == other.bundle == "a bundle"
    assert declared.kernels == other.kernels == 1
    assert missed.ranked_as is missed.bundle is None
    assert missed.reasons == (
        f"no bundled kernel computes {FP16.key} (bundled: {DECLARED.signature.key})",
    )


def test_a_problem_that_was_measured_and_not_declared_is_served_by_signature() -> None:
    base = content(OTHER_SIZE, DECLARED)
    measured = Measured(spreads_ns=(1,), aten=None, triton=None, doubts=())
    conditions = Conditions(driver="580", torch="2.11.0", cuda="13.0", date="2026-11-21")
    other, declared = base.rankings
    source = replace(other.source, kind="measurement", conditions=conditions)
    between = replace(other, source=source, measured=measured, is_declared=False)
    bundle = view(replace(base, rankings=(between, declared)))
    targets = cover(recording([(DECLARED, 1), (OTHER_SIZE, 1)]), [bundle])
    assert [one.status.value for one in only(targets).gemms] == ["declared", "signature"]
    assert [one.ranked_as for one in only(targets).gemms] == [DECLARED, OTHER_SIZE]
    require_coverage(targets, Decimal(100), by=Weight.COUNT)
    assert "50" in shortfall(targets, 100, declared_only=True)


def test_a_target_that_no_bundle_serves_is_0_percent_and_says_why() -> None:
    manifest = recording([(DECLARED, 1)], "sm_100f", "sm_90a")
    blackwell, hopper = cover(manifest, [view(content())])
    assert blackwell.percent(Weight.COUNT, SERVED) == 100
    assert blackwell.bundles == ("a bundle",)
    assert hopper.percent(Weight.COUNT, SERVED) == 0
    assert hopper.bundles == ()
    [missed] = hopper.gemms
    assert missed.reasons == ("no bundle serves this device (NVIDIA H200, compute capability 9.0)",)
    assert hopper.refusals == (
        "a bundle: sm_100f kernels do not run on NVIDIA H200, compute capability 9.0",
    )


def test_several_bundles_serve_together_and_each_target_has_its_own() -> None:
    manifest = recording([(DECLARED, 1), (OTHER_TYPE, 1)], "sm_100f", "sm_90a")
    bundles = [
        view(content(), "bf16"),
        view(content(OTHER_TYPE), "fp16"),
        view(content(arch="sm_90a"), "hopper"),
    ]
    blackwell, hopper = cover(manifest, bundles)
    assert [one.bundle for one in blackwell.gemms] == ["bf16", "fp16"]
    assert [one.bundle for one in hopper.gemms] == ["hopper", None]


def test_the_manifests_gpu_is_asked_for() -> None:
    """An sm_100a bundle serves a B200, and not the GB300 of the same family."""
    family = recording([(DECLARED, 1)])
    on_gb300 = replace(family, targets=(build_target("sm_100f", "GB300"),))
    bundles = [view(content(arch="sm_100a"))]
    assert only(cover(family, bundles)).percent(Weight.COUNT, SERVED) == 100
    assert only(cover(on_gb300, bundles)).percent(Weight.COUNT, SERVED) == 0


def test_a_single_row_is_read_in_both_layouts_as_the_runtime_does() -> None:
    tn, nn = problem(1), problem(1, signature=replace(DECLARED.signature, layout=Layout.NN))
    assert [asked.problem for asked in readings(call_of(tn))] == [tn, nn]
    [found] = only(cover(recording([(tn, 1)]), [view(content(nn, alignment=2))])).gemms
    assert (found.status, found.ranked_as) == (Status.DECLARED, nn)


@pytest.mark.parametrize(
    ("asked", "alignment"),
    [
        (problem(16), 16),
        (problem(7), 16),  # m is no contiguous extent of tn
        (problem(16, n=1001), 2),
        (problem(16, n=1004), 8),
        (problem(16, k=1002), 4),
        (problem(16, n=1004, signature=Signature.parse("mm/tn/bf16xbf16/fp32/fp32")), 16),
        (problem(12, signature=Signature.parse("mm/nt/bf16xbf16/fp32/bf16")), 8),
        (Problem.parse("bmm/tn/int8xint8/int32/int32/b3m1n8k8"), 8),
    ],
)
def test_operands_are_contiguous_at_aligned_addresses(asked: Problem, alignment: int) -> None:
    best = readings(call_of(asked))[0]
    assert best.problem == asked
    assert best.alignment_bytes == alignment


def test_the_installed_library_does_not_matter() -> None:
    """A bundle of any toolchain is judged as in a process that has a library for it."""
    for library in ("3.0.0", "4.8.1", "9.1.2"):
        target = only(cover(RECORDING, [view(content(library=library))]))
        assert target.runtime_library == library
        assert target.percent(Weight.PROBLEMS, {Status.DECLARED}) == Fraction(100, 3)
    target = only(cover(RECORDING, [view(content(library=None))]))
    assert target.runtime_library == UNKNOWN_VERSION
    assert target.bundles == ("a bundle",)


def test_bundles_of_two_toolchains_are_used_beside_each_other() -> None:
    bundles = [
        view(content(library="4.8.1"), "old"),
        view(content(OTHER_TYPE, library="4.9.0"), "new"),
    ]
    target = only(cover(RECORDING, bundles))
    assert target.runtime_library == "4.9.0"
    assert set(target.bundles) == {"new", "old"}
    assert target.refusals == ()
    hopper = view(content(arch="sm_90a", library="5.0.0"), "hopper")
    assert only(cover(RECORDING, [*bundles, hopper])).runtime_library == "4.9.0", "not for this GPU"


def test_kernels_that_this_release_cannot_call_do_not_count() -> None:
    built = content()
    kernel = replace(built.kernels[0], calling_convention="tvm_ffi:gemm(a,b,out)")
    target = only(cover(RECORDING, [view(replace(built, kernels=(kernel,)))]))
    assert target.bundles == ()
    assert target.percent(Weight.PROBLEMS, SERVED) == 0
    assert "calling convention" in target.refusals[0]


def test_without_bundles_everything_is_missed() -> None:
    target = only(cover(RECORDING, [], unusable=["x: [magic] broken"]))
    assert target.percent(Weight.PROBLEMS, {Status.MISSED}) == 100
    assert target.refusals == ("x: [magic] broken",)


def test_gemms_that_no_manifest_declares_are_missed() -> None:
    target = only(cover(RECORDING, [view(content())], undeclarable=[BIAS]))
    assert target.gemms[-1] == BIAS
    assert target.percent(Weight.PROBLEMS, SERVED) == 50
    assert target.percent(Weight.COUNT, SERVED) == 40
    assert target.percent(Weight.FLOPS, SERVED) == Fraction(500, 11)  # as large as DECLARED


def test_the_heaviest_come_first_and_of_equals_those_with_more_flops() -> None:
    asked = [(problem(1), 2), (problem(2), 5), (problem(64), 2)]
    target = only(cover(recording(asked), []))

    def order(by: Weight) -> list[int]:
        return [one.problem.m for one in target.heaviest(by, set(Status)) if one.problem]

    assert order(Weight.COUNT) == [2, 64, 1]
    assert order(Weight.FLOPS) == [64, 2, 1]
    assert order(Weight.PROBLEMS) == [64, 2, 1]


def test_percentages_that_binary_fractions_miss_are_compared_exactly() -> None:
    targets = cover(recording([(DECLARED, 999), (OTHER_TYPE, 1)]), [view(content())])
    require_coverage(targets, Decimal("99.9"), by=Weight.COUNT)
    assert shortfall(targets, "99.90000000000000001")


def test_the_gate_says_what_is_missing_and_how_to_cover_it() -> None:
    targets = cover(RECORDING, [view(content())], undeclarable=[BIAS])
    assert shortfall(targets, 90).splitlines() == [
        "sm_100f-linux_x86_64-cu13 on B200: 40.0 % covered by count, must be at least 90 %; "
        "the heaviest of 2 missing:",
        f"  {OTHER_TYPE.key}: no bundled kernel computes {FP16.key} "
        f"(bundled: {DECLARED.signature.key})",
        f"  {BIAS.gemm}: no bundled kernel adds a bias",
        "a bundle built from these lines covers those that a manifest can declare:",
        "  targets: [sm_100f]",
        "  gemms:",
        "    - {op: mm, dtype: fp16, out: fp16, layout: tn, m: 16, n: 64, k: 64}",
    ]  # fmt: skip


def test_the_gate_can_ask_for_declared_problems_alone() -> None:
    targets = cover(RECORDING, [view(content())])
    require_coverage(targets, Decimal("37.5"), by=Weight.COUNT, declared_only=True)
    said = shortfall(targets, 50, declared_only=True)
    assert "37.5 % declared by count" in said
    assert f"{OTHER_SIZE.key}: served by signature only" in said
    assert "m: 32, n: 64, k: 64}" in said


def test_the_gate_names_every_target_that_falls_short_and_no_other() -> None:
    manifest = recording([(DECLARED, 1)], "sm_100f", "sm_103a", "sm_90a")
    said = shortfall(cover(manifest, [view(content())]), 1)
    assert "sm_90a-linux_x86_64-cu13 on H200: 0.0 %" in said
    assert "targets: [{arch: sm_90a, device: H200}]" in said
    assert "sm_100f-linux" not in said
    assert "sm_103a-linux" not in said, "the bundle serves its GPU too"


def test_the_gate_proposes_the_gpu_that_was_asked_for() -> None:
    on_h100 = replace(recording([(DECLARED, 1)]), targets=(build_target("sm_90a", "H100"),))
    assert "targets: [{arch: sm_90a, device: H100}]" in shortfall(cover(on_h100, []), 1)


def test_the_gate_proposes_one_bundle_for_all_products_of_a_target() -> None:
    both = replace(recording([(DECLARED, 1)]), targets=build_targets("sm_90a"))
    assert shortfall(cover(both, []), 1).count("  targets: [sm_90a]\n") == 2
    named = replace(both, targets=both.targets[::-1])
    entry = "  targets: [{arch: sm_90a, devices: [H100, H200]}]\n"
    assert shortfall(cover(named, []), 1).count(entry) == 2


def test_each_product_is_covered_by_the_rankings_for_it() -> None:
    base = content(DECLARED, arch="sm_90a")
    (estimate,) = base.rankings
    h200, h100 = (one.device.driver_name for one in build_targets("sm_90a"))
    conditions = Conditions(driver="1", torch="2.11.0", cuda="13.0", date="2026-11-21")
    measured_beside = replace(
        estimate,
        problem=OTHER_SIZE,
        source=replace(estimate.source, kind="measurement", gpu=h200, conditions=conditions),
        kernels=((estimate.kernels[0][0], 1000),),
        measured=Measured(spreads_ns=(1,), aten=None, triton=None, doubts=()),
        is_declared=False,
    )
    rankings = (
        replace(estimate, source=replace(estimate.source, gpu=h200)),
        replace(estimate, source=replace(estimate.source, gpu=h100), is_further=True),
        measured_beside,
    )
    both = replace(recording([(OTHER_SIZE, 1)]), targets=build_targets("sm_90a"))
    covered = cover(both, [view(replace(base, rankings=rankings))])
    assert [(one.target.device.name, one.gemms[0].ranked_as) for one in covered] == [
        ("H200", OTHER_SIZE),
        ("H100", DECLARED),
    ]


def test_the_gate_proposes_nothing_that_cannot_be_built() -> None:
    unaligned = recording([(problem(16, n=1001), 1)])
    said = shortfall(cover(unaligned, [view(content())]), 1)
    assert "aligned to 2 bytes" in said
    assert "gemms:" not in said


@pytest.mark.parametrize(
    ("gemm", "sizes"),
    [
        ("_int_mm of int8[3, 5] and int8[5, 7] into int32[3, 7]", Sizes(3, 7, 5)),
        ("bmm of fp32[2, 3, 5] and fp32[2, 5, 7] into fp32[2, 3, 7]", Sizes(3, 7, 5, 2)),
        ("mm of fp32[0, 5] and fp32[5, 7] into fp32[0, 7]", None),
        ("mm of fp32[5] and fp32[5] into fp32[1]", None),
        ("something else altogether", None),
    ],
)
def test_words_become_a_gemm_with_its_sizes_and_reason(gemm: str, sizes: Sizes | None) -> None:
    for suffix, reason in ((": why: because", "why: because"), ("", "no manifest can declare it")):
        others = Counter({f"{gemm}{suffix}": 2})
        text = Recording(name="x", targets={"sm_90a"}, undeclarable=others).render()
        missed = GemmCoverage(gemm=gemm, problem=None, sizes=sizes, count=2, reasons=(reason,))
        assert read_undeclarable(text) == (missed,)


def shares(covered: float, declared: float, signature: float, missed: float) -> dict[str, float]:
    return {"covered": covered, "declared": declared, "signature": signature, "missed": missed}


def test_the_document_keeps_its_shape() -> None:
    made = coverage_document(RECORDING, cover(RECORDING, [view(content())]), Weight.FLOPS)
    document = json.loads(json.dumps(made))
    assert document.keys() == {"manifest", "by", "targets"}
    assert (document["manifest"], document["by"]) == ("recorded", "flops")
    [target] = document["targets"]
    flops = 2 * 16 * 64 * 64
    missed = target.pop("gemms")[0]
    assert target == {
        "target": "sm_100f-linux_x86_64-cu13",
        "device": "B200",
        "runtime_library": "4.8.1",
        "bundles": ["a bundle"],
        "refusals": [],
        "totals": {"problems": 3, "count": 8, "flops": 9 * flops},
        "percent": {
            "problems": pytest.approx(shares(200 / 3, 100 / 3, 100 / 3, 100 / 3)),
            "count": shares(50.0, 37.5, 12.5, 50.0),
            "flops": pytest.approx(shares(500 / 9, 300 / 9, 200 / 9, 400 / 9)),
        },
    }
    assert missed == {
        "gemm": OTHER_TYPE.key,
        "status": "missed",
        "count": 4,
        "flops": 4 * flops,
        "ranked_as": None,
        "kernels": 0,
        "bundle": None,
        "split": False,
        "reasons": [f"no bundled kernel computes {FP16.key} (bundled: {DECLARED.signature.key})"],
    }


def test_the_text_says_each_reason_once_and_which_bundles_are_left_out() -> None:
    asked = [(DECLARED, 3), (OTHER_SIZE, 1), (OTHER_TYPE, 4), (problem(8, signature=FP16), 2)]
    manifest = recording(asked)
    targets = cover(manifest, [view(content()), view(content(arch="sm_90a"), "hopper")])
    lines = coverage_text(coverage_document(manifest, targets, Weight.COUNT)).splitlines()
    first, second, _, last = (line.split() for line in lines[3:7])
    assert first == [OTHER_TYPE.key, "missed", "4", "40.0", "%", "40.0", "%", "see", "[1]"]
    assert second == [DECLARED.key, "declared", "3", "30.0", "%", "30.0", "%"]
    assert last[-1] == "m16n64k64"
    assert sum(line.startswith("[") for line in lines) == 1
    why = "sm_90a kernels do not run on NVIDIA B200, compute capability 10.0"
    assert lines[lines.index("left out:") + 1] == f"  hopper: {why}"


def test_a_percentage_is_only_100_where_it_is_all() -> None:
    assert percent_text(Fraction(99_999, 1000)) == "99.9 %"
    assert percent_text(Fraction(100)) == "100.0 %"


BIASED = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/bias/m16n64k64")
PRODUCT = Problem.parse("mm/tn/bf16xbf16/fp32/fp32/m16n64k64")
OTHER_PRODUCT = Problem.parse("mm/tn/bf16xbf16/fp32/fp32/m32n64k64")


@pytest.mark.parametrize(
    "key",
    [
        "mm/tn/bf16xbf16/fp32/bf16/bias_silu/m16n64k64",
        "mm/tn/bf16xbf16/fp32/bf16/bias/m16n64k64",
        "bmm/tn/bf16xbf16/fp32/bf16/add/b3m16n64k64",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/m16n64k64",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor/bias/m16n64k64",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32/m16n64k64",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/g4m16n64k64",
    ],
)
def test_plain_kernels_serve_nothing_with_scales_groups_or_an_epilogue(key: str) -> None:
    asked = Problem.parse(key)
    signatures = ("mm/tn/bf16xbf16/fp32/bf16", "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16")
    plain = [Problem.parse(f"{signature}/m16n64k64") for signature in signatures]
    plain.append(Problem.parse("bmm/tn/bf16xbf16/fp32/bf16/b3m16n64k64"))
    [missed] = only(cover(recording([(asked, 1)]), [view(content(*plain))])).gemms
    assert (missed.status, missed.ranked_as) == (Status.MISSED, None)
    assert missed.reasons[0].startswith(f"no bundled kernel computes {asked.signature.key}")
    [found] = only(cover(recording([(asked, 1)]), [view(content(*plain, asked))])).gemms
    assert (found.status, found.ranked_as, found.is_split) == (Status.DECLARED, asked, False)


def test_a_sum_is_ranked_as_its_own_problem_beside_plain_ones() -> None:
    bundle = view(content(problem(16), BIASED, PRODUCT))
    [found] = only(cover(recording([(BIASED, 1)]), [bundle])).gemms
    assert (found.status, found.ranked_as, found.is_split) == (Status.DECLARED, BIASED, False)


@pytest.mark.parametrize(
    ("asked", "is_served"),
    [
        ("mm/tn/bf16xbf16/fp32/bf16/bias/m16n64k64", True),
        ("mm/tn/bf16xbf16/fp32/bf16/add/m16n64k64", True),
        ("mm/tn/bf16xbf16/fp32/bf16/bias_relu/m16n64k64", False),
        ("mm/tt/bf16xbf16/fp32/bf16/bias/m16n64k64", False),
        ("mm/tn/fp16xfp16/fp32/fp16/bias/m16n64k64", False),
    ],
)
def test_a_sum_whose_product_is_bundled_in_fp32_is_served_by_signature(
    asked: str, is_served: bool
) -> None:
    """As torch.compile splits it, and however the product is found."""
    wanted = Problem.parse(asked)
    for declared in (PRODUCT, OTHER_PRODUCT):
        manifest = recording([(wanted, 1)], "sm_90a")
        [found] = only(cover(manifest, [view(content(declared, arch="sm_90a"))])).gemms
        assert found.status is (Status.SIGNATURE if is_served else Status.MISSED)
        assert found.ranked_as == (declared if is_served else None)
        assert found.is_split == is_served


def test_a_sum_of_8_bits_is_never_split_for_torch_adds_none() -> None:
    asked = Problem.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/bias/m16n64k64")
    product = Problem.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp32/m16n64k64")
    [found] = only(cover(recording([(asked, 1)]), [view(content(product))])).gemms
    assert found.status is Status.MISSED


def test_a_missed_sum_says_why_its_product_is_missed_too() -> None:
    target = only(cover(recording([(BIASED, 1)]), [view(content())]))
    [missed] = target.gemms
    assert [reason.partition(" (bundled")[0] for reason in missed.reasons] == [
        f"no bundled kernel computes {BIASED.signature.key}",
        f"for the product alone, {PRODUCT.key}: no bundled kernel computes {PRODUCT.signature.key}",
    ]


def test_split_sums_are_shown_as_such() -> None:
    manifest = recording([(BIASED, 1)], "sm_90a")
    targets = cover(manifest, [view(content(PRODUCT, arch="sm_90a"))])
    document = coverage_document(manifest, targets, Weight.COUNT)
    [shown] = document["targets"][0]["gemms"]
    assert (shown["status"], shown["ranked_as"], shown["split"]) == ("signature", PRODUCT.key, True)
    assert f"{PRODUCT.key}, and torch adds" in coverage_text(document)


def test_the_gate_proposes_what_the_target_has_operators_for() -> None:
    silu = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/bias_silu/m16n64k64")
    scaled = Problem.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32/m16n64k64")
    asked = [(BIASED, 1), (silu, 1), (scaled, 1)]
    said = shortfall(cover(recording(asked, "sm_90a"), []), 1)
    assert gemm_line(BIASED) in said
    assert gemm_line(silu) in said
    assert gemm_line(scaled) not in said
    said = shortfall(cover(recording(asked, "sm_100f"), []), 1)
    assert all(gemm_line(one) in said for one, _ in asked)


def test_the_gate_says_how_a_split_sum_is_served() -> None:
    targets = cover(recording([(BIASED, 1)], "sm_90a"), [view(content(PRODUCT, arch="sm_90a"))])
    require_coverage(targets, Decimal(100), by=Weight.COUNT)
    said = shortfall(targets, 100, declared_only=True)
    assert "served by signature only; a bundled kernel computes its product, and torch adds" in said
    assert gemm_line(BIASED) in said


@pytest.mark.parametrize("epilogue", [one for one in ALL_EPILOGUES if one.gate is not None])
def test_a_gated_problem_asks_for_itself(epilogue: Epilogue) -> None:
    """Alone, although its product would also be a problem."""
    places = ["grouped_mm/tn:g3"]
    if epilogue.form is GateForm.JOINED:
        places.append("mm/tn:")
    if epilogue.reads_addend:
        places.append("grouped_mm/tt:g3")
    for lead, count in (place.split(":") for place in places):
        asked = Problem.parse(f"{lead}/bf16xbf16/fp32/bf16/{epilogue.name}/{count}m16n64k32")
        assert [found.problem for found in readings(call_of(asked))] == [asked]


def test_gates_in_training_are_covered_where_they_are_built() -> None:
    """By their own kernels alone: that of another form, or of the plain product, serves neither."""
    kept, gradient, summed, ups, joined, plain = (
        Problem.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16{epilogue}/g3m16n64k32")
        for epilogue in (
            "/swiglu_halves_kept", "/swiglu_halves_gradient", "/swiglu_halves_gradient_sums",
            "/swiglu_halves_ups", "/swiglu_halves", "",
        )
    )  # fmt: skip
    asked = recording([(kept, 1), (gradient, 1)], "sm_90a")
    (whole,) = cover(asked, [view(content(kept, gradient, arch="sm_90a"))])
    assert whole.percent(Weight.COUNT, SERVED) == 100
    (other,) = cover(asked, [view(content(summed, ups, joined, plain, arch="sm_90a"))])
    assert other.percent(Weight.COUNT, SERVED) == 0
    of_sums = recording([(summed, 1)], "sm_90a")
    for built, percent in ((summed, 100), (gradient, 0)):
        (found,) = cover(of_sums, [view(content(built, arch="sm_90a"))])
        assert found.percent(Weight.COUNT, SERVED) == percent
    of_ups = recording([(ups, 1)], "sm_90a")
    for built, percent in ((ups, 100), (gradient, 0), (plain, 0)):
        (found,) = cover(of_ups, [view(content(built, arch="sm_90a"))])
        assert found.percent(Weight.COUNT, SERVED) == percent
    (half,) = cover(asked, [view(content(kept, arch="sm_90a"))])
    assert half.percent(Weight.COUNT, SERVED) == 50


@pytest.mark.parametrize("m", [1, 16])
def test_groups_with_a_bias_ask_for_themselves(m: int) -> None:
    """Of one row, too, where a row could be a matrix if there were no groups."""
    asked = Problem.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16/bias/g1m{m}n64k32")
    assert {found.problem.signature.epilogue for found in readings(call_of(asked))} == {
        Epilogue.parse("bias")
    }


@pytest.mark.parametrize("scales", ["fp32_row", "fp32_tensor"])
def test_scales_of_one_value_are_those_that_are_declared(scales: str) -> None:
    """Of a result of one value, the scales of rows are as large as those of tensors."""
    asked = Problem.parse(f"mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/{scales}/m1n1k512")
    assert {one.problem.signature.scales for one in readings(call_of(asked))} == {
        asked.signature.scales
    }
