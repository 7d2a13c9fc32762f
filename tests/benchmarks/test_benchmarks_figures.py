"""Figures are drawn from result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from test_benchmarks_cold_start import record_of, run
from test_benchmarks_hgemm import METHODS
from test_benchmarks_hgemm import entry as hgemm_entry
from test_benchmarks_kernels import entry, problem

from benchmarks import figures

pytest.importorskip("matplotlib")

ENVIRONMENT = {"gpu": "G", "bundles": []}
RECORDS: dict[str, dict[str, Any]] = {
    "kernels": {
        "environment": ENVIRONMENT,
        "entries": {
            problem(m).key: entry(1000, 900, 800 + 100 * number)
            for number, m in enumerate((1, 16, 300, 4096))
        },
    },
    "hgemm": {
        "environment": ENVIRONMENT,
        "entries": {
            key: hgemm_entry(dict.fromkeys(METHODS, 1000) | {"ours-nn": 800})
            for key in ("64_64_64", "128_4096_64", "16384_16384_16384")
        },
    },
    "cold_start": record_of(run("aten", 8.0), run("aten", 9.0), run("jit", 20.0)),
}


def texts(path: Path) -> str:
    """What is written in a figure."""
    return "\n".join(text for text in ElementTree.parse(path).getroot().itertext() if text.strip())


@pytest.mark.slow
@pytest.mark.parametrize("what", list(RECORDS))
def test_same_file_gives_the_same_figure(what: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"what": what, **RECORDS[what]}))
    drawn = []
    for name in ("one", "two"):
        done = CliRunner().invoke(figures.main, [str(path), "-o", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        drawn.append((tmp_path / name / f"{what}.svg").read_bytes())
    assert drawn[0] == drawn[1]
    written = texts(tmp_path / "one" / f"{what}.svg")
    expected = {
        "kernels": ("m 16-127: 1.00", "G: 4 declared GEMMs"),
        "hgemm": ("torch.matmul max: +25.0%", "server"),
        "cold_start": ("8.5 s", "jit"),
    }
    for text in expected[what]:
        assert text in written


def test_a_cold_start_of_several_batches_has_a_figure_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    record = {**RECORDS["cold_start"], "batches": [64, 1]}
    path.write_text(json.dumps(record))
    done = CliRunner().invoke(figures.main, [str(path), "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [one.name for one in tmp_path.glob("*.svg")] == ["cold_start_batches.svg"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"what": "lookup"}', "says it holds 'lookup'; drawn are kernels, hgemm, cold_start"),
        ("{", "cannot be read"),
        ('{"what": "kernels"}', "is not as this benchmark writes it: KeyError"),
        ('{"what": "hgemm", "entries": {}}', "no size of the file was measured"),
        ('{"what": "cold_start", "runs": []}', "is not as this benchmark writes it"),
    ],
)
def test_refuses_what_it_cannot_draw(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    refused = CliRunner().invoke(figures.main, [str(path), "-o", str(tmp_path / "figures")])
    assert refused.exit_code == 1
    assert said in refused.output
    assert not (tmp_path / "figures").exists()
