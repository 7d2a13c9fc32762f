"""Rankings of the products of experts, from `tune` on the CPU to a build that uses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cpu_kernels
import cpu_provider
import recording_kernels
import tuning_bench
from made_rankings import GPU_A, GPU_B, entry
from nvgemm_aot.cli.main import main
from nvgemm_aot.pipeline.pipeline import BuiltBundle, build
from nvgemm_aot.rankings.entries import Rankings
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.measuring.gpu import uuid_digest
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from tuning_bench import DictatedTimer, bench, header_of, operators


def rows_of(layout: str, epilogue: Epilogue | None = None) -> Signature:
    return cpu_kernels.signature(layout, op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)


ALONG_K = cpu_kernels.signature("nt", op=Op.K_GROUPED_MM, operand=DType.BF16)

PROBLEMS = sorted(
    cpu_provider.problem_of(signature, sizes)
    for signature, both in {
        rows_of("tn"): ((16, 32, 64), (64, 32, 64)),
        rows_of("tn", BIAS): ((16, 32, 64), (64, 32, 64)),
        rows_of("tn", Epilogue.parse("swiglu_halves")): ((16, 32, 64), (64, 32, 64)),
        rows_of("tn", Epilogue.parse("swiglu_halves_kept")): ((16, 32, 64), (64, 32, 64)),
        rows_of("tt", Epilogue.parse("swiglu_halves_gradient")): ((16, 32, 64), (64, 32, 64)),
        rows_of("tt", ADD): ((16, 32, 64), (64, 32, 64)),
        ALONG_K: ((16, 32, 64), (16, 32, 256)),
    }.items()
    for sizes in both
)
"""A training step's kinds of products, at two numbers of tokens each."""

WINNER = "Cpu_8x32"
"""The fastest by `SLOW_FIRST`, of ATen too."""

TAKES_ANY_ALIGNMENT = "Cpu_1x1"
"""Stays for operands that others refuse."""


def built(directory: Path, cache: Cache, rankings: Rankings | None, **how: Any) -> BuiltBundle:
    directory.mkdir(mode=0o755, exist_ok=True)
    declared = cpu_provider.manifest(PROBLEMS, candidates=how.pop("candidates", 1))
    provider = recording_kernels.Recording()
    result = build(declared, directory, cache, jobs=2, provider=provider, rankings=rankings, **how)
    return result.bundles[0]


@pytest.fixture
def files(tmp_path: Path, kernel_cache: Cache, dictated: DictatedTimer) -> tuple[Path, Path]:
    """Rankings files of two GPUs, each by `tune` and `rankings export`."""
    tunable = tuning_bench.build(PROBLEMS, tmp_path, kernel_cache)
    made = []
    for uuid in ("GPU-1", "GPU-2"):
        output = tmp_path / f"{uuid}.nvgemm"
        on = replace(bench(dictated), uuid=uuid)
        tuned = tuning_bench.run(tunable, output, on, repeats=False)
        assert {*tuned.outcomes} == {problem.key for problem in PROBLEMS}
        assert tuned.is_complete
        made.append(tmp_path / f"{uuid}.json")
        ran("export", str(output), "-o", str(made[-1]))
    return made[0], made[1]


def ran(*arguments: str) -> dict[str, Any]:
    found = CliRunner().invoke(main, ["rankings", *arguments, "--json"])
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads(found.stdout)
    return document


@pytest.mark.slow
def test_what_two_gpus_measured_of_experts_is_confirmed_shown_and_compared(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = map(str, files)
    assert ran("show", one)["standings"] == {"measured once": len(PROBLEMS)}
    merged = tmp_path / "merged.json"
    document = ran("merge", one, two, "-o", str(merged))
    assert document["standings"] == {"confirmed": len(PROBLEMS)}
    digests = {uuid_digest("GPU-1"), uuid_digest("GPU-2")}
    for shown in document["problems"]:
        assert {*shown["confirmed_by"]} == digests
        assert shown["kernel"]["operator"] == WINNER
        signature = Problem.parse(shown["problem"]).signature
        assert (shown["aten_ns"] is None) == (signature.epilogue is not None)
    assert {one["problem"] for one in document["problems"]} == {one.key for one in PROBLEMS}
    differences = ran("diff", one, str(merged))
    assert differences["common"] == len(differences["changed"]) == len(PROBLEMS)
    assert all(
        "standing was measured once, is confirmed" in found["changes"]
        for found in differences["changed"]
    )
    assert ran("diff", one, one)["changed"] == []


@pytest.mark.slow
def test_a_build_ranks_experts_by_their_file_and_prunes_what_never_wins(
    files: tuple[Path, Path], tmp_path: Path, kernel_cache: Cache
) -> None:
    merged = tmp_path / "merged.json"
    ran("merge", *map(str, files), "-o", str(merged))
    given = read_rankings(merged)
    header = header_of(built(tmp_path / "ranked", kernel_cache, given).path)
    estimated = header_of(built(tmp_path / "estimated", kernel_cache, None).path)
    assert [one.problem for one in header.rankings] == PROBLEMS
    for ranking, before in zip(header.rankings, estimated.rankings):
        assert operators(header, ranking)[0] == WINNER
        assert operators(estimated, before)[0] != WINNER, "or the file changes nothing"
        assert ranking.measured is not None
        assert ranking.measured.standing == "confirmed by 2 GPUs"
    pruned = built(tmp_path / "pruned", kernel_cache, given, candidates=3, prunes=True)
    kept = header_of(pruned.path)
    winners = {kernel.signature for kernel in kept.kernels if kernel.operator == WINNER}
    assert winners == {problem.signature for problem in PROBLEMS}
    others = {kernel.operator for kernel in kept.kernels} - {WINNER}
    assert others <= {TAKES_ANY_ALIGNMENT}


@pytest.mark.parametrize("agree", [True, False])
def test_gpus_that_rank_experts_differently_are_doubtful(agree: bool, tmp_path: Path) -> None:
    problem = PROBLEMS[0]
    first = {"one": 1000, "other": 1300}
    second = first if agree else {"one": 1300, "other": 1000}
    path = tmp_path / "both.json"
    entries = (
        entry(times, problem=problem, gpu=gpu, aten=None)
        for times, gpu in ((first, GPU_A), (second, GPU_B))
    )
    write_rankings(path, Rankings(entries=tuple(entries)))
    (shown,) = ran("show", str(path))["problems"]
    if agree:
        assert (shown["standing"], shown["doubts"]) == ("confirmed", [])
        return
    assert shown["standing"] == "doubtful"
    (doubt,) = shown["doubts"]
    assert "two runs disagree" in doubt
    assert "took 1300 ns" in doubt
    assert "took 1000 ns" in doubt
