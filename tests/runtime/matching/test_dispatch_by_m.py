"""Tables that say which kernel computes a GEMM of any m, from rankings of bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle.content import ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.problem import Layout, Op, Problem, Signature
from nvgemm_runtime.matching import dispatch as dispatch_module
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions
from nvgemm_runtime.matching.dispatch import Dispatch, decide_dispatch
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView
from nvgemm_runtime.matching.thresholds import ATEN, MAX_WORKSPACE_BYTES, DispatchTable
from nvgemm_runtime.matching.trust import Terms
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import H200

VERSIONS = TorchVersions(torch="2.11.0+cu130", cuda="13.0")
CONDITIONS = Conditions(driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21")
SOURCE = RankingSource(kind="measurement", by="a test", gpu="NVIDIA H200", conditions=CONDITIONS)
GPUS = ("a" * 64, "b" * 64)


def bundle(
    times: Mapping[int, Sequence[int]],
    *,
    aten: int | None = 1000,
    seed: int = 0,
    signature: Signature = SIGNATURE,
    source: RankingSource = SOURCE,
    workspace: TileWorkspace | None = None,
    alignments: Sequence[int] = (16, 16, 16),
    convention: str = "tvm_ffi:gemm(a,b,out,stream)",
    **measured: Any,
) -> Header:
    """By m, what kernels 0, 1 and 2 took; on two GPUs of one product."""
    content = synthetic_content(kernels=3, problems=1, seed=seed)
    kernels = tuple(
        replace(
            kernel,
            signature=signature,
            workspace=workspace,
            alignment_bytes=alignment,
            calling_convention="tvm_ffi:gemm(a,b,out,workspace,stream)"
            if workspace
            else convention,
        )
        for kernel, alignment in zip(content.kernels, alignments)
    )
    rankings = []
    for m, of_size in times.items():
        order = sorted(range(len(of_size)), key=of_size.__getitem__)
        facts = {"triton": None, "doubts": (), "confirmed_by": GPUS, **measured}
        rankings.append(
            ProblemRanking(
                problem=Problem(signature=signature, m=m, n=4096, k=4096),
                source=source,
                kernels=tuple((kernels[at].id, of_size[at]) for at in order),
                measured=Measured(
                    spreads_ns=(1,) * len(of_size),
                    aten=None if aten is None else Timing(time_ns=aten, spread_ns=1),
                    **facts,
                ),
            )
        )
    target = replace(content.target, arch="sm_90a")
    return encode_bundle(
        replace(content, target=target, device="H200", kernels=kernels, rankings=tuple(rankings))
    )[1]


def dispatch(
    *headers: Header,
    m: int = 16,
    signature: Signature = SIGNATURE,
    facts: DeviceFacts = H200,
    versions: TorchVersions = VERSIONS,
    evidence: Evidence = Evidence.DEFAULT,
    terms: Mapping[str, Any] | None = None,
    **request: Any,
) -> Dispatch:
    index = Index(
        [BundleView(name=f"b{i}", header=one) for i, one in enumerate(headers)],
        facts,
        versions=versions,
    )
    problem = Problem(signature=signature, m=m, n=4096, k=4096)
    return decide_dispatch(
        index.ranked_sizes(problem),
        Request(**{"problem": problem, "alignment_bytes": 32, **request}),
        facts,
        versions,
        Terms(limit=1, **(terms or {})),
        evidence=evidence,
    )


TIMES = {16: (500, 600, 700), 24: (500, 600, 700)}


def test_confirmed_rankings_make_a_table_whose_kernels_are_known() -> None:
    header = bundle(TIMES)
    made = dispatch(header)
    first = header.kernels[header.rankings[0].kernels[0].kernel].id
    assert made.table == DispatchTable(bounds=(16, 25), kernels=(ATEN, first, ATEN))
    assert made.table.used == (first,)
    assert made.measured[first].bundle.name == "b0"
    assert len(made.measured) == 3
    assert made.open_reasons == {}
    assert [one.m for one in made.sizes] == [16, 24]


def test_kernels_for_which_a_size_is_too_large_are_in_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = bundle(TIMES)
    first, *_ = (header.kernels[one.kernel] for one in header.rankings[0].kernels)
    asked = []

    def too_large(provider: str, problem: Problem, out_row_bytes: int | None) -> str | None:
        asked.append((provider, problem.m, out_row_bytes))
        return "too large" if problem.m == 24 else None

    monkeypatch.setattr(dispatch_module, "too_large_reason", too_large)
    made = dispatch(header, out_row_bytes=8192)
    assert {(m, row_bytes) for _, m, row_bytes in asked} == {(16, 8192), (24, 8192)}
    assert made.table.at(16) == first.id
    assert made.table.at(24) == ATEN
    assert made.open_reasons == {24: "too large"}


WITHOUT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another product": ({}, {"facts": replace(H200, name="NVIDIA H200 NVL")}, "NVIDIA H200 NVL"),
    "another CUDA": (
        {}, {"versions": replace(VERSIONS, cuda="13.1")}, "torch uses 13.1"
    ),
    "another torch": (
        {}, {"versions": replace(VERSIONS, torch="2.12.0")}, "this is 2.12.0"
    ),
    "doubts": ({"doubts": ("it was hot",)}, {}, "it was hot"),
    "one GPU": ({"confirmed_by": ()}, {}, "measured once"),
    "no ATen": ({"aten": None}, {}, "ATen was not measured"),
    "gaps": ({}, {"is_compact": False}, "without gaps"),
    "less alignment": ({}, {"alignment_bytes": 16}, "aligned to 32 bytes or more"),
    "slow accumulation": ({}, {"terms": {"is_precise": True}}, "use_fast_accum"),
    "a setting": ({}, {"terms": {"aten_setting": "x is y"}}, "x is y"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_what_does_not_hold_leaves_aten(name: str) -> None:
    measured, how, why = WITHOUT[name]
    made = dispatch(bundle(TIMES, **measured), **how)
    assert made.table == DispatchTable(bounds=(), kernels=(ATEN,))
    assert made.measured == {}
    assert list(made.open_reasons) == [16, 24]
    assert all(why in reason for reason in made.open_reasons.values())


def test_estimates_leave_aten() -> None:
    made = dispatch(estimated(bundle(TIMES)))
    assert not made.table.has_kernels
    assert made.open_reasons == {16: "its ranking is an estimate", 24: "its ranking is an estimate"}


def estimated(header: Header) -> Header:
    rankings = tuple(replace(one, measured=None) for one in header.rankings)
    return replace(header, rankings=rankings)


def test_what_was_measured_once_counts_where_that_is_enough() -> None:
    once = bundle(TIMES, confirmed_by=())
    assert dispatch(once, evidence=Evidence.ONCE).table.has_kernels
    assert not dispatch(once, evidence=Evidence.REPEATED).table.has_kernels


def repeated(times: Mapping[int, Sequence[int]], **how: Any) -> Header:
    """A bundle as `bundle`, whose measurements one GPU repeated."""
    return bundle(times, confirmed_by=(), repeated=120, **how)


def test_what_one_gpu_repeated_counts_from_a_gain_of_8_percent_on() -> None:
    made = dispatch(repeated({16: (920, 930), 24: (921, 930)}))
    assert made.table.at(16) in made.table.used
    assert made.table.at(24) == ATEN
    assert made.held_back == {
        24: "a kernel gains 7.9%, below the 8% that a measurement repeated on one GPU needs"
    }
    assert made.open_reasons == {}


def test_a_setting_lets_repeated_rankings_count_as_confirmed_ones_do() -> None:
    made = dispatch(repeated({16: (980, 990), 24: (981, 990)}), evidence=Evidence.REPEATED)
    assert made.table.at(16) in made.table.used
    assert made.table.at(24) == ATEN
    assert made.held_back == {}


def test_a_doubt_leaves_a_repeated_ranking_out() -> None:
    made = dispatch(repeated(TIMES, doubts=("it was hot",)))
    assert not made.table.has_kernels
    assert set(made.open_reasons) == set(TIMES)


def test_a_repeated_ranking_that_gains_too_little_is_not_bridged_over() -> None:
    sure, small = (900, 950, 960), (950, 960, 970)
    around = dispatch(repeated({16: sure, 64: sure}))
    assert around.table.at(32) in around.table.used
    between = dispatch(repeated({16: sure, 32: small, 64: sure}))
    assert [between.table.at(m) for m in (20, 32, 48)] == [ATEN] * 3
    assert between.table.at(64) in between.table.used


def test_for_many_rows_the_larger_least_gain_of_two_sizes_holds_between_them() -> None:
    times = {1024: (940,) * 3, 2048: (915,) * 3}
    confirmed, one_gpu = bundle({1024: times[1024]}), repeated({2048: times[2048]})
    header = replace(confirmed, rankings=(*confirmed.rankings, *one_gpu.rankings))
    mixed, sure = dispatch(header, m=1024).table, dispatch(bundle(times), m=1024).table
    assert [mixed.at(m) == ATEN for m in (1024, 2000, 2048)] == [False, True, False]
    assert [sure.at(m) == ATEN for m in (1024, 2000, 2048)] == [False] * 3


def test_a_confirmed_ranking_counts_before_a_repeated_one_that_contradicts_it() -> None:
    confirmed = bundle({16: (1010, 1020, 1030)})
    made = dispatch(repeated({16: TIMES[16]}, seed=1), confirmed)
    assert made.table.at(16) == ATEN
    assert made.open_reasons == {}


def test_doubts_of_one_size_leave_the_others() -> None:
    made = dispatch(
        bundle({16: TIMES[16]}), bundle({24: TIMES[24]}, seed=1, doubts=("it was hot",))
    )
    assert (made.table.at(16), made.table.at(20), made.table.at(24)) == (
        *made.table.used, ATEN, ATEN,
    )  # fmt: skip
    assert list(made.open_reasons) == [24]


def test_kernels_of_two_bundles_share_a_table() -> None:
    made = dispatch(bundle({16: TIMES[16]}), bundle({24: TIMES[24]}, seed=1))
    assert {made.measured[one].bundle.name for one in made.table.used} == {"b0", "b1"}
    assert made.table.at(20) == ATEN, "neither was measured at both"


def test_two_bundles_with_one_verdict_do_not_disturb_each_other() -> None:
    made = dispatch(bundle(TIMES), bundle(TIMES, seed=1))
    assert len(made.table.used) == 1
    assert made.open_reasons == {}


def test_bundles_that_contradict_each_other_leave_aten() -> None:
    made = dispatch(bundle(TIMES), bundle({16: TIMES[16]}, seed=1, aten=400))
    assert made.table.at(16) == made.table.at(20) == ATEN
    assert made.table.at(24) != ATEN
    assert "b0 and b1 contradict each other" in made.open_reasons[16]


@pytest.mark.parametrize("is_second_deterministic", [False, True])
def test_where_only_kernels_win_whose_results_depend_on_timing_it_is_said(
    is_second_deterministic: bool,
) -> None:
    header = bundle({16: (500, 600, 1100)})
    varying = {0, 1} - ({1} if is_second_deterministic else set())
    kernels = tuple(
        replace(kernel, is_deterministic=place not in varying)
        for place, kernel in enumerate(header.kernels)
    )
    made = dispatch(replace(header, kernels=kernels))
    assert made.table.has_kernels == is_second_deterministic
    assert list(made.open_reasons) == ([] if is_second_deterministic else [16])


def test_a_ranking_that_does_not_hold_contradicts_none() -> None:
    doubtful = bundle(TIMES, seed=1, aten=400, doubts=("it was hot",))
    assert dispatch(bundle(TIMES), doubtful).open_reasons == {}


def test_of_bundles_measured_with_several_releases_of_torch_each_serves_its_own() -> None:
    """Also where they contradict each other; ATen's times are 1000 with the one, 400 with others.

    The bundles' order makes no difference.
    """
    later = replace(SOURCE, conditions=replace(CONDITIONS, torch="2.12.0+cu130"))
    other_cuda = replace(SOURCE, conditions=replace(CONDITIONS, torch="2.12.0", cuda="13.2"))
    headers = [
        bundle(TIMES),
        bundle(TIMES, seed=1, source=later, aten=400),
        bundle(TIMES, seed=2, source=other_cuda, aten=550),
    ]
    for ordered in (headers, headers[::-1]):
        for torch, cuda, aten in [
            ("2.11.0+cu130", "13.0", 1000),
            ("2.11.3", "13.0", 1000),
            ("2.12.1+cu130", "13.0", 400),
            ("2.12.1+cu132", "13.2", 550),
        ]:
            made = dispatch(*ordered, versions=TorchVersions(torch=torch, cuda=cuda))
            assert [size.aten.time_ns for size in made.sizes] == [aten, aten]
            assert made.table.has_kernels is (aten > 500)
            assert made.open_reasons == {}
        none = dispatch(*ordered, versions=TorchVersions(torch="2.13.0", cuda="13.0"))
        assert none.sizes == ()
        assert list(none.open_reasons) == [16, 24]
        for why in none.open_reasons.values():
            for torch in ("2.11.0+cu130", "2.12.0+cu130", "2.12.0"):
                assert f"ATen was measured with torch {torch}, this is 2.13.0" in why


def test_triton_makes_no_kernel_worse_than_aten() -> None:
    made = dispatch(bundle(TIMES, triton=Timing(time_ns=300, spread_ns=1)))
    assert made.table.at(16) != ATEN


def test_kernels_that_need_more_alignment_are_not_there() -> None:
    """Without the fastest, what is left was not compared to the end."""
    made = dispatch(bundle(TIMES, alignments=(64, 16, 16)))
    assert not made.table.has_kernels
    assert "the kernel that was measured fastest cannot be used" in made.open_reasons[16]


def test_nothing_is_bridged_where_m_is_contiguous_in_a() -> None:
    signature = replace(SIGNATURE, layout=Layout.NN)
    header = bundle(TIMES, signature=signature)
    made = dispatch(header, signature=signature)
    assert made.table.at(16) == made.table.at(24) != ATEN
    assert made.table.at(20) == ATEN


def test_workspaces_are_counted_at_the_larger_m() -> None:
    per_tile = MAX_WORKSPACE_BYTES // (4096 // 64)
    workspace = TileWorkspace(
        tile=(16, 64),
        tiles_multiple=(1, 1),
        zeroed_once=0,
        zeroed_per_tile=0,
        scratch_per_tile=per_tile,
    )
    made = dispatch(bundle(TIMES, workspace=workspace))
    assert (made.table.at(16) != ATEN, made.table.at(20), made.table.at(24) != ATEN) == (
        True, ATEN, True,
    )  # fmt: skip


def test_waves_of_many_rows_are_not_computed_where_groups_share_them() -> None:
    times = dict.fromkeys((16, 24, 512, 640), (500, 600, 700))
    grouped = "tvm_ffi:gemm(a,b,offsets,out,stream)"
    for op, convention, is_computed in (
        (Op.MM, "tvm_ffi:gemm(a,b,out,stream)", True),
        (Op.GROUPED_MM, grouped, False),
    ):
        signature = replace(SIGNATURE, op=op)
        header = bundle(times, signature=signature, convention=convention)
        table = dispatch(header, signature=signature).table
        assert table.at(20) == table.at(512) == table.at(640) != ATEN
        assert (table.at(600) != ATEN) == is_computed


def test_other_sizes_of_n_and_k_are_another_table() -> None:
    index = Index([BundleView(name="b", header=bundle(TIMES))], H200, versions=VERSIONS)
    assert list(index.ranked_sizes(Problem(signature=SIGNATURE, m=16, n=4096, k=4096))) == [
        16,
        24,
    ]
    assert index.ranked_sizes(Problem(signature=SIGNATURE, m=16, n=4096, k=2048)) == {}
