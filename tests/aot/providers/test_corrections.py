"""Corrections of estimates: what they apply to, and what they make of a model's answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.resources import files

import pytest

from fake_provider import FakeProvider, candidate
from nvgemm_aot.manifest.parse import Declared
from nvgemm_aot.pipeline.target_plan import look_up_plan, make_plan
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.heuristics.corrections import (
    DATA,
    KNOTS,
    Correction,
    feature_rows,
    load_correction,
    read_correction,
)
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import Problem, Signature

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
SM_COUNT = 132
CORRECTIONS = json.loads(
    (files("nvgemm_aot.providers.heuristics") / DATA).read_text(encoding="utf-8")
)["corrections"]


def problem(m: int = 1024) -> Problem:
    return Problem(signature=SIGNATURE, m=m, n=4096, k=4096)


def correction(**weights: float) -> Correction:
    """One that applies to the fake provider, with weights by feature and knot: ``work_16=1``."""
    return Correction(
        arch="sm_90a",
        model="m",
        providers=(FakeProvider.name,),
        source="a test",
        weights={
            f"{name.rpartition('_')[0].replace('_', ' ')}, m {name.rpartition('_')[2]}": weight
            for name, weight in weights.items()
        },
    )


OFFERED = (
    candidate("plain", SIGNATURE, tile=(128, 128, 64)),
    candidate("swapped", SIGNATURE, tile=(16, 64, 64), swapped=True),
)


def test_without_weights_estimates_stay() -> None:
    assert correction().corrected(problem(), OFFERED, [1000, 2000], SM_COUNT) == [1000, 2000]


def test_a_weight_applies_to_its_family_and_number_of_rows() -> None:
    key = f"family {FakeProvider.name} swapped"
    for m, factor in ((16, 2.0), (1, 2.0), (128, 1.0), (8192, 1.0), (45, 2.0**0.5)):
        found = replace(correction(), weights={f"{key}, m 16": 0.6931471805599453}).corrected(
            problem(m), OFFERED, [1000, 2000], SM_COUNT
        )
        assert found == [1000, pytest.approx(2000 * factor, rel=0.01)]


def test_traits_tell_families_apart() -> None:
    special = replace(OFFERED[0], traits=("pingpong",))
    weights = {f"family {FakeProvider.name} pingpong, m 1024": 1.0}
    found = replace(correction(), weights=weights).corrected(
        problem(), (special, OFFERED[0]), [1000, 1000], SM_COUNT
    )
    assert found == [2718, 1000]


def test_a_missing_answer_is_replaced_by_the_work_that_others_suggest() -> None:
    tiles = [candidate(name, SIGNATURE, tile=(128, 128, 64)) for name in "ab"]
    assert correction().corrected(problem(), tiles, [7000, None], SM_COUNT) == [7000, 7000]
    large = candidate("large", SIGNATURE, tile=(128, 256, 64))
    known, guessed = correction().corrected(problem(8192), [*tiles[:1], large], [7000, None], 132)
    assert known == 7000
    assert guessed is not None
    assert 6000 < guessed < 8500


def test_a_model_without_any_answer_is_not_corrected() -> None:
    weights = correction(constant_1024=5)
    assert weights.corrected(problem(), OFFERED, [None, None], SM_COUNT) == [None, None]


def test_a_correction_is_bounded() -> None:
    most = correction(constant_1024=50).corrected(problem(), OFFERED, [1000, 1000], SM_COUNT)
    least = correction(constant_1024=-50).corrected(problem(), OFFERED, [1000, 1000], SM_COUNT)
    assert (most, least) == ([20000, 20000], [50, 50])


def test_a_bound_on_all_hides_no_difference_between_them() -> None:
    weights = correction(constant_1024=50).weights
    apart = {**weights, f"family {FakeProvider.name} swapped, m 1024": 0.5}
    found = replace(correction(), weights=apart).corrected(
        problem(), OFFERED, [1000, 1000], SM_COUNT
    )
    assert found[0] is not None
    assert found[1] == pytest.approx(found[0] * 2.718**0.5, rel=0.01)


def test_more_splits_of_k_mean_less_work_for_each() -> None:
    """A tile of which few cover the problem leaves most of the GPU idle, unless k is split."""
    one = candidate("one", SIGNATURE, tile=(128, 128, 64))
    split = replace(one, operator="split", block_shape=replace(one.block_shape, splits=4))
    rows = feature_rows(problem(128), (one, split), [1000, 1000], SM_COUNT)
    assert rows is not None
    whole, parted = (dict(row.features) for row in rows)
    assert whole["idle, m 128"] > parted.get("idle, m 128", 0.0)
    assert whole["work, m 128"] > parted["work, m 128"]
    assert "splits, m 128" in parted


def test_parts_that_are_added_in_any_order_have_weights_of_their_own() -> None:
    one = candidate("one", SIGNATURE, tile=(128, 128, 64))
    ordered = replace(one, operator="in order", block_shape=replace(one.block_shape, splits=4))
    at_once = replace(ordered, operator="at once", is_deterministic=False)
    weights = {"any order, m 128": -0.5, "any order, splits, m 128": -0.1}
    times = replace(correction(), weights=weights).corrected(
        problem(128), (one, ordered, at_once), [1000, 1000, 1000], SM_COUNT
    )
    assert times[:2] == [1000, 1000]
    assert times[2] == pytest.approx(1000 * math.exp(-0.5 - 0.1 * math.log(4)), rel=0.01)


@pytest.mark.parametrize("m", [1, 16, 40, 128, 500, 1024, 9000])
def test_shares_of_the_knots_add_up(m: int) -> None:
    rows = feature_rows(problem(m), OFFERED, [1000, 2000], SM_COUNT)
    assert rows is not None
    for row in rows:
        shares = [share for name, share in row.features if name.startswith("constant")]
        assert sum(shares) == pytest.approx(1)
        assert 1 <= len(shares) <= 2


@pytest.mark.parametrize("entry", CORRECTIONS, ids=lambda one: one["arch"])
def test_shipped_corrections_are_whole_and_better_than_the_model(entry: dict[str, object]) -> None:
    shipped = read_correction(entry)
    assert load_correction(shipped.arch, shipped.model) == shipped
    assert shipped.model == load_provider("quack").runtime_model(build_target(shipped.arch)).name
    assert shipped.source
    assert shipped.providers == ("quack",)
    assert {name.rpartition(", m ")[2] for name in shipped.weights} == {str(k) for k in KNOTS}
    judged = entry["judged"]
    assert isinstance(judged, dict)
    for before, after in (judged["first"], judged["best_of_four"]):
        assert after < before


def rankings(providers: str, cache: Cache) -> tuple[str, list[list[str]]]:
    target, provider = build_target("sm_90a"), load_provider(providers)
    declared = tuple(Declared(problem=problem(m), candidates=4) for m in (16, 512, 4096))
    plan = make_plan(look_up_plan(declared, target, provider, cache), cache)
    return plan.source.by, [
        [plan.candidates[place].operator for place, _ in one.choices] for one in plan.problems
    ]


def test_plans_say_whether_they_are_corrected(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of cutlass.operators alone are not, nor do their rankings change."""
    alone = rankings("cutlass_operators", Cache(tmp_path_factory.mktemp("a")))
    both = rankings("cutlass_operators+quack", Cache(tmp_path_factory.mktemp("b")))
    assert "corrected" not in alone[0]
    assert both[0].startswith(f"{alone[0]}, corrected by NVIDIA H200")
    monkeypatch.setattr("nvgemm_aot.pipeline.target_plan.find_correction", lambda *_: None)
    assert rankings("cutlass_operators", Cache(tmp_path_factory.mktemp("c"))) == alone
    uncorrected = rankings("cutlass_operators+quack", Cache(tmp_path_factory.mktemp("d")))
    assert uncorrected[0] == alone[0]
    assert uncorrected[1] != both[1]


def test_a_stored_plan_is_not_used_with_another_correction(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path_factory.mktemp("cache"))
    before = rankings("quack", cache)
    monkeypatch.setattr("nvgemm_aot.pipeline.target_plan.find_correction", lambda *_: None)
    assert rankings("quack", cache) != before
