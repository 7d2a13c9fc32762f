"""Comparisons of the emulator with a GPU, and rows of the support matrix to emulate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.emulation import __main__ as whole_pass
from benchmarks.emulation.hopper.__main__ import main
from benchmarks.emulation.hopper.instruction_runs import all_cases, digest, outcome, pack
from benchmarks.emulation.hopper.kernel_runs import compare
from benchmarks.emulation.rows import Row
from benchmarks.record import read
from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_runtime.gemm.problem import Op


def kernel_line(values: list[float], **changed: Any) -> dict[str, Any]:
    """A kernel's result in bf16, as a GPU or the emulator gave it."""
    data = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    result = {"sha256": str(hash(data)), "bytes": len(data), "data": pack(data)}
    line = {"case": "ab/8x8x8/1/1/exact", "signature": "mm/tn/bf16xbf16/fp32/bf16"}
    line |= {"operands_sha256": "one", "device": "NVIDIA H100 80GB HBM3", "out": result}
    return {**line, **changed}


GPU = kernel_line([1.0, 128.0])


@pytest.mark.parametrize(
    ("emulated", "said"),
    [
        (GPU, "equal"),
        (kernel_line([1.0, 129.0]), "close: 1 of 2 differ, by at most 1 ulps, 7.8e-03 of the"),
        (kernel_line([1.0, 130.0]), "1 of 2 differ, by at most 2 ulps, 1.6e-02 of the largest"),
        ({**GPU, "out": {"sha256": "other", "bytes": 4}}, "not kept"),
        ({**GPU, "operands_sha256": "other"}, "other operands"),
        ({**GPU, "error": "DeadlockError: waits"}, "DeadlockError: waits"),
        ({**GPU, "case": "another"}, "not emulated"),
        ({**GPU, "sums": GPU["out"]}, "equal"),
    ],
)
def test_a_kernels_results_are_equal_close_or_different(emulated: Any, said: str) -> None:
    ((name, outcome),) = compare([GPU], [emulated])
    assert name == "mm/tn/bf16xbf16/fp32/bf16 ab/8x8x8/1/1/exact"
    assert outcome.startswith(said)


def test_the_worse_of_two_results_counts() -> None:
    sums = {"sha256": "other", "bytes": 4}
    ((_, outcome),) = compare([{**GPU, "sums": GPU["out"]}], [{**GPU, "sums": sums}])
    assert outcome == "not kept"
    close = kernel_line([1.0, 129.0])["out"]
    ((_, outcome),) = compare([{**GPU, "sums": GPU["out"]}], [{**GPU, "out": close, "sums": sums}])
    assert outcome == "not kept"


def test_an_approximation_far_from_the_gpus_is_different() -> None:
    case = all_cases()["tanh.approx.f32/gates"]
    assert case.ulps is None
    given = np.linspace(-1, 1, 2048, dtype=np.float32)
    line = {"sha256": digest(given.view(np.uint8), "f32"), "output": pack(given.tobytes())}
    for error, is_close in ((1e-4, True), (1e-3, False)):
        found = outcome(case, (given + np.float32(error)).view(np.uint8), line)
        assert found.startswith("close") == is_close
    with_nan = given.copy()
    with_nan[3] = np.nan
    assert not outcome(case, with_nan.view(np.uint8), line).startswith("close")


def test_a_comparison_records_each_outcome(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("gpu.jsonl", "emulated.jsonl", "records.jsonl")]
    lines = [GPU, {**GPU, "case": "two"}, {**GPU, "case": "three", "error": "illegal"}]
    paths[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths[1].write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    words = ["compare-kernels", str(paths[0]), str(paths[1]), "--records", str(paths[2])]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "1 equal, 1 the GPU refuses, 1 different" in done.output
    records = read(paths[2])
    assert {record.case.name: record.case.figure for record in records} == {
        "kernels/equal": 1,
        "kernels/close": 0,
        "kernels/the GPU refuses": 1,
        "kernels/not kept": 0,
        "kernels/different": 1,
    }
    assert {record.file_name for record in records} == {"emulation-h100.jsonl"}
    assert {record.case.baseline.value for record in records if record.case.baseline} == {3}


def test_rows_tell_kinds_of_operands_apart() -> None:
    names = {
        Row.of("cutlass_operators", signature).name
        for signature in EVERY_SIGNATURE
        if signature.op is Op.MM and signature.epilogue is None
    }
    assert {name.removeprefix("cutlass_operators mm") for name in names} == {
        "", " fp8", " int8", " uint8", " fp8 fp32_tensor", " fp8 fp32_row", " fp8 e8m0_1x32",
        " fp4 e8m0_1x32", " fp4 e8m0_1x16", " fp4 e4m3_1x16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "quack", "--records", "x.jsonl"], "--records does not take"),
        (["--rows", "quack nm"], "no row's name has 'quack nm'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole_pass, "row_kernels", lambda _: [])
    result = CliRunner().invoke(whole_pass.main, [*arguments, "--cache-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.output
