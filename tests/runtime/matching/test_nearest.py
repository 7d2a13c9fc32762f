from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.matching.nearest import NearestSizes

SIGNATURE = Signature.parse("bmm/tn/bf16xbf16/fp32/bf16")


def problem(m: int, n: int, k: int, batch: int = 1) -> Problem:
    return Problem(signature=SIGNATURE, m=m, n=n, k=k, batch=batch)


def by_definition(declared: list[Problem], asked: Problem) -> Problem:
    def far(one: int, other: int) -> float:
        return abs(math.log2(one) - math.log2(other))

    return min(
        declared,
        key=lambda p: (
            far(p.n, asked.n) + far(p.k, asked.k) + far(p.batch, asked.batch),
            (p.n, p.k, p.batch),
            max(p.m, asked.m) / min(p.m, asked.m),
            p.m,
        ),
    )


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("count", [1, 8, 9, 500])
def test_finds_what_the_definition_says(count: int, powers_of_two: bool) -> None:
    source = random.Random(count)

    def size() -> int:
        return 2 ** source.randrange(15) if powers_of_two else source.randrange(1, 30000)

    def some() -> Problem:
        return problem(size(), size(), size(), 2 ** source.randrange(4))

    declared = list({some() for _ in range(count)})
    sizes = NearestSizes((p, p) for p in declared)
    for asked in [*declared[:50], *(some() for _ in range(100))]:
        assert sizes.around(asked).nearest == by_definition(declared, asked)


def test_groups_count_as_a_batch_does() -> None:
    signature = Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16")
    few, many = (
        Problem(signature=signature, m=512, n=512, k=512, groups=groups) for groups in (8, 128)
    )
    sizes = NearestSizes((p, p) for p in (few, many))
    assert sizes.around(replace(few, m=64, groups=16)).nearest == few
    assert sizes.around(replace(few, m=64, groups=64)).nearest == many
