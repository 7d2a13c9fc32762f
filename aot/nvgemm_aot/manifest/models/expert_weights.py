"""Layouts of routed expert weights in libraries, which determine their products."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import replace

from nvgemm_runtime.gemm.problem import Layout

from .gemm import ModelGemm, Projection


class ExpertWeights(str, enum.Enum):
    """Library that holds the expert weights.

    transformers joins gate and up in one weight; gpt-oss stores it as [in features, out features].
    torchtitan (0.3) has two weights, except one for gpt-oss, and stores all as [out features, in
    features].
    """

    TRANSFORMERS = "transformers"
    TORCHTITAN = "torchtitan"


def in_library_layout(
    weights: ExpertWeights, projections: Iterable[Projection]
) -> Iterator[Projection]:
    """Converts routed experts, which families yield in transformers' layout, to a library's."""
    for projection in projections:
        is_routed = isinstance(projection, ModelGemm) and projection.routing is not None
        if weights is ExpertWeights.TORCHTITAN and is_routed:
            assert isinstance(projection, ModelGemm)
            yield from _as_torchtitan_has(projection)
        else:
            yield projection


def _as_torchtitan_has(gemm: ModelGemm) -> Iterator[ModelGemm]:
    if gemm.layout is Layout.TT:
        yield replace(gemm, layout=Layout.TN)
    elif gemm.role.endswith("gate_up_proj"):
        for part in ("gate_proj", "up_proj"):
            is_up = part == "up_proj"
            yield replace(
                gemm,
                role=gemm.role.removesuffix("gate_up_proj") + part,
                n=gemm.n // 2,
                gated=None,
                multiplying_gate=gemm.gated if is_up else None,
                is_read_by_gate=gemm.gated is not None and not is_up,
                shares_input=is_up,
            )
    else:
        yield gemm
