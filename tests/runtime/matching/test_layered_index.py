"""What was shipped comes before what was compiled at run time, and the two can be told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from matching_headers import found, header, problem, reasons
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.matching.combined.layered_index import LayeredIndex
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Basis, BundleView
from synthetic_content import SIGNATURE
from synthetic_facts import B200, H200

FP32 = replace(SIGNATURE, out=DType.FP32)


@pytest.fixture
def layered() -> LayeredIndex:
    """Shipped: m 1 and 16. Kept: m 16 and 64, and another signature."""
    shipped = Index([BundleView(name="wheel", header=header(problem(1), problem(16)))], B200)
    views = [
        BundleView(name="kept", header=header(problem(16), problem(64), seed=1)),
        BundleView(name="other", header=header(problem(16, signature=FP32), seed=2)),
    ]
    return LayeredIndex(shipped, Index(views, B200, from_jit=True))


@pytest.mark.parametrize(
    ("m", "basis", "bundle", "from_jit"),
    [
        (1, Basis.DECLARED, "wheel", False),
        (16, Basis.DECLARED, "wheel", False),
        (64, Basis.DECLARED, "kept", True),
        (65, Basis.SIGNATURE, "wheel", False),
    ],
)
def test_declared_comes_before_known_and_shipped_before_kept(
    layered: LayeredIndex, m: int, basis: Basis, bundle: str, from_jit: bool
) -> None:
    match = found(layered.match(problem(m), 16))
    assert (match.basis, match.from_jit) == (basis, from_jit)
    assert {served.bundle.name for served in match.kernels} == {bundle}


def test_a_signature_that_only_the_cache_has_says_so(layered: LayeredIndex) -> None:
    match = found(layered.match(problem(17, signature=FP32), 16))
    assert (match.basis, match.from_jit) == (Basis.SIGNATURE, True)
    assert match.ranked_as == problem(16, signature=FP32)
    assert match.kernels[0].bundle.name == "other"


def test_a_miss_has_the_reasons_of_both(layered: LayeredIndex) -> None:
    unknown = problem(16, signature=replace(SIGNATURE, out=DType.FP16))
    assert "no bundled kernel computes" in reasons(layered.match(unknown, 16))
    shipped = Index([BundleView(name="wheel", header=header(problem(1)))], H200)
    kept = Index(
        [BundleView(name="kept", header=header(problem(2), seed=1))],
        H200,
        ["broken: [magic]"],
        from_jit=True,
    )
    said = reasons(LayeredIndex(shipped, kept).match(problem(1), 16))
    assert "no bundle serves this device" in said
    for name in ("wheel: ", "kept: ", "broken: [magic]"):
        assert name in said
