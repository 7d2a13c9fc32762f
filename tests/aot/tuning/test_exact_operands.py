"""What tuning checks kernels on: right results pass, whatever sums them, and faults are noticed."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import tensor_core
from nvgemm_aot.tuning.correctness import judgement as correctness
from nvgemm_aot.tuning.correctness.exact_operands import (
    FEW_PRODUCTS,
    WHOLE_NUMBERS,
    OperandCheck,
    make_checks,
)
from nvgemm_aot.tuning.correctness.judgement import (
    FRACTION_BITS,
    agrees_roughly,
    expect_between,
    find_fault,
    reference,
)
from nvgemm_aot.tuning.correctness.random_operands import Operands, poison
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature

SIGNATURES = [
    "mm/tn/bf16xbf16/fp32/bf16",
    "bmm/nt/bf16xbf16/fp32/bf16",
    "mm/nn/fp16xfp16/fp32/fp16",
    "mm/tn/fp16xfp16/fp32/fp32",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
    "mm/tn/fp8_e4m3xfp8_e5m2/fp32/fp8_e4m3",
    "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp8_e5m2",
    "mm/tn/int8xint8/int32/int32",
    "mm/tn/int8xint8/int32/fp32",
    "mm/tn/int8xint8/int32/bf16",
    "mm/tn/int8xint8/int32/fp16",
    "mm/tn/int8xint8/int32/int8",
    "mm/tn/uint8xuint8/int32/int32",
    "mm/tn/uint8xuint8/int32/fp32",
    "mm/tn/uint8xuint8/int32/uint8",
    "mm/tn/bf16xbf16/fp32/bf16/bias",
    "mm/tn/fp16xfp16/fp32/fp16/bias_relu",
    "mm/nn/bf16xbf16/fp32/bf16/bias_gelu_tanh",
    "mm/tn/bf16xbf16/fp32/fp32/bias_silu",
    "bmm/tn/bf16xbf16/fp32/bf16/add",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias",
    "grouped_mm/tn/bf16xbf16/fp32/bf16",
    "grouped_mm/tt/bf16xbf16/fp32/bf16/bias",
    "grouped_mm/tn/bf16xbf16/fp32/bf16/add",
    "k_grouped_mm/nt/bf16xbf16/fp32/bf16",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32",
    "mm/nt/fp8_e5m2xfp8_e5m2/fp32/fp8_e4m3/e8m0_1x32",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e5m2/e8m0_1x32",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e4m3/e4m3_1x16",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp16/e8m0_1x16",
]

PLAIN = [key for key in SIGNATURES if key.count("/") == 4 and "grouped" not in key]
"""Those that take A and B alone."""

FLOATS = [key for key in PLAIN if "int" not in key]

CURVES = ("bias_gelu_tanh", "bias_silu")


def problem(key: str, k: int = 512, m: int = 24, n: int = 32) -> Problem:
    signature = Signature.parse(key)
    batch = 2 if signature.op is Op.BMM else 1
    groups = 3 if signature.op.has_groups else 1
    return Problem(signature=signature, m=m, n=n, k=k, batch=batch, groups=groups)


@functools.cache
def checks(posed: Problem, seed: int = 1) -> list[OperandCheck]:
    return make_checks(posed, "cpu", seed=seed)


def rounded(value: torch.Tensor, posed: Problem) -> torch.Tensor:
    return value.to(torch_dtype(posed.signature.out))


def right(check: OperandCheck, posed: Problem) -> torch.Tensor:
    return rounded(reference(check.operands, posed.signature), posed)


def faults(posed: Problem, operands: Operands, check: OperandCheck) -> str | None:
    """What is found where a kernel reads these operands in place of a check's."""
    return find_fault(rounded(reference(operands, posed.signature), posed), check.expected)


@pytest.mark.parametrize("key", SIGNATURES)
@pytest.mark.parametrize("k", [32, 480])
def test_a_correctly_rounded_result_is_right(key: str, k: int) -> None:
    posed = problem(key, k)
    for check in checks(posed):
        assert find_fault(right(check, posed), check.expected) is None, check.name


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("k", [64, 2560])
def test_short_accumulators_are_right(key: str, k: int) -> None:
    """Those of 8-bit types with Hopper's 14 bits, the others with those of fp32, cut and not
    rounded. At k = 2560, an H200's results of fp8 into bf16 were once taken for wrong."""
    posed = problem(key, k)
    bits = tensor_core.HOPPER_FP8_BITS if posed.signature.a.bits == 8 else FRACTION_BITS
    for check in checks(posed):
        a, b, *_ = check.operands
        result = rounded(tensor_core.product(a, b, bits), posed)
        assert find_fault(result, check.expected) is None, check.name


