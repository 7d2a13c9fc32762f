from __future__ import annotations

from collections import Counter

import pytest

from nvgemm_aot.workload.coverage import Sizes, Undeclarable, read_undeclarable
from nvgemm_runtime.recording.text import Recording


def recorded(*others: str) -> str:
    return Recording(name="x", targets={"sm_90a"}, others=Counter(others)).render()


@pytest.mark.parametrize(
    ("gemm", "sizes"),
    [
        ("_int_mm of int8[3, 5] and int8[5, 7] into int32[3, 7]", Sizes(3, 7, 5)),
        ("bmm of fp32[2, 3, 5] and fp32[2, 5, 7] into fp32[2, 3, 7]", Sizes(3, 7, 5, 2)),
        ("mm of fp32[0, 5] and fp32[5, 7] into fp32[0, 7]", None),
        ("mm of fp32[5] and fp32[5] into fp32[1]", None),
        ("something else altogether", None),
    ],
)
def test_words_become_a_gemm_with_its_sizes_and_reason(gemm: str, sizes: Sizes | None) -> None:
    line = f"{gemm}: why: because"
    assert read_undeclarable(recorded(line, line)) == (
        Undeclarable(gemm=gemm, sizes=sizes, count=2, reason="why: because"),
    )


def test_flops_are_two_a_term() -> None:
    assert Sizes(2, 3, 5, 7).flops == 2 * 2 * 3 * 5 * 7


def test_a_line_without_a_reason_gets_one() -> None:
    [read] = read_undeclarable(recorded("mystery"))
    assert (read.gemm, read.reason) == ("mystery", "no manifest can declare it")


def test_edited_recordings_are_read_and_comments_of_manifests_are_not() -> None:
    assert len(read_undeclarable(recorded("a: b") + "# edited\n")) == 1
    assert read_undeclarable("# 9 x faster: a comment like theirs\nversion: 1\n") == ()
