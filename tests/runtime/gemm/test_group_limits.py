"""Sizes of groups that kernels of quack are not used for."""

from __future__ import annotations

import pytest

from nvgemm_runtime.gemm.group_limits import LARGEST_GROUP, LONGEST_ROW_BYTES, too_large_reason
from nvgemm_runtime.gemm.problem import Problem

BF16 = "bf16xbf16/fp32/bf16"


def why(key: str, out_row_bytes: int | None = None, provider: str = "quack") -> str:
    return too_large_reason(provider, Problem.parse(key), out_row_bytes) or ""


def test_the_longest_row_keeps_a_descriptor_above_address_0() -> None:
    lowest = 2**47 - 2**32 * 4096 - 2**44
    assert lowest == LONGEST_ROW_BYTES * LARGEST_GROUP
    assert LONGEST_ROW_BYTES < 128 << 10, "of which every address of 47 bits gets below 0"


@pytest.mark.parametrize(
    ("epilogue", "longest"),
    [
        ("", 49152),
        ("/swiglu_halves", 98304),
        ("/swiglu_halves_kept", 32768),
        ("/swiglu_interleaved_gradient", 24576),
        ("/swiglu_halves_ups", 24576),
    ],
)
def test_rows_count_with_all_that_is_stored_in_them(epilogue: str, longest: int) -> None:
    def asked(n: int) -> str:
        return why(f"grouped_mm/tn/{BF16}{epilogue}/g8m64n{n}k64")

    assert asked(longest) == ""
    row_bytes = LONGEST_ROW_BYTES * (longest + 16) // longest
    assert asked(longest + 16).startswith(
        f"rows of the result lie {row_bytes} bytes apart, quack's kernels of groups take at most "
        "98304; "
    )


def test_rows_of_fp32_and_rows_with_gaps_are_measured_in_bytes() -> None:
    assert why("grouped_mm/tn/bf16xbf16/fp32/fp32/g8m64n24576k64") == ""
    assert "98368 bytes apart" in why("grouped_mm/tn/bf16xbf16/fp32/fp32/g8m64n24592k64")
    small = f"grouped_mm/tn/{BF16}/g8m64n64k64"
    assert why(small, 98304) == ""
    assert "98320 bytes apart" in why(small, 98320)


@pytest.mark.parametrize(
    ("op", "layout", "sizes"),
    [("grouped_mm", "tn", "m{}n64k64"), ("k_grouped_mm", "nt", "m64n64k{}")],
)
def test_what_is_divided_into_groups_may_be_as_long_as_one_group(
    op: str, layout: str, sizes: str
) -> None:
    def asked(extent: int) -> str:
        return why(f"{op}/{layout}/{BF16}/g8{sizes.format(extent)}")

    assert asked(2**30) == ""
    name = "m" if op == "grouped_mm" else "k"
    assert asked(2**30 + 1) == (
        f"{name} is 1073741825, quack's kernels of groups take at most 1073741824"
    )


def test_other_kernels_are_as_they_were() -> None:
    large = f"grouped_mm/tn/{BF16}/g8m64n65536k64"
    assert "quack" in why(large)
    assert why(large, provider="cutlass_operators") == ""
    assert why(f"mm/tn/{BF16}/m64n65536k64") == ""
    assert why(f"k_grouped_mm/nt/{BF16}/g8m64n65536k64") == ""
