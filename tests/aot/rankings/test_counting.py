"""For how many problems torch.compile uses measured kernels, and by what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle.content import ProblemRanking
from nvgemm_aot.bundle.writer import header_without_offsets
from nvgemm_aot.rankings.counting import Counted, count_by_product
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.epilogues import BIAS, Epilogue
from nvgemm_runtime.gemm.problem import Problem
from synthetic_content import SIGNATURE, synthetic_content

CONDITIONS = Conditions(driver="580.95.05", torch="2.11.0", cuda="13.0", date="2026-11-21")
SOURCE = RankingSource(kind="measurement", by="a test", gpu="NVIDIA H200", conditions=CONDITIONS)
CONFIRMED: dict[str, Any] = {"confirmed_by": ("a" * 64, "b" * 64)}
REPEATED: dict[str, Any] = {"repeated": 120}


def counted(
    measured: Iterable[tuple[int, dict[str, Any]]],
    *,
    source: RankingSource = SOURCE,
    signature: Any = SIGNATURE,
    is_deterministic: bool = True,
) -> list[Counted]:
    """Of problems whose one kernel took so long, and ATen 1000 ns."""
    content = synthetic_content(kernels=1, problems=1)
    kernel = replace(content.kernels[0], signature=signature, is_deterministic=is_deterministic)
    rankings = tuple(
        ProblemRanking(
            problem=Problem(signature=signature, m=m, n=4096, k=4096),
            source=source,
            kernels=((kernel.id, time_ns),),
            measured=Measured(
                **{
                    "spreads_ns": (1,),
                    "aten": Timing(time_ns=1000, spread_ns=1),
                    "triton": None,
                    "doubts": (),
                    **how,
                }
            ),
        )
        for m, (time_ns, how) in enumerate(measured, start=1)
    )
    return count_by_product(
        header_without_offsets(replace(content, kernels=(kernel,), rankings=rankings))
    )


def test_each_problem_is_counted_by_its_gain_and_evidence() -> None:
    (found,) = counted(
        [
            (970, CONFIRMED), (900, REPEATED), (970, REPEATED), (900, {}),
            (990, CONFIRMED), (1200, CONFIRMED), (500, {**REPEATED, "doubts": ("it was hot",)}),
        ]
    )  # fmt: skip
    assert found == Counted(
        gpu="NVIDIA H200", torch="2.11.0", cuda="13.0", measured=7, confirmed=1, repeated=1,
        with_setting=3, if_fused=0, aten=2, beyond_default=0, competing=6, doubtful=1,
    )  # fmt: skip


def test_what_default_mode_leaves_alone_is_counted_apart() -> None:
    fused = replace(SIGNATURE, epilogue=Epilogue.parse("bias_silu"))
    (found,) = counted([(500, CONFIRMED)], signature=fused)
    assert (found.beyond_default, found.confirmed, found.competing) == (1, 0, 1)
    (found,) = counted([(500, {**CONFIRMED, "aten": None})])
    assert (found.beyond_default, found.competing) == (1, 1)
    (found,) = counted([(500, CONFIRMED)], signature=replace(SIGNATURE, epilogue=BIAS))
    assert (found.beyond_default, found.confirmed) == (0, 1)


def test_gated_products_are_counted_apart() -> None:
    gated = replace(SIGNATURE, epilogue=Epilogue.parse("swiglu_halves"))
    measured = [(900, CONFIRMED), (900, REPEATED), (970, REPEATED), (990, CONFIRMED), (900, {})]
    (found,) = counted(measured, signature=gated)
    assert (found.if_fused, found.aten, found.beyond_default) == (2, 1, 0)
    assert (found.confirmed, found.repeated, found.with_setting) == (0, 0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVGEMM_AOT_REPEATED_RANKINGS", "1")
        (found,) = counted(measured, signature=gated)
    assert found.if_fused == 3
    (found,) = counted([(500, {**CONFIRMED, "aten": None})], signature=gated)
    assert (found.if_fused, found.beyond_default) == (0, 1)


def test_kernels_whose_results_vary_are_not_counted_in_default_mode() -> None:
    (found,) = counted([(500, CONFIRMED)], is_deterministic=False)
    assert (found.confirmed, found.aten, found.competing) == (0, 1, 1)


def test_estimates_are_not_counted() -> None:
    header = header_without_offsets(synthetic_content(kernels=1, problems=1))
    assert count_by_product(replace(header, rankings=())) == []
