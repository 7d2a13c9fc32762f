"""Figures are drawn from result files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks import figures
from benchmarks.record import Baseline, Case, Record, Run, write

pytest.importorskip("matplotlib")


def record(benchmark: str, case: str, figure: float, baseline: str, value: float) -> Record:
    run = Run(benchmark=benchmark, date="2026-11-21", gpu="NVIDIA G1", versions={})
    other = Baseline(name=baseline, value=value)
    return Record(case=Case(name=case, figure=figure, unit="us", baseline=other), run=run)


LT = "cuBLASLt autotuned"
RECORDS = [
    *(
        record("kernels", f"mm/tn/bf16/m{m}n64k64/apart/best of all", 1, "best", 1 + m / 1000)
        for m in (1, 16, 300)
    ),
    *(
        record("hgemm", f"{size}/{mode}", 1, LT, 1.25)
        for size in ("64_64_64", "128_4096_64", "16384_16384_16384")
        for mode in ("offline", "server")
    ),
    *(
        record("hgemm", f"mean of 3 sizes/{mode}/bundled", 25, LT, 1)
        for mode in ("offline", "server")
    ),
    *(
        record("cold_start", f"30 GEMMs/{mode}/first result", 8.5, reference, 17)
        for mode, reference in (("aten+measured", "aten+triton"), ("jit", "aten"))
    ),
    *(
        record(
            "serving", f"vllm/llama-3.1-8b, 32 layers/decode, batch {batch}/{what}", 5, "stock", 6
        )
        for batch in (1, 16)
        for what in ("rate", "kernels")
    ),
]


def texts(path: Path) -> str:
    """Returns a figure's texts."""
    return "\n".join(text for text in ElementTree.parse(path).getroot().itertext() if text.strip())


@pytest.fixture
def results(tmp_path: Path) -> Path:
    directory = tmp_path / "results"
    directory.mkdir()
    write(directory / "all.jsonl", RECORDS)
    return directory


@pytest.mark.slow
def test_same_results_give_the_same_figures(results: Path, tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "two"):
        output = tmp_path / name
        done = CliRunner().invoke(
            figures.main, ["--results", str(results), "-o", str(output)], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        drawn.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert drawn[0] == drawn[1]
    for name, expected in {
        "kernels": "2 of 3 are over 1 % faster, none is over 0.0 % slower",
        "hgemm": "3 sizes: +25.0 % back to back, +25.0 % single requests",
        "serving": "kernels of a decode step are 1.200 to 1.200 times as fast as stock",
        "cold_start": "starts 2.0 times as fast as with Triton (G1)",
    }.items():
        assert expected in texts(tmp_path / "one" / f"{name}.svg").replace("\n", " ")


def test_refuses_results_without_a_figures_benchmark(tmp_path: Path) -> None:
    write(tmp_path / "some.jsonl", RECORDS[3:])
    refused = CliRunner().invoke(
        figures.main, ["--results", str(tmp_path), "-o", str(tmp_path / "figures")]
    )
    assert refused.exit_code == 1
    assert "no record of benchmark kernels" in refused.output


def test_committed_figures_name_the_newest_results() -> None:
    """Compares titles alone: other matplotlib releases draw other paths."""
    records = figures.Selection(figures.read_all())
    for name, draw in figures.DRAWN.items():
        path = Path(figures.__file__).parents[1] / f"docs/figures/{name}.svg"
        figure = draw(records)
        titles = [axes.get_title() for axes in figure.axes] + [figure.get_suptitle()]
        for line in "\n".join(titles).splitlines():
            assert line in texts(path)
