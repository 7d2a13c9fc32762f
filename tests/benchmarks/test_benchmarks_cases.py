"""Cases agree with the tables of the same raw files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_benchmarks_cold_start import record_of, run
from test_benchmarks_hgemm import METHODS
from test_benchmarks_hgemm import entry as hgemm_entry
from test_benchmarks_kernels import entry, problem

from benchmarks.cases import CASES, write_cases
from benchmarks.record import Record, read
from benchmarks.shared.resuming import Results, this_run

ENVIRONMENT = {"gpu": "NVIDIA G1", "torch": "2.11.0", "CUDA": "13.0"}
RAW: dict[str, Any] = {
    "cold_start": record_of(run("aten", 8.0), run("aten", 9.0), run("jit", 17.0)),
    "hgemm": {"64_64_64": hgemm_entry(dict.fromkeys(METHODS, 1000) | {"ours-nn": 800})},
    "kernels": {problem(16).key: entry(1000, 900, 800)},
    "correctness": {
        "types": {
            "bf16": {
                "right": {"passed": 3, "tried": 3},
                "faults": {"stale tile": {"caught": 2, "planted": 2}},
            }
        }
    },
}


def written(tmp_path: Path, benchmark: str) -> dict[tuple[str, str | None], Record]:
    """Returns a raw file's records, by case and contender."""
    path = tmp_path / "raw.json"
    write_cases(path, benchmark, RAW[benchmark], ENVIRONMENT, date="2026-11-27")
    return {record.key[1:]: record for record in read(path.with_suffix(".jsonl"))}


@pytest.mark.parametrize(
    ("benchmark", "case", "baseline", "speedup"),
    [
        ("cold_start", "jit/first result", "aten", 0.5),
        ("hgemm", "64_64_64/offline", "cuBLASLt autotuned", 1.25),
        ("kernels", "apart/bundled", "best of ATen and Triton", 1.125),
        ("correctness", "bf16/stale tile", "planted", 1.0),
    ],
)
def test_cases_have_the_speedups_of_the_table(
    tmp_path: Path, benchmark: str, case: str, baseline: str, speedup: float
) -> None:
    records = written(tmp_path, benchmark)
    (record,) = (
        one for key, one in records.items() if key[0].endswith(case) and key[1] == baseline
    )
    assert record.speedup == pytest.approx(speedup)
    assert record.run.versions["cuda"] == "13.0"


def test_a_run_on_a_cpu_has_no_gpu(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    write_cases(path, "correctness", RAW["correctness"], {"gpu": "cpu"}, gpu_sha256="0" * 64)
    (run_,) = {record.run.gpu_sha256 for record in read(path.with_suffix(".jsonl"))}
    assert run_ is None


def test_results_write_their_cases(tmp_path: Path) -> None:
    path = tmp_path / "hgemm.json"
    results = Results.begin(path, what="hgemm", environment=ENVIRONMENT, settings={}, resume=False)
    results.entries.update(RAW["hgemm"])
    results.end(lambda _: ["a table"])
    records = read(path.with_suffix(".jsonl"))
    assert {record.run.benchmark for record in records} == {"hgemm"}
    assert {record.run.command for record in records} == {this_run()["command"]}


def test_every_benchmark_with_cases_is_a_module() -> None:
    root = Path(__file__).parents[2] / "benchmarks"
    for name in CASES:
        path = root / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
