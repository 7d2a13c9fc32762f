"""What a measured ranking is good for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle import encode_bundle
from nvgemm_runtime.facts import TorchVersions
from nvgemm_runtime.format import Conditions, Kernel, Measured, RankingSource, Timing
from nvgemm_runtime.match import Basis, Match
from nvgemm_runtime.places import Served
from nvgemm_runtime.problem import Problem
from nvgemm_runtime.trust import Decision, decide
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import H200

VERSIONS = TorchVersions(torch="2.11.0+cu130", cuda="13.0")
CONDITIONS = Conditions(driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21")
SOURCE = RankingSource(
    kind="measurement", by="nvgemm-aot 0.1.0", gpu="NVIDIA H200", conditions=CONDITIONS
)


def kernels() -> tuple[Kernel, ...]:
    return encode_bundle(synthetic_content(kernels=3, problems=1))[1].kernels


def match(
    *, ours: int = 1000, aten: int | None = 1200, triton: int | None = None, **changes: Any
) -> Match:
    """A declared problem whose best kernel took ``ours`` nanoseconds."""
    served = tuple(
        Served(bundle=0, kernel=kernel, time_ns=ours + 100 * place)
        for place, kernel in enumerate(kernels())
    )
    measured = Measured(
        spreads_ns=(5, 5, 5),
        aten=None if aten is None else Timing(time_ns=aten, spread_ns=5),
        triton=None if triton is None else Timing(time_ns=triton, spread_ns=5),
        doubts=(),
    )
    found = Match(
        basis=Basis.DECLARED,
        ranked_as=Problem(signature=SIGNATURE, m=16, n=4096, k=4096),
        source=SOURCE,
        kernels=served,
        measured=measured,
    )
    return replace(found, **changes)


def outcome(found: Match, **how: Any) -> Decision:
    settings: dict[str, Any] = {
        "facts": H200, "versions": VERSIONS, "limit": 2, "trusts": False, "needs_kernel": False
    }  # fmt: skip
    settings |= how
    return decide(found, settings.pop("facts"), settings.pop("versions"), **settings)


def test_only_the_winner_is_offered() -> None:
    found = match()
    decision = outcome(found)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert decision.why == "measured on NVIDIA H200, 2026-11-21: 1.0 us, ATen 1.2 us"


def test_nothing_is_offered_where_aten_was_faster_or_equal() -> None:
    for aten in (900, 1000):
        decision = outcome(match(aten=aten))
        assert decision.kernels == ()
        assert not decision.is_final


def test_what_is_trusted_is_not_timed() -> None:
    assert outcome(match(), trusts=True).is_final
    lost = outcome(match(aten=900), trusts=True)
    assert lost.is_final
    assert lost.kernels == ()


@pytest.mark.parametrize("trusts", [False, True])
def test_where_kernels_are_required_the_best_is_offered_and_timed_though_aten_won(
    trusts: bool,
) -> None:
    found = match(aten=900)
    decision = outcome(found, trusts=trusts, needs_kernel=True)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final


OBSTACLES = {
    "another product": ({}, {"facts": replace(H200, name="NVIDIA H200 NVL")}, "is NVIDIA H200 NVL"),
    "another CUDA": ({}, {"versions": replace(VERSIONS, cuda="14.0")}, "CUDA 13.0"),
    "doubts": (
        {"measured": replace(match().measured, doubts=("it was hot", "it was busy"))},
        {},
        "uncertain: it was hot; it was busy",
    ),
    "no conditions": ({"source": replace(SOURCE, conditions=None)}, {}, ""),
    "an estimate": ({"measured": None, "source": replace(SOURCE, kind="estimate")}, {}, ""),
    "another size": ({"basis": Basis.SIGNATURE, "measured": None}, {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSTACLES)
def test_anything_else_is_offered_and_timed_as_ever(name: str) -> None:
    changes, how, why = OBSTACLES[name]
    found = match(**changes)
    decision = outcome(found, trusts=True, **how)
    assert decision.kernels == found.kernels[:2]
    assert not decision.is_final
    assert why in decision.why


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
    decision = outcome(found, trusts=True, versions=versions)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert why in decision.why


def test_a_patch_release_of_torch_changes_nothing() -> None:
    versions = TorchVersions(torch="2.11.1+cu130", cuda="13.0")
    assert outcome(match(), trusts=True, versions=versions).is_final


def test_an_aten_that_was_not_measured_is_timed() -> None:
    found = match(aten=None)
    decision = outcome(found, trusts=True)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final


def test_nothing_is_skipped_where_triton_was_fastest() -> None:
    found = match(triton=800)
    decision = outcome(found, trusts=True)
    assert decision.kernels == found.kernels[:1]
    assert not decision.is_final
    assert "Triton 0.8 us" in decision.why
    assert not outcome(match(triton=800, aten=900), trusts=True).is_final
    assert outcome(match(triton=1100), trusts=True).is_final


def test_the_first_kernel_that_fits_is_what_counts() -> None:
    """Where operands are less aligned, the best of the others competes with ATen."""
    found = match()
    rest = replace(found, kernels=found.kernels[1:])
    assert outcome(rest).kernels == found.kernels[1:2]
    slower = replace(rest, kernels=(replace(rest.kernels[0], time_ns=1300),))
    assert outcome(slower).kernels == ()
