"""Correctness benchmark with CPU kernels: right ones pass, wrong ones and faults do not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import cpu_provider
from benchmarks.correctness import __main__ as correctness
from benchmarks.correctness import faults
from installed_bundles import use
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.correctness.exact_operands import make_checks
from nvgemm_aot.tuning.correctness.judgement import find_fault
from nvgemm_runtime.gemm.problem import DType, Problem, Signature
from repository import ROOT
from tuning_bench import LazyAtLargeSizes, build

TYPES = (DType.BF16, DType.FP16, DType.INT8)
PROBLEMS = [cpu_provider.problem("tn", operand=dtype) for dtype in TYPES]


def run(*arguments: object) -> Result:
    fixed = ["--device", "cpu", "--largest", "150", "--sizes", "4"]
    return CliRunner().invoke(correctness.main, [*fixed, *map(str, arguments)])


def test_right_kernels_pass_and_every_fault_is_noticed(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, build(PROBLEMS, tmp_path / "b", kernel_cache))
    path = tmp_path / "correctness.json"
    done = run("--json", path, "--seed", 3)
    assert done.exit_code == 0, done.output
    types = json.loads(path.read_text())["types"]
    assert types.keys() == {dtype.value for dtype in TYPES}
    for name, one in types.items():
        assert one["right"] == {"passed": 4, "tried": 4}
        assert one["failures"] == []
        assert one["faults"].keys() == faults.FAULTS.keys()
        for fault, counts in one["faults"].items():
            assert counts["caught"] == counts["planted"]
            optional = fault == "bf16 sums" or (fault, name) == ("NaN dropped", "int8")
            assert counts["planted"] == 4 or optional
    row = next(line for line in done.output.splitlines() if line.split()[:1] == ["fp16"])
    assert row.split()[1:3] == ["4", "4/4"]


def test_a_wrong_kernel_is_counted_and_named(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, build(PROBLEMS[:1], tmp_path / "b", kernel_cache, LazyAtLargeSizes()))
    done = run("--sizes", 12)
    assert done.exit_code == 1
    assert "right, but called wrong: mm/tn/bf16xbf16/fp32/bf16/m" in done.output
    assert "(Cpu_8x32)" in done.output


def test_without_kernels_it_says_what_to_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path)
    done = run()
    assert done.exit_code == 1
    assert "build benchmarks/correctness/manifest.yaml with --wheel and install it" in done.output


def test_no_size_is_begun_behind_the_budget(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, build(PROBLEMS[:1], tmp_path / "b", kernel_cache))
    done = run("--budget", 0)
    assert done.exit_code == 0
    assert "0/0" in done.output


def test_sizes_begin_with_the_largest_and_then_vary_on_every_scale() -> None:
    drawn = correctness.sizes(random.Random(1), None)
    fixed = [next(drawn) for _ in correctness.LARGEST]
    assert fixed[0] == (16384, 16384, 65536)
    others = [next(drawn) for _ in range(300)]
    assert all(m * n * k <= correctness.MOST_PRODUCTS for m, n, k in others)
    for extents in zip(*others):
        assert min(extents) < 10
        assert max(extents) > 5000


@pytest.mark.parametrize(
    ("key", "steps"),
    [
        ("mm/tn/bf16xbf16/fp32/bf16", (1, 8, 8)),
        ("mm/nt/bf16xbf16/fp32/bf16", (8, 8, 1)),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", (1, 8, 16)),
        ("mm/tn/int8xint8/int32/int8", (1, 16, 16)),
    ],
)
def test_rows_are_aligned_as_kernels_need_it(key: str, steps: tuple[int, int, int]) -> None:
    from nvgemm_runtime.gemm.roles import contiguous_bytes

    signature = Signature.parse(key)
    assert correctness.steps(signature, 16) == steps
    m, n, k = steps
    assert contiguous_bytes(Problem(signature=signature, m=m, n=n, k=k)) % 16 == 0


def test_its_manifest_has_every_type_that_is_promised() -> None:
    manifest = load_manifest(ROOT / "benchmarks/correctness/manifest.yaml")
    signatures = {entry.problem.signature for entry in manifest.declared}
    assert {one.a for one in signatures} == {
        DType.FP8_E4M3, DType.FP8_E5M2, DType.FP16, DType.BF16, DType.INT8,
    }  # fmt: skip
    assert {target.target.arch for target in manifest.targets} == {"sm_90a"}


@pytest.mark.parametrize(
    ("out", "k", "is_planted"),
    [("fp8_e5m2", 144, False), ("fp8_e5m2", 160, True), ("fp32", 16, True)],
)
def test_bf16_sums_are_planted_where_they_change_something_and_are_noticed_there(
    out: str, k: int, is_planted: bool
) -> None:
    problem = Problem.parse(f"mm/tn/fp8_e4m3xfp8_e4m3/fp32/{out}/m2n16k{k}")
    checks = make_checks(problem, "cpu", seed=1)
    found = [
        faults.rounded_accumulator(lambda: None, problem, checks, place, check.operands[2])
        for place, check in enumerate(checks)
    ]
    assert [result is not None for result in found] == [is_planted] * 2
    if found[0] is not None:
        assert find_fault(found[0], checks[0].expected) is not None
