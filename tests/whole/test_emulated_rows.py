"""The support matrix calls rows *emulated* that the record of the whole pass has, and no others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest

from benchmarks.record import RESULTS, read
from documents import read as read_document
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES

CUTLASS, QUACK = "cutlass_operators", "quack"
BOTH = (CUTLASS, QUACK)
TARGETS = ("sm_100f", "sm_100a", "sm_103a")
ADDENDS = ("bias", "bias_relu", "bias_gelu_tanh", "bias_silu", "add")

RECORDED = {
    record.case.name
    for record in read(RESULTS / "emulation-cpu.jsonl")
    if record.case.figure and record.run.benchmark == "emulation"
}
"""Cases with a right kernel: target and row of the pass."""


def every(*parts: Iterable[str]) -> list[str]:
    """Row names of the pass, from the alternatives for each part."""
    return [" ".join(filter(None, words)) for words in itertools.product(*parts)]


def epilogues(pattern: str) -> list[str]:
    return [one.name for one in ALL_EPILOGUES if re.fullmatch(pattern, one.name)]


GATES = epilogues("(swiglu|geglu|swiglu_oai)_(halves|interleaved)")
KEPT = [f"{gate}_kept" for gate in GATES]
GRADIENTS = epilogues("(swiglu|geglu)_.*_(gradient|gradient_sums|ups)")

ROWS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "mm, bmm in bf16, fp16, into": (every(BOTH, ("mm", "bmm")), TARGETS),
    # Split kernels are a design class.
    "… k split": (every((QUACK,), ("mm", "bmm")), TARGETS),
    "… dynamic schedule": ([], TARGETS),
    "mm, bmm in fp8": (every(BOTH, ("mm fp8", "bmm fp8")), TARGETS),
    "mm, bmm of two fp8 dtypes": ([], TARGETS),
    "mm, bmm in int8": (
        every((CUTLASS,), ("mm", "bmm"), ("int8", "uint8")),
        ("sm_100a",),
    ),
    "mm, bmm with bias": (every(BOTH, ("mm", "bmm"), ("", "fp8"), ADDENDS), TARGETS),
    "mm with a gate": (every((QUACK,), ("mm",), GATES), TARGETS),
    "mm in fp8 with fp32": (
        every(BOTH, ("mm fp8",), ("fp32_tensor", "fp32_row"), ("", "bias")),
        TARGETS,
    ),
    "mm in MXFP8": (every((CUTLASS,), ("mm fp8 e8m0_1x32",)), TARGETS),
    "mm in MXFP4, NVFP4": (
        every((CUTLASS,), ("mm fp4",), ("e8m0_1x32", "e8m0_1x16", "e4m3_1x16")),
        TARGETS,
    ),
    "grouped_mm in bf16": (every(BOTH, ("grouped_mm",)), TARGETS),
    "… with a group bias": (every((QUACK,), ("grouped_mm",), ("bias", "add")), TARGETS),
    "… with a gate": (every((QUACK,), ("grouped_mm",), GATES), TARGETS),
    "… `_kept`": (every((QUACK,), ("grouped_mm",), KEPT), TARGETS),
    "… `_gradient`": (every((QUACK,), ("grouped_mm",), GRADIENTS), TARGETS),
    "grouped_mm in fp8": (
        every(BOTH, ("grouped_mm fp8",)) + every((QUACK,), ("grouped_mm fp8 fp32_row",)),
        TARGETS,
    ),
    "k_grouped_mm": (every((QUACK,), ("k_grouped_mm",)), TARGETS),
    "gathered_mm": (every(("gathered",), ("gathered_mm",)), TARGETS),
    "gathered_grouped_mm": (
        every((QUACK,), ("gathered_grouped_mm",), ("", "bias", *GATES, *KEPT)),
        TARGETS,
    ),
}
"""By the begin of the page's rows: the pass' rows and targets that a row stands for."""


def blackwell_cells() -> dict[str, str]:
    """Blackwell's column of the page, by the begin of the row."""
    kernels = read_document("docs/reference/support.md").split("## Kernels", 1)[1]
    table = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", kernels.split("\n##")[0], re.MULTILINE)
    cells = {}
    for row, cell in table:
        if row in ("kernel", "---"):
            continue
        (begin,) = (begin for begin in ROWS if row.startswith(begin))
        cells[begin] = cell
    return cells


CELLS = blackwell_cells()


def missing(begin: str) -> list[str]:
    """Cases of a row that the record lacks.

    A kernel of another provider stands for one that does not compile for a target.
    """
    rows, targets = ROWS[begin]
    found = []
    for row, target in itertools.product(rows, targets):
        _, _, problem = row.partition(" ")
        stand_ins = {f"{target}/{name}" for name in rows if name.partition(" ")[2] == problem}
        anywhere = {f"{other}/{row}" for other in targets}
        if not (stand_ins & RECORDED and anywhere & RECORDED):
            found.append(f"{target}/{row}")
    return found


def test_every_row_is_on_the_page() -> None:
    assert CELLS.keys() == ROWS.keys()


@pytest.mark.parametrize("begin", ROWS)
def test_a_row_is_called_emulated_if_the_record_has_it(begin: str) -> None:
    rows, _ = ROWS[begin]
    absent = missing(begin)
    if rows and not absent:
        expected = "emulated"
    elif all(" fp8" in name for name in absent) and not all(" fp8" in name for name in rows):
        expected = "emulated in 16 bits"
    else:
        expected = ""
    said = re.search(r"emulated( in 16 bits)?", CELLS[begin])
    assert (said[0] if said else "") == expected, f"not recorded: {', '.join(absent)}"


def test_a_case_that_the_record_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = "sm_103a/gathered gathered_mm"
    assert missing("gathered_mm") == []
    monkeypatch.setattr("test_emulated_rows.RECORDED", RECORDED - {absent})
    assert missing("gathered_mm") == [absent]
