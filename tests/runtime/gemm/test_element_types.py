"""What follows from an element type, and that each table by element type has all that it must."""

from __future__ import annotations

import json
from collections.abc import Collection

import pytest
from gemm_arguments import EXACT_LIMIT

from nvgemm_aot.manifest.schema import OUT_DTYPES
from nvgemm_aot.providers import heuristics
from nvgemm_aot.verify import epilogue, operator_name, tensor_core
from nvgemm_aot.verify.sass import TENSOR_CORE_INSTRUCTIONS
from nvgemm_runtime.gemm.element_types import DType
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.support import OUTS
from repository import TESTS

RESULTS = tuple(map(DType, OUT_DTYPES))
SUMS = {dtype.accumulator for dtype in OUTS}


@pytest.mark.parametrize(
    ("dtype", "accumulator", "out"),
    [
        (DType.BF16, DType.FP32, DType.BF16),
        (DType.FP8_E5M2, DType.FP32, DType.BF16),
        (DType.FP4_E2M1, DType.FP32, DType.BF16),
        (DType.UINT8, DType.INT32, DType.INT32),
    ],
)
def test_accumulator_and_usual_result(dtype: DType, accumulator: DType, out: DType) -> None:
    assert dtype.accumulator is accumulator
    assert dtype.usual_out is out
    assert all(dtype.usual_out in outs for dtype, outs in OUTS.items())


def _in_rows() -> set[DType]:
    rows = json.loads((TESTS / "data" / "rows.json").read_text())
    return {Signature.parse(row["signature"]).a for row in rows}


TABLES: dict[str, tuple[Collection[DType], Collection[DType]]] = {
    "heuristics": (heuristics._LETTERS, {*OUTS, *RESULTS, *SUMS}),
    "operator names": (operator_name._DTYPES, DType),
    "instructions of sm_90a": (
        {dtype for major, dtype in TENSOR_CORE_INSTRUCTIONS if major == 9},
        {*OUTS} - {DType.FP4_E2M1},  # Hopper does not multiply it
    ),
    "instructions of sm_100": (
        {dtype for major, dtype in TENSOR_CORE_INSTRUCTIONS if major == 10},
        OUTS,
    ),
    "operands in modifiers": (
        {*tensor_core._GMMA_TYPES.values()},
        {*OUTS} - {DType.FP4_E2M1},
    ),
    "operands in descriptors": (
        {dtype for types in tensor_core._DESCRIPTOR_TYPES.values() for dtype in types.values()},
        OUTS,
    ),
    "sums in descriptors": ({*tensor_core._DESCRIPTOR_ACCUMULATOR.values()}, SUMS),
    "results in code": (
        {*epilogue._RESULTS.values()},
        {dtype for dtype in RESULTS if not dtype.is_integer},
    ),
    "golden rows": (_in_rows(), OUTS),
    "exact results on a GPU": (EXACT_LIMIT, RESULTS),
}
"""By name: the element types that a table has, and those that it must."""


@pytest.mark.parametrize("table", TABLES)
def test_table_has_every_type(table: str) -> None:
    has, must = TABLES[table]
    assert {*must} <= {*has}


@pytest.mark.parametrize("dtype", OUTS)
def test_descriptors_and_instructions_agree(dtype: DType) -> None:
    instruction = TENSOR_CORE_INSTRUCTIONS[10, dtype]
    assert dtype in tensor_core._DESCRIPTOR_TYPES[instruction].values()


def test_native_part_knows_every_type_of_torch() -> None:
    source = (TESTS.parent / "runtime" / "csrc" / "torch_values.cpp").read_text()
    newer = {DType.FP8_E8M0: "kDTypeFloat8E8m0", DType.FP4_E2M1: "kDTypeFloat4E2m1"}
    for dtype in DType:
        assert newer.get(dtype, f"aoti_torch_dtype_{dtype.torch_name}()") in source