@pytest.mark.parametrize("out", ["bf16", "fp32", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_the_longest_sums_of_fp8_are_right(dtype: str, out: str) -> None:
    posed = problem(f"mm/tn/{dtype}x{dtype}/fp32/{out}", k=65536, m=2, n=8)
    for check in checks(posed):
        a, b, *_ = check.operands
        result = rounded(tensor_core.product(a, b, step=256), posed)
        assert find_fault(result, check.expected) is None, check.name


@pytest.mark.parametrize("key", PLAIN)
@pytest.mark.parametrize("k", [16, 512, 65536])
def test_sums_of_whole_numbers_need_few_bits_and_vary(key: str, k: int) -> None:
    posed = problem(key, k, m=4, n=8)
    first = checks(posed)[0]
    if first.name != WHOLE_NUMBERS:
        assert posed.signature.a is DType.UINT8
        return
    a, b, *_ = (tensor.double() for tensor in first.operands)
    assert bool(a.all()), "no k is without a part in every element"
    assert bool(b.all())
    halves = a[..., : k // 2] @ b[..., : k // 2, :]
    assert halves.abs().max() < 4096
    result = right(first, posed).double()
    assert torch.equal(result, a @ b) or posed.signature.out in (DType.FP8_E5M2, DType.BF16)
    assert result.std() > 0.5


@pytest.mark.parametrize("epilogue", ["", "/bias", "/swiglu_halves_kept"])
def test_rows_of_another_token_are_noticed(epilogue: str) -> None:
    """All of A is taken, so a kernel that errs in large numbers of rows is wrong."""
    key = f"gathered_grouped_mm/tn/bf16xbf16/fp32/bf16{epilogue}"
    posed = Problem.parse(f"{key}/g3m48n64k128")
    for check in checks(posed):
        assert find_fault(right(check, posed), check.expected) is None
        a, b, out, offsets, rows, *added = check.operands
        assert sorted(rows.tolist()) == [*range(48)]
        largest = torch.where(rows == 47, 46, rows)
        wrong = replace(check, operands=(a, b, out, offsets, largest, *added))
        assert find_fault(right(wrong, posed), check.expected) is not None


@pytest.mark.parametrize("key", SIGNATURES)
def test_one_element_that_was_not_written_is_noticed(key: str) -> None:
    posed = problem(key)
    for check in checks(posed):
        result, out = right(check, posed), torch.empty_like(check.operands[2])
        poison(out)
        place = int((result.flatten().double() != out.flatten().double()).nonzero()[0])
        result.view(-1)[place] = out.view(-1)[place]
        fault = find_fault(result, check.expected)
        if fault is None:  # NaN, where it is NaN that was to be written
            assert check.expected.low.view(-1)[place].double().isnan()
        else:
            assert fault.startswith(f"1 of {result.numel()} elements")


def _has_numbers_that_cancel(key: str) -> bool:
    return "fp4" not in key and "uint8" not in key and not key.endswith(CURVES)


@pytest.mark.parametrize("key", [key for key in SIGNATURES if _has_numbers_that_cancel(key)])
@pytest.mark.parametrize("k", [32, 4096])
def test_one_k_too_few_is_noticed_in_most_elements(key: str, k: int) -> None:
    posed = problem(key, k, m=12, n=16)
    check = checks(posed)[0]
    a, b, *others = check.operands
    for left_out in (0, k // 2 - 1, k - 1):
        short = a.clone(memory_format=torch.preserve_format)
        short.view(_bits(a))[..., left_out] = 0
        fault = faults(posed, (short, b, *others), check)
        assert fault is not None
        share = 0.4 if "relu" in key else 0.8
        assert int(fault.split()[0]) >= share * posed.m * posed.n


@pytest.mark.parametrize(
    ("signature", "m", "n", "least"),
    [
        ("fp8_e4m3xfp8_e4m3/fp32/bf16", 1, 16, 12),
        ("fp8_e4m3xfp8_e4m3/fp32/fp32", 1, 16, 12),
        ("fp8_e4m3xfp8_e4m3/fp32/fp8_e5m2", 1, 16, 12),
        ("uint8xuint8/int32/int32", 24, 32, 1),
    ],
)
def test_one_k_too_few_of_the_longest_sums_is_noticed(
    signature: str, m: int, n: int, least: int
) -> None:
    posed = problem(f"mm/tn/{signature}", 65536, m=m, n=n)
    check = checks(posed)[0]
    a, b, out = check.operands
    fault = faults(posed, (a[:, :-1], b[:-1], out), check)
    assert fault is not None
    assert int(fault.split()[0]) >= least


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]


@pytest.mark.parametrize("key", SIGNATURES)
def test_a_row_of_another_matrix_is_noticed(key: str) -> None:
    posed = problem(key, 480)
    found = []
    for check in checks(posed):
        a, *others = check.operands
        swapped = a.clone(memory_format=torch.preserve_format)
        rows = a.view(_bits(a))
        swapped.view(_bits(a))[..., 3, :] = rows[..., 4, :]
        found.append(faults(posed, (swapped, *others), check))
    assert any(found)
    if posed.signature.a is not DType.UINT8:
        assert found[0] is not None


@pytest.mark.parametrize("key", SIGNATURES)
def test_a_tile_of_the_launch_before_is_noticed(key: str) -> None:
    posed = problem(key, 480)
    for check, before in zip(checks(posed), checks(posed, seed=2)):
        result = right(check, posed)
        result[..., -8:, -8:] = right(before, posed)[..., -8:, -8:]
        assert find_fault(result, check.expected) is not None


@pytest.mark.parametrize("key", [key for key in SIGNATURES if "fp32_" in key or "1x" in key])
@pytest.mark.parametrize("place", [3, 4])
def test_scales_of_other_rows_are_noticed(key: str, place: int) -> None:
    posed = problem(key, 512)
    found = []
    for check in checks(posed):
        tensors = list(check.operands)
        changed = tensors[place].clone()
        if changed.numel() == 1:
            changed *= 1.01
        elif changed.dtype is torch.float32:
            changed = changed.roll(1, 1 if place == 4 else 0)
        else:
            changed = changed.view(torch.uint8).roll(16).view(changed.dtype)
        tensors[place] = changed
        found.append(faults(posed, tuple(tensors), check))
    assert all(found)


@pytest.mark.parametrize("key", FLOATS)
def test_a_slightly_wrong_scale_is_noticed(key: str) -> None:
    posed = problem(key, 512, m=48, n=64)
    (few,) = (check for check in checks(posed) if check.name == FEW_PRODUCTS)
    value = reference(few.operands, posed.signature) * 1.01
    assert find_fault(rounded(value, posed), few.expected) is not None


def rounds_sums(posed: Problem, operands: Operands, step: int) -> torch.Tensor:
    """The result of a kernel that rounds its accumulator to bf16 after so many k."""
    a, b, out, *_ = operands
    total = torch.zeros(out.shape)
    for first in range(0, posed.k, step):
        some = slice(first, first + step)
        total = (total + a[..., some].float() @ b[..., some, :].float()).bfloat16().float()
    return rounded(total, posed)


@pytest.mark.parametrize("key", [key for key in PLAIN if not key.endswith("/uint8")])
@pytest.mark.parametrize("k", [256, 4096])
def test_an_accumulator_that_is_rounded_to_bf16_is_noticed(key: str, k: int) -> None:
    posed = problem(key, k)
    found = [
        find_fault(rounds_sums(posed, check.operands, k // 2), check.expected)
        for check in checks(posed)
    ]
    assert any(found)
    if posed.signature.a is not DType.UINT8:
        assert found[0] is not None


@pytest.mark.parametrize(
    ("key", "m", "n", "k"),
    [
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp32", 2, 4, 16),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp32", 2, 4, 144),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp16", 2, 8, 64),
        ("mm/tn/bf16xbf16/fp32/fp32", 2, 8, 24),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp8_e5m2", 1, 16, 160),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", 1, 16, 160),
    ],
)
def test_sums_rounded_to_bf16_are_noticed_in_a_handful_of_elements(
    key: str, m: int, n: int, k: int
) -> None:
    posed = problem(key, k, m=m, n=n)
    for seed in range(20):
        whole = make_checks(posed, "cpu", seed=seed)[0]
        assert find_fault(rounds_sums(posed, whole.operands, 128), whole.expected), seed


@pytest.mark.parametrize("key", [key for key in FLOATS if key.startswith("mm")])
def test_a_nan_that_is_dropped_or_added_is_noticed(key: str) -> None:
    posed = problem(key)
    (few,) = (check for check in checks(posed) if check.name == FEW_PRODUCTS)
    result = right(few, posed)
    values = result.float()
    assert int(values.isnan().sum()) == posed.m + posed.n - 1, "a row and a column"
    for row in (True, False):
        dropped = values.clone()
        lines = dropped if row else dropped.T
        line = next(i for i in range(len(lines)) if lines[i].isnan().all())
        lines[line] = lines[line].nan_to_num(0.0)
        assert find_fault(dropped.to(result.dtype), few.expected) is not None
    first = int((~values.isnan()).flatten().nonzero()[0])
    values.view(-1)[first] = float("nan")
    assert find_fault(values.to(result.dtype), few.expected) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bounds_are_tight_to_one_unit_of_the_output(dtype: torch.dtype) -> None:
    value = torch.randn(1000, dtype=torch.float64)
    expected = expect_between(value, torch.zeros(()), dtype)
    result = value.to(dtype)
    assert find_fault(result, expected) is None
    for up in (float("inf"), -float("inf")):
        beside = torch.nextafter(result, torch.tensor(up, dtype=dtype))
        fault = find_fault(beside, expected)
        assert fault is not None
        assert fault.startswith("1000 of 1000 elements are wrong; that at [0] is ")


def test_the_error_that_is_allowed_is_passed_and_no_more() -> None:
    value, error = torch.tensor([100.0], dtype=torch.float64), torch.tensor([0.25])
    expected = expect_between(value, error.double(), torch.float32)
    for found, is_right in ((100.25, True), (99.75, True), (100.251, False), (99.749, False)):
        assert (find_fault(torch.tensor([found]), expected) is None) is is_right


@pytest.mark.parametrize("key", FLOATS)
def test_torchs_own_result_need_only_be_alike(key: str) -> None:
    posed = problem(key)
    check = checks(posed)[-1]
    value = reference(check.operands, posed.signature)
    assert agrees_roughly(rounded(value * 1.002, posed), check.expected)
    assert not agrees_roughly(rounded(value * 1.3, posed), check.expected)


@pytest.mark.parametrize(
    "key",
    [
        "grouped_mm/tn/bf16xbf16/fp32/bf16",
        "grouped_mm/tt/bf16xbf16/fp32/bf16/bias",
        "grouped_mm/tt/bf16xbf16/fp32/bf16/add",
        "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_kept",
        "grouped_mm/tt/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_gradient",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_ups",
    ],
)
def test_large_results_of_groups_are_computed_in_parts(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of five rows begin and end within groups of eight."""
    posed = problem(key)
    at_once = make_checks(posed, "cpu", seed=1)
    sizes = []
    expect_between_values = correctness.expect_between

    def noted(value: torch.Tensor, *how: object) -> correctness.Expected:
        sizes.append(len(value))
        return expect_between_values(value, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(correctness, "expect_between", noted)
    monkeypatch.setattr(correctness, "MOST_AT_ONCE", 5 * posed.out_n)
    in_parts = make_checks(posed, "cpu", seed=1)
    assert sizes == [5, 5, 5, 5, 4] * 2
    for whole, parts in zip(at_once, in_parts):
        for one, other in (
            (whole.expected.low, parts.expected.low),
            (whole.expected.high, parts.expected.high),
        ):
            # Sums of fp64 may differ with the number of rows, and then round to neighbours.
            torch.testing.assert_close(one, other, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "key", ["mm/tn/bf16xbf16/fp32/bf16", "k_grouped_mm/nt/bf16xbf16/fp32/bf16"]
)
def test_large_results_are_compared_in_parts(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posed = problem(key)
    whole, few = checks(posed)
    result = right(whole, posed)
    wrong = result.clone()
    first = (2, 7, 3)[-wrong.dim() :]
    for place in (first, tuple(extent - 1 for extent in wrong.shape)):
        wrong[place] += 100
    told = find_fault(wrong, whole.expected)
    monkeypatch.setattr(correctness, "MOST_AT_ONCE", result[0].numel())
    assert find_fault(result, whole.expected) is None
    assert find_fault(wrong, whole.expected) == told
    assert told is not None
    assert told.startswith(f"2 of {result.numel()} elements are wrong; that at {list(first)} is ")
    value = reference(few.operands, posed.signature)
    assert agrees_roughly(rounded(value * 1.002, posed), few.expected)
    assert not agrees_roughly(rounded(value * 1.3, posed), few.expected)
    value[-1] = 0  # far off in the last part alone
    assert not agrees_roughly(rounded(value, posed), few.expected)
