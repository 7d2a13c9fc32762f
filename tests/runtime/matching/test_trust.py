"""What a measured ranking is good for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.problem import DType, Layout, Problem
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.matching.device import TorchVersions
from nvgemm_runtime.matching.matches import Basis, BundleView, Match, MatchedKernel
from nvgemm_runtime.matching.trust import Decision, Terms, decide
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import H200

VERSIONS = TorchVersions(torch="2.11.0+cu130", cuda="13.0")
CONDITIONS = Conditions(driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21")
SOURCE = RankingSource(
    kind="measurement", by="nvgemm-aot 0.1.0", gpu="NVIDIA H200", conditions=CONDITIONS
)

PROBLEM = Problem(signature=SIGNATURE, m=16, n=4096, k=4096)
REQUEST = Request(problem=PROBLEM, alignment_bytes=32)
"""Compact, and as well aligned as torch.compile knows of."""


BUNDLE = BundleView(name="b", header=encode_bundle(synthetic_content(kernels=3, problems=1))[1])


def match(
    *,
    ours: int = 1000,
    aten: int | None = 1200,
    triton: int | None = None,
    spreads: tuple[int, int, int] = (5, 5, 5),
    **changes: Any,
) -> Match:
    """A declared problem whose best kernel took ``ours`` nanoseconds, the others 100 more each."""
    served = tuple(
        MatchedKernel(bundle=BUNDLE, kernel=kernel, rank=rank, time_ns=ours + 100 * rank)
        for rank, kernel in enumerate(BUNDLE.header.kernels)
    )
    measured = Measured(
        spreads_ns=spreads,
        aten=None if aten is None else Timing(time_ns=aten, spread_ns=5),
        triton=None if triton is None else Timing(time_ns=triton, spread_ns=5),
        doubts=(),
    )
    found = Match(
        basis=Basis.DECLARED,
        ranked_as=PROBLEM,
        source=SOURCE,
        kernels=served,
        measured=measured,
    )
    return replace(found, **changes)


def outcome(found: Match, **how: Any) -> Decision:
    request, facts = how.pop("request", REQUEST), how.pop("facts", H200)
    versions = how.pop("versions", VERSIONS)
    return decide(found, request, facts, versions, Terms(**{"limit": 2, **how}))


def test_only_the_winner_is_offered() -> None:
    found = match()
    decision = outcome(found)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert decision.why == "measured once on NVIDIA H200, 2026-11-21: 1.0 us, ATen 1.2 us"


@pytest.mark.parametrize(
    ("gpus", "doubts", "said"),
    [
        ((), (), "measured once"),
        (("a" * 64,), (), "measured once"),
        (("a" * 64, "a" * 64), (), "measured once"),
        (("a" * 64, "b" * 64), (), "confirmed by 2 GPUs"),
        (("a" * 64, "b" * 64), ("it was hot",), "doubtful"),
    ],
)
def test_two_distinct_gpus_without_doubts_confirm(
    gpus: tuple[str, ...], doubts: tuple[str, ...], said: str
) -> None:
    measured = match().measured
    assert measured is not None
    measured = replace(measured, confirmed_by=gpus, doubts=doubts)
    assert measured.standing == said
    assert measured.is_confirmed == (said == "confirmed by 2 GPUs")
    if not doubts:
        assert outcome(match(measured=measured)).why.startswith(f"{said} on NVIDIA H200, ")


def test_nothing_is_offered_where_aten_was_faster_or_equal() -> None:
    for aten in (900, 1000):
        decision = outcome(match(aten=aten))
        assert decision.kernels == ()
        assert not decision.is_final


def test_what_is_trusted_is_not_timed() -> None:
    assert outcome(match(), trusts_measurements=True).is_final
    lost = outcome(match(aten=900), trusts_measurements=True)
    assert lost.is_final
    assert lost.kernels == ()


@pytest.mark.parametrize("trusts", [False, True])
def test_where_kernels_are_required_the_best_is_offered_and_timed_though_aten_won(
    trusts: bool,
) -> None:
    found = match(aten=900)
    decision = outcome(found, trusts_measurements=trusts, needs_kernel=True)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final


OBSTACLES = {
    "another product": ({}, {"facts": replace(H200, name="NVIDIA H200 NVL")}, "is NVIDIA H200 NVL"),
    "another CUDA": ({}, {"facts": replace(H200, cuda="cu14")}, "CUDA 13.0, torch uses cu14"),
    "gaps": ({}, {"request": replace(REQUEST, is_compact=False)}, "without gaps"),
    "less alignment": (
        {},
        {"request": replace(REQUEST, alignment_bytes=16)},
        "aligned to 32 bytes or more, but these are aligned to 16",
    ),
    "without its first kernel": (
        {"kernels": match().kernels[1:]}, {}, "the kernel that was measured fastest"
    ),
    "doubts": (
        {"measured": replace(match().measured, doubts=("it was hot", "it was busy"))},
        {},
        "doubts: it was hot; it was busy",
    ),
    "no conditions": ({"source": replace(SOURCE, conditions=None)}, {}, ""),
    "an estimate": ({"measured": None, "source": replace(SOURCE, kind="estimate")}, {}, ""),
    "another size": ({"basis": Basis.SIGNATURE, "measured": None}, {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSTACLES)
def test_anything_else_is_offered_and_timed_as_ever(name: str) -> None:
    changes, how, why = OBSTACLES[name]
    found = match(**changes)
    decision = outcome(found, trusts_measurements=True, **how)
    assert decision.kernels == found.kernels[:2]
    assert not decision.is_final
    assert why in decision.why


def test_what_overlapped_with_itself_back_to_back_is_timed_again() -> None:
    """No device has run the kernels of this bundle: their entries alone say how they launch."""

    def served(*, dependent: int) -> tuple[MatchedKernel, ...]:
        return tuple(
            replace(
                one,
                kernel=replace(
                    one.kernel,
                    design=replace(one.kernel.design, dependent_launch=one.rank == dependent),
                ),
            )
            for one in match().kernels
        )

    apart = replace(SOURCE, conditions=replace(CONDITIONS, launches="apart"))
    otherwise = replace(SOURCE, conditions=replace(CONDITIONS, launches="one a second"))
    for place in range(3):
        kernels = served(dependent=place)
        assert outcome(match(kernels=kernels, source=apart), trusts_measurements=True).is_final
        for source in (SOURCE, otherwise):
            decision = outcome(match(kernels=kernels, source=source), trusts_measurements=True)
            assert decision.kernels == kernels[:2]
            assert not decision.is_final
            assert f"launches {source.conditions.launches}, not apart" in decision.why  # type: ignore[union-attr]
    assert outcome(match(kernels=served(dependent=-1)), trusts_measurements=True).is_final


def test_operands_that_cannot_be_better_aligned_are_as_measured() -> None:
    """Rows of A and columns of B are 16 bytes, rows of the result 48."""
    narrow = Problem(signature=replace(SIGNATURE, layout=Layout.TN), m=15, n=24, k=8)
    request = Request(problem=narrow, alignment_bytes=16)
    assert outcome(match(), request=request, trusts_measurements=True).is_final
    assert not outcome(
        match(), request=replace(request, alignment_bytes=8), trusts_measurements=True
    ).is_final


SLOW_ATEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of another torch": ({}, {"versions": replace(VERSIONS, torch="2.12.0+cu130")}),
    "that lost": ({"aten": 900}, {"needs_kernel": True}),
    "that was not measured": ({"aten": None}, {}),
}


@pytest.mark.parametrize("name", SLOW_ATEN)
def test_where_a_kernel_is_timed_so_are_those_that_were_not_told_apart_from_it(name: str) -> None:
    """Times are 1000, 1100 and 1200: only intervals say which of them are known to be slower."""
    changes, how = SLOW_ATEN[name]
    for spreads, count in [
        ((49, 50, 50), 1),
        ((50, 50, 50), 2),
        ((5, 5, 195), 2),
        ((100, 0, 100), 3),
    ]:
        found = match(spreads=spreads, **changes)
        decision = outcome(found, trusts_measurements=True, limit=3, **how)
        expected = found.kernels[:count] if spreads[2] != 195 else found.kernels[::2]
        assert decision.kernels == expected
        assert not decision.is_final
        assert outcome(found, limit=1, **how).kernels == found.kernels[:1]


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        (TorchVersions(torch="2.12.0+cu130", cuda="13.0"), "measured with torch 2.11.0+cu130"),
        (TorchVersions(torch="2.11.0+cu132", cuda="13.2"), "measured with CUDA 13.0"),
    ],
)
@pytest.mark.parametrize("aten", [900, 1200])
def test_another_aten_is_timed_against_the_winner(
    versions: TorchVersions, why: str, aten: int
) -> None:
    found = match(aten=aten)
    decision = outcome(found, trusts_measurements=True, versions=versions)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert why in decision.why


def test_a_patch_release_of_torch_changes_nothing() -> None:
    versions = TorchVersions(torch="2.11.1+cu130", cuda="13.0")
    assert outcome(match(), trusts_measurements=True, versions=versions).is_final


@pytest.mark.parametrize("beside", [frozenset(), frozenset({"Triton"})])
def test_where_triton_was_fastest_whoever_was_not_told_apart_is_timed(
    beside: frozenset[str],
) -> None:
    for aten in (990, 1200):
        for spreads, count in [((5, 5, 5), 1), ((150, 5, 5), 2), ((150, 5, 150), 3)]:
            found = match(triton=800, aten=aten, spreads=spreads)
            decision = outcome(found, trusts_measurements=True, limit=3, other_backends=beside)
            assert decision.kernels == found.kernels[:count]
            assert not decision.is_final
            assert "Triton 0.8 us" in decision.why
    assert outcome(match(triton=1100), trusts_measurements=True, other_backends=beside).is_final


@pytest.mark.parametrize("aten", [900, 1200])
def test_what_was_not_measured_is_timed_against_what_was_fastest(aten: int) -> None:
    unmeasured, measured = match(aten=aten), match(aten=aten, triton=1300)
    beside = frozenset({"Triton"})
    decision = outcome(unmeasured, trusts_measurements=True, other_backends=beside)
    assert decision.kernels == (unmeasured.kernels[:1] if aten == 1200 else ())
    assert not decision.is_final
    assert decision.why.endswith("; not measured: Triton")
    assert outcome(unmeasured, trusts_measurements=True).is_final, "Triton is no backend here"
    assert outcome(measured, trusts_measurements=True, other_backends=beside).is_final
    other = outcome(measured, trusts_measurements=True, other_backends=beside | {"CUTLASS"})
    assert not other.is_final
    assert other.why.endswith("; not measured: CUTLASS")


@pytest.mark.parametrize("aten", [900, 1200])
def test_atens_fast_sums_say_nothing_of_its_precise_ones(aten: int) -> None:
    found = match(aten=aten)
    fp8 = replace(
        SIGNATURE, layout=Layout.TN, a=DType.FP8_E4M3, b=DType.FP8_E4M3,
        scales=ScaleRecipe.FP32_TENSOR,
    )  # fmt: skip
    request = replace(REQUEST, problem=replace(PROBLEM, signature=fp8))
    decision = outcome(found, request=request, trusts_measurements=True, is_precise=True)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert "use_fast_accum" in decision.why
    assert outcome(found, request=request, trusts_measurements=True).is_final
    blocks = replace(fp8, scales=ScaleRecipe.E8M0_1X32)  # fast sums are not for these
    request = replace(REQUEST, problem=replace(PROBLEM, signature=blocks))
    assert outcome(found, request=request, trusts_measurements=True, is_precise=True).is_final


@pytest.mark.parametrize("aten", [900, 1200])
def test_an_aten_that_is_not_set_as_usual_is_timed_against_the_winner(aten: int) -> None:
    found = match(aten=aten)
    decision = outcome(
        found, trusts_measurements=True, aten_setting="a flag is True, usually False"
    )
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert "with default settings: a flag is True, usually False" in decision.why
