from __future__ import annotations

import pytest

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.matching.waves import waves

MM = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
BMM = Signature.parse("bmm/tn/bf16xbf16/fp32/bf16")


def design(
    tile: tuple[int, int] = (128, 128), cluster: tuple[int, int] = (1, 1), ctas_per_tile: int = 1
) -> KernelDesign:
    return KernelDesign(
        tile=(*tile, 64),
        ctas_per_tile=ctas_per_tile,
        cluster=cluster,
        fallback_cluster=None,
        scheduler="static_persistent",
    )


@pytest.mark.parametrize(
    ("made", "sizes", "expected"),
    [
        (design(), (128 * 10, 128 * 10), 1),  # 100 blocks of 100
        (design(), (128 * 10 + 1, 128 * 10), 2),  # 110
        (design((64, 256)), (1, 1), 1),
        (design((64, 256)), (6400, 256 * 3), 3),
        (design(cluster=(2, 1)), (128 * 9, 128 * 10), 1),  # 9 rows of blocks, launched as 10
        (design(cluster=(2, 1)), (128 * 10, 128 * 11), 2),
        (design(cluster=(1, 4)), (128 * 10, 128 * 9), 2),  # 9 columns of blocks, launched as 12
        (design((256, 128), (2, 1), 2), (256 * 5, 128 * 10), 1),  # two blocks a tile
        (design((256, 128), (2, 1), 2), (256 * 5 + 1, 128 * 10), 2),
    ],
)
def test_clusters_and_waves_are_counted_whole(
    made: KernelDesign, sizes: tuple[int, int], expected: int
) -> None:
    assert waves(made, Problem(signature=MM, m=sizes[0], n=sizes[1], k=64), 100) == expected


def test_each_of_a_batch_has_its_own_tiles() -> None:
    problem = Problem(signature=BMM, m=1, n=128, k=64, batch=101)
    assert waves(design(), problem, 100) == 2


def test_each_group_has_its_share_of_rows_in_tiles_of_its_own() -> None:
    signature = Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16")
    problem = Problem(signature=signature, m=129 * 50, n=128, k=64, groups=50)
    assert waves(design(), problem, 100) == 1  # two tiles for 129 rows, 50 times
    assert waves(design(), problem, 99) == 2
