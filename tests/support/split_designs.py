"""A few designs of quack that split k, and one that does not, as all that the provider lists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvgemm_aot.providers import Enumeration
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime.gemm.problem import Signature

LISTED = tuple(
    f"quack.GemmDefaultSm90_cooperative_cluster1x1x1_tile64x16x128_swap_ab{split}"
    for split in ("", "_split_k4_serial", "_split_k4_parallel")
)
"""One whose sums are whole, one that adds parts in order, and one that adds them in any order."""


def list_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the provider list `LISTED` alone, which a build of 8 candidates keeps."""
    enumerate_all = Quack.enumerate

    def enumerate_few(self: Quack, signature: Signature, target: BuildTarget) -> Enumeration:
        found = enumerate_all(self, signature, target)
        few = tuple(one for one in found.candidates if one.operator in LISTED)
        assert len(few) == len(LISTED)
        return replace(found, candidates=few)

    monkeypatch.setattr(Quack, "enumerate", enumerate_few)
