"""A few designs of quack whose thread blocks share memory, and one where they do not, as all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvgemm_aot.providers import Enumeration
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime.gemm.problem import Signature

LISTED = (
    *(
        f"quack.GemmDefaultSm90_cooperative_cluster1x1x1_tile64x16x128_swap_ab{split}"
        for split in ("", "_split_k4_serial", "_split_k4_parallel")
    ),
    "quack.GemmDefaultSm90_pingpong_dynamic_cluster2x1x1_tile128x192x64",
)
"""One whose sums are whole, one that adds parts in order, one that adds them in any order, and one
whose tiles are handed out by a counter."""


def list_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the provider list `LISTED` alone, which a build of 8 candidates keeps."""
    list_only(monkeypatch, LISTED)


def list_only(monkeypatch: pytest.MonkeyPatch, operators: tuple[str, ...]) -> None:
    """Have the provider list operators of these names alone."""
    enumerate_all = Quack.enumerate

    def enumerate_few(self: Quack, signature: Signature, target: BuildTarget) -> Enumeration:
        found = enumerate_all(self, signature, target)
        few = tuple(one for one in found.candidates if one.operator in operators)
        assert len(few) == len(operators)
        return replace(found, candidates=few)

    monkeypatch.setattr(Quack, "enumerate", enumerate_few)
