"""The manifests of tests/gpu: together they have every row of the support table."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from every_signature import EVERY_SIGNATURE
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_runtime.gemm.problem import Layout, Op, Signature
from nvgemm_runtime.gemm.support import unavailable
from repository import TESTS

DIRECTORY = TESTS / "gpu"


def declared(*names: str) -> set[Signature]:
    manifests = [load_manifest(DIRECTORY / f"{name}.yaml") for name in names]
    return {entry.problem.signature for manifest in manifests for entry in manifest.declared}


def rows(signatures: Iterable[Signature]) -> set[tuple[object, ...]]:
    """What a signature has in pairs and triples: all of it would be a thousand kernels."""
    found: set[tuple[object, ...]] = set()
    for one in signatures:
        found.add((one.op, one.a, one.scales, one.out))
        found.add((one.op, one.a, one.scales, one.layout))
        found.add((one.op, one.a, one.scales, one.epilogue))
    return found


def test_blackwell_has_every_row() -> None:
    there = declared("every_row_sm100", "int8_sm100", "gated")
    assert there <= set(EVERY_SIGNATURE)
    assert rows(EVERY_SIGNATURE) - rows(there) == set()


def test_hopper_has_every_signature_that_it_compiles() -> None:
    """Neither scales, groups nor epilogues but gates; types of 8 bits in tn alone."""
    gated = {one for one in EVERY_SIGNATURE if one.is_gated}
    assert rows(gated) - rows(declared("gated")) == set()
    compiled = {
        one
        for one in EVERY_SIGNATURE
        if (one.scales, one.epilogue) == (None, None) and one.op is not Op.GROUPED_MM
        if one.a.bits == 16 or one.layout is Layout.TN
    }
    assert declared("every_kind") == compiled
    available = {one for one in EVERY_SIGNATURE if unavailable(one, "sm_90a") is None}
    assert available == compiled | gated


@pytest.mark.parametrize(
    ("name", "arch"),
    [("every_kind", "sm_90a"), ("every_row_sm100", "sm_100f"), ("int8_sm100", "sm_100a")],
)
def test_each_is_for_one_target(name: str, arch: str) -> None:
    manifest = load_manifest(DIRECTORY / f"{name}.yaml")
    assert [target.target.arch for target in manifest.targets] == [arch]
    assert manifest.name == name.replace("_", "-")
