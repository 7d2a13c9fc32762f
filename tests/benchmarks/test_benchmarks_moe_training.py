"""benchmarks/moe/training: its forms train alike, and its manifest declares their products."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from benchmarks.moe import training
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import Op
from repository import ROOT

SIZE = training.Size(
    layers=1, dim=32, heads=2, experts=4, chosen=2, hidden=16, vocabulary=16, batch=4, length=16
)


@pytest.fixture(scope="module")
def curves() -> dict[str, Any]:
    with warnings.catch_warnings():  # no kernel serves here, which is said once
        warnings.simplefilter("ignore")
        return {
            way: training.train(way, 12, SIZE, "cpu")
            for way in training.WAYS
            if training.COMPILED not in way
        }


def test_every_way_learns_as_fp32_does(curves: dict[str, Any]) -> None:
    exact = curves[training.EXACT]["losses"]
    assert exact[-1] < exact[0]
    for way, found in curves.items():
        assert training.distance(found["losses"], exact) < 0.02, way
        assert (found["losses"] == exact) is (way == training.EXACT)


def test_text_is_the_same_each_time_and_can_be_learned() -> None:
    once, again = ([*training.batches(SIZE, 2, "cpu")] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again))
    assert not torch.equal(*once)
    follows: dict[tuple[int, int], list[int]] = {}
    for row in torch.cat(once).tolist():
        for first, second, third in zip(row, row[1:], row[2:]):
            follows.setdefault((second, first % 4), []).append(third)
    likeliest = sum(max(map(found.count, found)) for found in follows.values())
    assert likeliest / sum(map(len, follows.values())) > 1 - 2 * training.NOISE


def test_routing_sends_each_row_to_the_expert_that_was_chosen() -> None:
    torch.manual_seed(0)
    layer = training.Layer(SIZE, training.exactly)
    tokens = torch.randn(10, SIZE.dim)
    rows = training.rows_of(layer.route(tokens), SIZE.experts)
    likely = layer.router(tokens).softmax(-1)
    begin = 0
    for expert, end in enumerate(rows.ends.tolist()):
        for token in rows.tokens[begin:end].tolist():
            assert expert in likely[token].topk(SIZE.chosen).indices
        begin = end
    assert begin == 10 * SIZE.chosen
    sums = torch.zeros(10).index_add_(0, rows.tokens, rows.weights)
    torch.testing.assert_close(sums, torch.ones(10))


def test_the_table_has_a_row_for_each_way(curves: dict[str, Any]) -> None:
    head, *rows = training.table(curves)
    assert [row[:20].strip() for row in rows] == [*curves]
    assert "from fp32" in head
    assert f"{curves['torch']['losses'][-1]:.4f}" in rows[1]
    without = [*training.table({"torch": curves["torch"]})]
    assert len(without) == 2


def test_the_manifest_declares_the_products() -> None:
    size, rows = training.Size(), 8192 * 4
    assert rows == size.batch * size.length * size.chosen
    declared = load_manifest(ROOT / "benchmarks/moe/training.yaml").declared
    signatures = [(one.problem.signature, one.problem) for one in declared]
    found = {(of.op, one.m, one.n, one.k) for of, one in signatures}
    gated = {(of.epilogue, one.n, one.k) for of, one in signatures if of.epilogue is not None}
    both, dim, hidden = 2 * size.hidden, size.dim, size.hidden
    assert found == {
        (Op.GROUPED_MM, rows, both, dim),
        (Op.GROUPED_MM, rows, dim, hidden),
        (Op.GROUPED_MM, rows, dim, both),
        (Op.GROUPED_MM, rows, hidden, dim),
        (Op.K_GROUPED_MM, both, dim, rows),
        (Op.K_GROUPED_MM, dim, hidden, rows),
        (Op.GATHERED_GROUPED_MM, rows, both, dim),
        (Op.GATHERED_MM, rows // size.chosen, dim, size.chosen),
        (Op.GATHERED_MM, rows, dim, 1),
        (Op.GATHERED_MM, rows, hidden, 1),
    }
    assert gated == {
        (Epilogue.parse("swiglu_halves_kept"), both, dim),
        (Epilogue.parse("swiglu_halves_gradient"), hidden, dim),
        (Epilogue.parse("swiglu_halves_gradient_sums"), hidden, dim),
    }
    groups = {one.problem.groups for one in declared if one.problem.signature.op.has_groups}
    assert groups == {size.experts}
