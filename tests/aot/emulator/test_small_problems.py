"""Sizes of emulated problems, from a kernel's tile and alignment."""

from __future__ import annotations

from dataclasses import replace

from fake_provider import candidate
from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.emulator.checking.small_problems import (
    size_steps,
    small_problems,
)
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import misalignment_reason

BF16 = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


def test_all_problems_can_be_aligned() -> None:
    for signature in EVERY_SIGNATURE:
        kernel = candidate("one", signature, tile=(128, 64, 64), cluster=(2, 1))
        problems = small_problems(kernel)
        assert len(problems) == (4 if signature.op is Op.GATHERED_MM else 5)
        for problem in problems:
            assert misalignment_reason(problem, kernel.alignment_bytes) is None, problem
            block = signature.scales.block if signature.scales is not None else None
            assert problem.k % (block or 1) == 0


def test_problems_have_tails_and_several_tiles() -> None:
    kernel = candidate("one", BF16, tile=(128, 64, 64), cluster=(2, 1))
    sizes = [(each.m, each.n, each.k) for each in small_problems(kernel)]
    assert sizes[:4] == [(5, 8, 8), (126, 72, 72), (129, 56, 120), (257, 120, 184)]
    assert size_steps(BF16, kernel.alignment_bytes) == (1, 8, 8)


def test_split_sums_have_terms_for_every_part() -> None:
    kernel = candidate("one", BF16, tile=(128, 64, 64))
    split = replace(kernel, design=replace(kernel.design, splits=4))
    assert [each.k for each in small_problems(split)] == [8, 264, 504, 376, 64 * 10 * 4 + 8]


def test_the_deep_problem_uses_each_stage_again() -> None:
    kernel = candidate("one", BF16, tile=(128, 64, 64))
    *_, deep = small_problems(kernel)
    stages = 227 * 1024 // ((128 + 64) * 64 * 2)
    assert (deep.m, deep.n) == (128, 64)
    assert -(-deep.k // 64) == stages + 2
    pair = replace(kernel, design=replace(kernel.design, ctas_per_tile=2))
    assert -(-small_problems(pair)[-1].k // 64) > 2 * stages + 1
    tiny = candidate("one", BF16, tile=(1, 1, 1))
    assert small_problems(tiny)[-1].k == 40  # no pipeline has 58112 stages


def test_batches_and_groups_are_small() -> None:
    for op, count in ((Op.BMM, "batch"), (Op.GROUPED_MM, "groups")):
        signature = replace(BF16, op=op)
        counts = {getattr(each, count) for each in small_problems(candidate("one", signature))}
        assert counts == {2 if op is Op.BMM else 3}
