"""How a kernel's runtime changes with the sizes of a problem: by whole waves of its tiles.

A GPU runs a grid in waves of as many thread blocks as it has streaming multiprocessors, and a wave
that is nearly empty takes as long as a full one. That is what makes a kernel good at one size and
bad at the next. Measured on an H200 (`benchmarks/ranking.py`): scaling a near problem's times by
this halves what its order loses where autotuning picks among the first four.
"""

from __future__ import annotations

from ..bundle.format import KernelDesign
from ..gemm.problem import Problem


def waves(design: KernelDesign, problem: Problem, multiprocessors: int) -> int:
    """Waves that a kernel needs for a problem, with one thread block a multiprocessor.

    Args:
        design: Its tile and cluster.
        problem: Sizes of any signature; rows are taken to be shared out evenly among groups.
        multiprocessors: Streaming multiprocessors of the GPU.
    """
    blocks = (
        _blocks(
            -(-problem.m // problem.groups), design.tile[0], design.ctas_per_tile, design.cluster[0]
        )
        * _blocks(problem.n, design.tile[1], 1, design.cluster[1])
        * problem.batch
        * problem.groups
    )
    return -(-blocks // multiprocessors)


def _blocks(extent: int, tile: int, blocks_per_tile: int, cluster: int) -> int:
    """Thread blocks along one dimension; clusters are launched whole."""
    blocks = -(-extent // tile) * blocks_per_tile
    return -(-blocks // cluster) * cluster
