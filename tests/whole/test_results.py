"""Committed results keep the schema, and tables of the documents agree with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.record import RESULTS, Record, read_all
from benchmarks.tables.pages import BLOCKS, ROOT, names, pages, renewed
from benchmarks.tables.selection import Selection


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read_all()


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_agree_with_the_results(page: Path, records: list[Record]) -> None:
    text = page.read_text("utf-8")
    assert text == renewed(text, Selection(records)), "run: python -m benchmarks.tables"


def test_every_table_has_a_page() -> None:
    used = [name for page in pages() for name in names(page.read_text("utf-8"))]
    assert len(used) == len({*used}), "a table is on two pages"
    assert {*BLOCKS} - {*used} <= {"readme"}


def test_results_are_few_and_small() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 45
    assert sum(path.stat().st_size for path in files) <= 4_000_000


def test_each_record_lies_in_the_file_of_its_benchmark_and_product() -> None:
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            assert Record.from_json(line).file_name == path.name


def test_readme_has_at_most_six_rows_of_results(records: list[Record]) -> None:
    rows = BLOCKS["readme"](Selection(records)).splitlines()
    assert len(rows) <= 2 + 6
