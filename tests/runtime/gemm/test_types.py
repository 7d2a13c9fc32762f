"""That each row has the columns that its use calls for, and that they are those of torch."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from gemm_arguments import EXACT_LIMIT

from nvgemm_aot.manifest.schema import OUT_DTYPES
from nvgemm_runtime.gemm.epilogues import Addend, GateForm
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.support import OUTS
from nvgemm_runtime.gemm.types import (
    DType,
    ElementType,
    Mma,
    ScaleRecipe,
    TorchScaling,
    swizzled_elements,
)
from nvgemm_runtime.launch.loading import native
from repository import TESTS

RESULTS = tuple(map(DType, OUT_DTYPES))
SUMS = {dtype.accumulator for dtype in OUTS}
FLOATS = [dtype for dtype in DType if not dtype.is_integer]
ROWS = json.loads((TESTS / "data" / "rows.json").read_text())


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


@pytest.mark.parametrize(
    ("column", "must_have"),
    [
        ("heuristics_letter", {*OUTS, *RESULTS, *SUMS}),
        ("operand_code", OUTS),
        ("sass_name", {dtype for dtype in DType if Mma.WGMMA in dtype.row.multiplied_by}),
        ("accumulator_code", SUMS),
        ("scale_code", {recipe.dtype for recipe in ScaleRecipe if recipe.is_swizzled}),
        ("rounded_by", {dtype for dtype in RESULTS if not dtype.is_integer}),
        ("fraction_bits", FLOATS),
        ("exponent_bias", FLOATS),
    ],
)
def test_column_has_what_its_use_calls_for(column: str, must_have: Collection[DType]) -> None:
    assert [dtype for dtype in must_have if getattr(dtype.row, column) is None] == []


@pytest.mark.parametrize(
    "told_apart_by",
    [
        lambda row: row.torch_name,
        lambda row: row.torch_number,
        lambda row: (row.dlpack_code, row.bits),
        lambda row: row.sass_name,
        lambda row: row.accumulator_code,
        lambda row: row.scale_code,
        lambda row: row.rounded_by,
        lambda row: row.multiplied_by and (row.multiplied_by[Mma.TCGEN05], row.operand_code),
    ],
)
def test_types_are_told_apart(told_apart_by: Callable[[ElementType], object]) -> None:
    seen = [told_apart_by(dtype.row) for dtype in DType]
    assert [one for one in seen if one and seen.count(one) > 1] == []


def test_test_data_has_every_type() -> None:
    assert {*OUTS} <= {Signature.parse(row["signature"]).a for row in ROWS}
    assert {*RESULTS} <= {*EXACT_LIMIT}


@pytest.mark.parametrize("dtype", DType)
def test_numbers_are_those_of_torch_and_dlpack(dtype: DType) -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    number = getattr(library, f"aoti_torch_dtype_{dtype.torch_name}", None)  # some since 2.12
    assert number is None or number() == dtype.row.torch_number
    capsule = torch.empty(2, dtype=torch.uint8).view(torch.uint8)
    if dtype is not DType.UINT8:
        capsule = torch.empty(4, dtype=torch.uint8).view(torch_dtype(dtype))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = capsule.__dlpack__()
    # DLTensor: data, device (type, index), ndim, dtype (code, bits, lanes).
    code, bits = (ctypes.c_uint8 * 2).from_address(pointer(tensor, b"dltensor") + 20)
    lanes = ctypes.c_uint16.from_address(pointer(tensor, b"dltensor") + 22).value
    assert (code, bits, lanes) == (dtype.row.dlpack_code, dtype.bits, dtype.packed)


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.packed == 1])
def test_formats_of_floats_are_those_of_torch(dtype: DType) -> None:
    fraction_bits, bias = dtype.row.fraction_bits, dtype.row.exponent_bias
    assert fraction_bits is not None
    assert bias is not None
    one, two = (
        torch.tensor([1.0, 2.0])
        .to(torch_dtype(dtype))
        .view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[dtype.bits])
        .tolist()
    )
    assert (one, two - one) == (bias << fraction_bits, 1 << fraction_bits)


def test_numbers_that_the_native_part_takes_are_those_of_its_enumerations() -> None:
    header = (TESTS.parent / "runtime" / "csrc" / "core" / "gemm.h").read_text()

    def enumerators(name: str) -> list[str]:
        found = re.search(rf"enum class {name} {{([^}}]*)}}", header)
        assert found is not None
        return [one.strip().removeprefix("k").lower() for one in found[1].split(",")]

    assert enumerators("Op") == [op.value.replace("_", "") for op in native._OPS]
    assert enumerators("Role") == [role.value.replace("_", "") for role in Role]
    assert [enumerators("AddendKind")[native._ADDENDS[addend]] for addend in Addend] == [
        "matrix" if addend is Addend.PRODUCT else addend.value for addend in Addend
    ]
    assert enumerators("GateForm") == ["none", *(form.value.replace("_", "") for form in GateForm)]
    assert (None, *GateForm) == native._FORMS
    ratios = re.search(r"kRatios\[\] = {(.*)};", header)
    assert ratios is not None
    assert re.findall(r"{(\d), (\d)}", ratios[1]) == [
        ("1", "1"),
        *((str(one.row.product_columns), str(one.row.out_columns)) for one in GateForm),
    ]
    for recipe in ScaleRecipe:
        kind = "block" if recipe.is_swizzled else recipe.value.removeprefix("fp32_")
        assert enumerators("ScaleKind")[recipe.row.native_kind] == kind


def test_scaling_types_are_those_of_torch() -> None:
    from torch.nn.functional import ScalingType

    assert {scaling.value for scaling in TorchScaling} == {
        ScalingType.TensorWise.value,
        ScalingType.RowWise.value,
        ScalingType.BlockWise1x16.value,
        ScalingType.BlockWise1x32.value,
    }
    for recipe in ScaleRecipe:
        if recipe.block is not None:
            theirs = getattr(ScalingType, f"BlockWise1x{recipe.block}")
            assert recipe.row.torch_scaling.value == theirs.value


@pytest.mark.parametrize(
    ("recipe", "rows", "k", "elements"),
    [
        (ScaleRecipe.E8M0_1X32, 1, 32, 128 * 4),
        (ScaleRecipe.E8M0_1X32, 128, 128, 128 * 4),
        (ScaleRecipe.E8M0_1X32, 129, 128, 256 * 4),
        (ScaleRecipe.E8M0_1X32, 128, 160, 128 * 8),
        (ScaleRecipe.E8M0_1X32, 128, 130, 128 * 8),
        (ScaleRecipe.E4M3_1X16, 128, 128, 128 * 8),
        (ScaleRecipe.E8M0_1X16, 300, 1000, 384 * 64),
    ],
)
def test_swizzled_scales_are_padded_to_whole_blocks(
    recipe: ScaleRecipe, rows: int, k: int, elements: int
) -> None:
    assert swizzled_elements(recipe, rows, k) == elements


@pytest.mark.parametrize("recipe", list(ScaleRecipe))
def test_names_say_type_and_block(recipe: ScaleRecipe) -> None:
    kind, extent = recipe.value.split("_")
    assert recipe.dtype.value.removeprefix("fp8_") == kind
    assert recipe.is_swizzled is extent.startswith("1x")
    assert recipe.block == (int(extent.removeprefix("1x")) if recipe.is_swizzled else None)
    assert (recipe.dtype is DType.FP32) is not recipe.is_swizzled
