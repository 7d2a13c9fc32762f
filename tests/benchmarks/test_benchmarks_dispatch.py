"""benchmarks/dispatch: held-back sizes, and its table."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import cpu_provider
import tuning_bench
from benchmarks.dispatch import __main__ as dispatch
from benchmarks.runtime import chains
from benchmarks.runtime.made_up import Square, made_up_rankings
from benchmarks.shared.resuming import Results
from inductor_session import InductorSession
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import header_without_offsets, write_bundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.problem import DType, Problem
from synthetic_content import SIGNATURE, synthetic_content


def test_sizes_that_were_measured_are_not_held_back() -> None:
    measured = [1, 2, 4, 8, 16, 24, 32, 8192]
    found = dispatch.held_back(measured, 40)
    assert len(found) == len(set(found)) == 40
    assert found == sorted(found)
    assert 1 < found[0] < 8 < 1000 < found[-1] < 8192
    assert not set(found) & set(measured)
    assert {m % 2 for m in found} == {0, 1}


def test_few_sizes_lie_between_near_ones() -> None:
    assert dispatch.held_back([4, 8], 40) == [5, 6, 7]
    assert dispatch.held_back([4, 5], 40) == []


def test_lines_have_several_m() -> None:
    alone, *line = (
        cpu_provider.problem(sizes=sizes) for sizes in ((8, 64, 64), (8, 32, 64), (24, 32, 64))
    )
    found = dispatch.lines_of(dict.fromkeys([alone, *line], ()))
    assert list(found.values()) == [{8: line[0], 24: line[1]}]


def entry(choices: dict[str, str], **times: int) -> dict[str, object]:
    return {
        "times": {name: [time, time, time, time] for name, time in times.items()},
        "choices": choices,
        "thrown_out": {},
    }


def test_a_choice_loses_what_it_takes_longer_than_the_best() -> None:
    small, large = (
        cpu_provider.problem(sizes=sizes, operand=DType.BF16)
        for sizes in ((12, 32, 64), (20, 32, 64))
    )
    entries = {
        small.key: entry({"dispatch": "a", "hint 16": "b"}, a=100, b=125, aten=110),
        large.key: entry({"dispatch": "aten", "hint 16": "b"}, a=90, b=80, aten=100),
    }
    assert dispatch.losses(entries[small.key]) == pytest.approx(
        {"dispatch": 1.0, "hint 16": 1.25, "aten": 1.1}
    )
    lines = list(dispatch.table(entries))
    assert lines[1].split()[3:] == [
        *("2", "1.1180", "(1.250)", "1.1180", "(1.250)", "1.1726", "(1.250)")
    ]
    assert lines[2].split()[0] == "all"
    assert lines[4] == f"dispatch, {large.key}: 1.250: aten for b"


def test_a_compiled_graph_is_held_against_kernels_and_is_none() -> None:
    problem = cpu_provider.problem(sizes=(12, 32, 64), operand=DType.BF16)
    choices = {"dispatch": "a", dispatch.COMPILED: dispatch.COMPILED}
    found = entry(choices, a=100, aten=110, **{dispatch.COMPILED: 90})
    assert dispatch.losses(found) == pytest.approx(
        {"dispatch": 1.0, dispatch.COMPILED: 0.9, "aten": 1.1}
    )
    assert list(dispatch.table({problem.key: found}))[-1].endswith("1.000: a for a")


SQUARE = cpu_provider.problem(sizes=(32, 32, 32))
SMALL = Square(device="cpu", signature=SQUARE.signature, size=32)


@pytest.fixture
def with_kernels(
    inductor: InductorSession, kernel_cache: Cache, tmp_path: Path
) -> Iterator[InductorSession]:
    """Installs kernels without a measured ranking."""
    inductor.use(tuning_bench.build([SQUARE], tmp_path / "built", kernel_cache))
    with chains.in_default_mode():
        yield inductor


def test_one_graph_chooses_by_m_without_another_compilation(with_kernels: InductorSession) -> None:
    with made_up_rankings(SMALL):
        graph = dispatch.one_graph(replace(SQUARE, m=1), "cpu")
        for m, runs_a_kernel in ((SMALL.size, True), (SMALL.left_to_aten, False), (2, True)):
            a, b = torch.randn(m, SQUARE.k), torch.randn(SQUARE.k, SQUARE.n)
            torch.testing.assert_close(graph(a, b), a @ b)
            launched = with_kernels.launched(functools.partial(graph, a, b))
            assert bool(launched) is runs_a_kernel, m


def test_a_graph_that_does_not_choose_is_refused(with_kernels: InductorSession) -> None:
    with pytest.raises(click.ClickException, match=r"n 32, k 32 does not choose by m \(it calls"):
        dispatch.one_graph(replace(SQUARE, m=1), "cpu")


@pytest.fixture
def bundle_of_two() -> BundleContent:
    """Builds a bundle whose first kernel wins at m 16 and 24, its second at m 100."""
    content = synthetic_content(kernels=2, problems=1)
    first, second = content.kernels
    source = RankingSource(
        kind="measurement",
        by="a test",
        gpu="NVIDIA H200",
        conditions=Conditions(
            driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-23"
        ),
    )
    rankings = tuple(
        ProblemRanking(
            problem=Problem(signature=SIGNATURE, m=m, n=4096, k=4096),
            source=source,
            kernels=((one.id, 500), (other.id, 700)),
            measured=Measured(
                spreads_ns=(1, 1), aten=Timing(time_ns=600, spread_ns=1), triton=None, doubts=()
            ),
        )
        for m, one, other in ((16, first, second), (24, first, second), (100, second, first))
    )
    return replace(
        content, target=replace(content.target, arch="sm_90a"), device="H200", rankings=rankings
    )


def test_todays_rules_choose_from_the_rankings_of_a_bundle(bundle_of_two: BundleContent) -> None:
    header = header_without_offsets(bundle_of_two)
    first, second = bundle_of_two.kernels
    problems = [Problem(signature=SIGNATURE, m=m, n=4096, k=4096) for m in (15, 20, 50, 100)]
    chosen = dispatch.choices_of_bundle(header, problems, "2.11.0+cu130", "13.0")
    assert chosen == [dispatch.ATEN, first.id, dispatch.ATEN, second.id]
    assert dispatch.choices_of_bundle(header, problems, "2.12.0", "13.0") == [dispatch.ATEN] * 4


def test_choosing_again_leaves_the_table_of_what_was_chosen_then(
    tmp_path: Path, bundle_of_two: BundleContent
) -> None:
    bundle, path = tmp_path / "b.nvgemm", tmp_path / "dispatch.json"
    write_bundle(bundle, bundle_of_two)
    fastest, other = (one.id for one in bundle_of_two.kernels)
    environment = {"torch": "2.11.0+cu130", "CUDA": "13.0"}
    results = Results.begin(
        path, what=dispatch.WHAT, environment=environment, settings={"rounds": 8}, resume=False
    )
    problem = Problem(signature=SIGNATURE, m=20, n=4096, k=4096)
    results.entries[problem.key] = entry({"dispatch": "aten"}, aten=100, **{fastest: 80, other: 90})
    results.save()
    run = CliRunner()
    made = run.invoke(dispatch.main, ["table", str(path)])
    assert made.exit_code == 0, made.output
    then = path.with_suffix(".txt").read_text()
    assert "1.2500" in then
    done = run.invoke(dispatch.main, ["choose", str(path), str(bundle)], catch_exceptions=False)
    assert "1.0000" in done.output
    assert "choose dispatch.json b.nvgemm" in done.output
    assert path.with_suffix(".txt").read_text() == then
