"""Bundles that know their winners, built without a GPU: on the CPU, by measurements made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cpu_provider
from made_rankings import GPU_A, GPU_B, entry, rankings
from nvgemm_aot.cli.build import documents
from nvgemm_aot.pipeline import target_plan
from nvgemm_aot.pipeline.pipeline import BuildResult, build, plan_build
from nvgemm_aot.providers import UNRECORDED_RECIPES, load_provider, recorded_recipes
from nvgemm_aot.rankings.entries import Entry, Rankings
from nvgemm_aot.rankings.usable import LEFT_UNDECIDED, RankingBasis, find_usable
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK, Ranking
from nvgemm_runtime.errors import RankingsError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from recording_kernels import Recording
from tuning_bench import PROBLEMS, Behaving, header_of, operators

SLOW_WINS = {"Cpu_1x1": 1000, "Cpu_16x16": 1300, "Cpu_8x32": 1500}
"""The estimate has Cpu_1x1 last, if at all."""


class Uncompilable(Behaving):
    """One does not compile."""

    name = "test_build_with_rankings:Uncompilable"
    behaviours = {"Cpu_1x1": "this is no C"}  # noqa: RUF012


def measured(times: dict[str, int], problem: Problem = PROBLEMS[0], **how: Any) -> Entry:
    """Measured as for the CPU's kernels of this machine."""
    provider = how.pop("of", Recording())
    facts = {
        "provider": provider.name,
        "toolchain": provider.toolchain(),
        "arch": "cpu",
        "product": cpu_provider.TARGET.device.driver_name,
    }
    return entry(times, problem=problem, **{**facts, **how})


def built(
    tmp_path: Path,
    cache: Cache,
    given: Rankings | None,
    *,
    candidates: int = 1,
    provider: Any = None,
    problems: tuple[Problem, ...] = PROBLEMS,
    **how: Any,
) -> BuildResult:
    declared = cpu_provider.manifest(problems, candidates=candidates)
    (tmp_path / "dist").mkdir(mode=0o755, exist_ok=True)
    return build(
        declared,
        tmp_path / "dist",
        cache,
        jobs=2,
        provider=provider or Recording(),
        rankings=given,
        **how,
    )


def ranking_of(header: Header, problem: Problem = PROBLEMS[0]) -> Ranking:
    (found,) = (one for one in header.rankings if one.problem == problem)
    return found


def orders(header: Header) -> list[list[str]]:
    return [operators(header, ranking) for ranking in header.rankings]


def test_a_winner_is_compiled_and_ranked_though_the_estimate_would_not_choose_it(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    (plain,) = built(tmp_path, kernel_cache, None).bundles
    estimated = orders(plain.header)
    assert all(order != ["Cpu_1x1"] for order in estimated)
    (bundle,) = built(tmp_path, kernel_cache, rankings(measured(SLOW_WINS))).bundles
    header = header_of(bundle.path)
    assert orders(header) == [["Cpu_1x1"], *estimated[1:]]
    ranking = ranking_of(header)
    source = header.sources[ranking.source]
    assert (source.kind, source.gpu) == ("measurement", cpu_provider.TARGET.device.driver_name)
    assert source.conditions is not None
    assert (source.conditions.launches, source.conditions.gpu_sha256) == (APART, GPU_A)
    assert ranking.kernels[0].time_ns == 1000
    assert ranking.measured is not None
    assert (ranking.measured.spreads_ns, ranking.measured.doubts) == ((1,), ())
    assert ranking.measured.standing == "measured once"
    assert all(one.measured is None for one in header.rankings[1:])


def test_what_was_measured_between_declared_m_is_in_the_bundle(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    between, below, above = (replace(PROBLEMS[0], m=m) for m in (12, 4, 64))
    other_n = replace(between, n=48)
    given = rankings(*(measured(SLOW_WINS, one) for one in (between, below, above, other_n)))
    result = built(tmp_path, kernel_cache, given)
    header = header_of(result.bundles[0].path)
    assert [one.problem for one in header.rankings] == sorted([*PROBLEMS, between])
    ranking = ranking_of(header, between)
    assert operators(header, ranking) == ["Cpu_1x1"], "as many as are declared at the m below"
    assert ranking.measured is not None
    assert not header.unserved
    assert [one.problem for one in header.rankings if not one.is_declared] == [between]
    document = documents.build_document(result)["bundles"][0]
    assert (document["problems"], document["not_declared"]) == (len(PROBLEMS), 1)
    assert f"{len(PROBLEMS)} problems and 1 measured and not declared" in documents.build_text(
        documents.build_document(result)
    )
    assert result.measured[0].standings == {between: "measured once"}
    again = built(tmp_path, kernel_cache, given)
    assert again.bundles[0].up_to_date
    changed = measured({**SLOW_WINS, "Cpu_1x1": 1001}, between)
    assert not built(tmp_path, kernel_cache, rankings(changed)).bundles[0].up_to_date
    gone = rankings(measured({"Cpu_3x3": 1000}, between))  # is no operator
    (plain,) = built(tmp_path, kernel_cache, gone).bundles
    assert [one.problem for one in plain.header.rankings] == list(PROBLEMS)


@pytest.mark.slow
def test_what_was_measured_between_and_does_not_compile_is_left_out(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    """Nobody declared it, so that is no error, and it is not among the unserved."""
    between = replace(PROBLEMS[0], m=12)
    provider = Uncompilable()
    given = rankings(measured({"Cpu_1x1": 1000}, between, of=provider))
    (bundle,) = built(tmp_path, kernel_cache, given, provider=provider).bundles
    assert between not in {one.problem for one in bundle.header.rankings}
    assert between not in bundle.header.unserved


def test_all_that_may_be_the_fastest_are_compiled_and_else_as_many_as_are_asked_for(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    close = {"Cpu_1x1": 1000, "Cpu_16x16": 1001, "Cpu_8x32": 1500}
    (bundle,) = built(tmp_path, kernel_cache, rankings(measured(close))).bundles
    assert orders(bundle.header)[0] == ["Cpu_1x1", "Cpu_16x16"]
    (bundle,) = built(tmp_path, kernel_cache, rankings(measured(SLOW_WINS)), candidates=2).bundles
    assert orders(bundle.header)[0] == ["Cpu_1x1", "Cpu_16x16"]


def test_two_gpus_that_agree_are_in_the_bundle(tmp_path: Path, kernel_cache: Cache) -> None:
    given = rankings(measured(SLOW_WINS), measured(SLOW_WINS, gpu=GPU_B, date="2026-11-22"))
    (bundle,) = (result := built(tmp_path, kernel_cache, given)).bundles
    found = ranking_of(header_of(bundle.path)).measured
    assert found is not None
    assert found.confirmed_by == (GPU_A, GPU_B)
    assert [one.standings for one in result.measured] == [{PROBLEMS[0]: "confirmed"}]


def test_what_one_gpu_repeated_is_in_the_bundle_unless_a_winner_is_missing(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    once = rankings(measured(SLOW_WINS))
    repeated = rankings(measured(SLOW_WINS, repeated=300))
    for given, seconds in ((once, None), (repeated, 300)):
        (bundle,) = (result := built(tmp_path, kernel_cache, given)).bundles
        assert not bundle.up_to_date, "it is part of the build's key"
        found = ranking_of(header_of(bundle.path)).measured
        assert found is not None
        assert found.repeated == seconds
    assert [one.standings for one in result.measured] == [{PROBLEMS[0]: "repeated"}]
    gone = rankings(measured({"Cpu_3x3": 900, **SLOW_WINS}, repeated=300))  # is no operator
    (bundle,) = built(tmp_path, kernel_cache, gone).bundles
    found = ranking_of(header_of(bundle.path)).measured
    assert found is not None
    assert found.repeated is None


def test_contradictions_are_doubts_of_the_bundle(tmp_path: Path, kernel_cache: Cache) -> None:
    other = {"Cpu_1x1": 1500, "Cpu_16x16": 1300, "Cpu_8x32": 1000}
    given = rankings(measured(SLOW_WINS), measured(other, gpu=GPU_B))
    (bundle,) = (result := built(tmp_path, kernel_cache, given)).bundles
    found = ranking_of(bundle.header).measured
    assert found is not None
    assert found.doubts[0].startswith("two runs disagree")
    assert [one.standings for one in result.measured] == [{PROBLEMS[0]: "doubtful"}]
    said = documents.build_text(documents.build_document(result, [Path("r.json")]))
    assert (
        "1 doubtful); by estimates: 2\nto see the doubts: nvgemm-aot rankings show shipped" in said
    )
    files = [Path("r.json"), Path("s t.json")]
    said = documents.build_text(documents.build_document(result, files))
    assert "nvgemm-aot rankings show shipped r.json 's t.json' --standing doubtful" in said
    (target,) = result.measured
    sure = replace(result, measured=(replace(target, standings={PROBLEMS[0]: "measured once"}),))
    said = documents.build_text(documents.build_document(sure, files))
    assert "to see the doubts" not in said


def test_the_build_key_covers_the_measurements_and_the_same_are_up_to_date(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    given = rankings(measured(SLOW_WINS))
    (first,) = built(tmp_path, kernel_cache, given).bundles
    data = first.path.read_bytes()
    (again,) = built(tmp_path, kernel_cache, given).bundles
    assert again.up_to_date
    slower = rankings(measured({**SLOW_WINS, "Cpu_8x32": 1501}))
    (other,) = built(tmp_path, kernel_cache, slower).bundles
    assert not other.up_to_date
    assert other.header.build_key != first.header.build_key
    built(tmp_path, kernel_cache, given)
    assert first.path.read_bytes() == data, "equal to the byte"
    unrelated = measured(SLOW_WINS, cpu_provider.problem(sizes=(64, 64, 64)))
    (plain,) = built(tmp_path, kernel_cache, rankings(unrelated)).bundles
    (bare,) = built(tmp_path, kernel_cache, None).bundles
    assert plain.header.build_key == bare.header.build_key


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"product": "NVIDIA H100"}, "1 measurement taken on NVIDIA H100, not used for"),
        ({"arch": "sm_90a"}, "1 measurement of sm_90a kernels, not used for cpu: measure"),
        ({"toolchain": {"a compiler": "9"}}, "3 times of kernels of recording_kernels:Recording"),
        ({"provider": "another"}, "3 times of kernels of another not used: this build has the"),
    ],
)
def test_what_does_not_fit_is_not_used_and_said(
    tmp_path: Path, kernel_cache: Cache, how: dict[str, Any], said: str
) -> None:
    (bare,) = built(tmp_path, kernel_cache, None).bundles
    result = built(tmp_path, kernel_cache, given := rankings(measured(SLOW_WINS, **how)))
    (note,) = result.measured[0].notes
    assert note.startswith(said)
    assert "; " in note or ": " in note
    assert result.bundles[0].header.build_key == bare.header.build_key
    with pytest.raises(RankingsError, match=r"none of the rankings fits the build \(--strict\): "):
        built(tmp_path, kernel_cache, given, strict=True)


def test_times_of_another_recipe_are_not_used_and_said(tmp_path: Path, kernel_cache: Cache) -> None:
    (bare,) = built(tmp_path, kernel_cache, None).bundles
    recipe = "recipe of recording_kernels:Recording"
    assert bare.header.toolchain[recipe] == Recording.recipe
    same = {**Recording().toolchain(), recipe: Recording.recipe}
    (used,) = built(tmp_path, kernel_cache, rankings(measured(SLOW_WINS, toolchain=same))).measured
    assert used.standings == {PROBLEMS[0]: "measured once"}
    given = rankings(measured(SLOW_WINS, toolchain={**same, recipe: "of last year"}))
    result = built(tmp_path, kernel_cache, given)
    (note,) = result.measured[0].notes
    said = f"measured with {recipe} of last year, this build has {Recording.recipe}; measure again"
    assert note.endswith(said), "a recipe is nothing to install"
    assert result.bundles[0].header.build_key == bare.header.build_key


@pytest.mark.parametrize(
    ("provider", "recipe", "is_used"),
    [
        ("cutlass_operators", UNRECORDED_RECIPES["cutlass_operators"], True),
        ("cutlass_operators", "2, host x86-64 +sse2", False),
        ("quack", "9", True),
    ],
)
def test_a_recipe_that_is_not_stated_is_the_first_of_cutlass_operators_or_unknown(
    provider: str, recipe: str, is_used: bool
) -> None:
    given = rankings(entry({"one": 1000}, provider=provider, toolchain={"compiler": "1"}))
    wanted = {provider: {"compiler": "1", f"recipe of {provider}": recipe}}
    basis = RankingBasis(arch="sm_90a", gpu="NVIDIA H200", toolchains=wanted)
    assert bool(find_usable(given, basis).problems) is is_used


def test_bundles_of_cutlass_operators_state_no_recipe_and_those_of_quack_do() -> None:
    both = load_provider("cutlass_operators+quack")
    recipe = load_provider("quack").recipe
    assert recorded_recipes(both, Target(arch="sm_90a")) == {"recipe of quack": recipe}
    for_arm = recorded_recipes(both, Target(arch="sm_90a", platform="linux_aarch64"))
    assert for_arm["recipe of quack"] == recipe.replace("host x86-64 +sse2", "host generic")
    assert for_arm["recipe of cutlass_operators"] == "1, host generic"


UNOFFERED = (
    "2 operators are not offered by this provider, recording_kernels:Recording, so their times are "
    "not used: measure a bundle of this build"
)


def test_operators_that_are_gone_are_not_used_and_said(tmp_path: Path, kernel_cache: Cache) -> None:
    gone = {"Cpu_old": 1000, "Cpu_older": 1300}
    (bare,) = built(tmp_path, kernel_cache, None).bundles
    given = rankings(measured(gone))
    for _ in range(2):  # the second time, the plan is the stored one
        result = built(tmp_path, kernel_cache, given)
        ((found,), (bundle,)) = result.measured, result.bundles
        assert (found.standings, found.notes) == ({}, (UNOFFERED,))
        assert orders(bundle.header) == orders(bare.header)
        with pytest.raises(RankingsError, match="2 operators are not offered by this provider"):
            built(tmp_path, kernel_cache, given, strict=True)
    some = rankings(measured({**gone, "Cpu_1x1": 1500}))
    (found,) = built(tmp_path, kernel_cache, some, strict=True).measured
    assert (found.standings, found.notes) == ({PROBLEMS[0]: "measured once"}, (UNOFFERED,))


@pytest.mark.parametrize("module", ["usable", "intervals"])
def test_plans_depend_on_what_makes_them_of_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    declared = cpu_provider.manifest(PROBLEMS, candidates=1).declared

    def key() -> str:
        cache = Cache(tmp_path / "cache")
        return target_plan.look_up_plan(declared, cpu_provider.TARGET, Recording(), cache).key

    before, digest = key(), target_plan.source_digest
    monkeypatch.setattr(
        target_plan,
        "source_digest",
        lambda name: "changed" if name == f"nvgemm_aot.rankings.{module}" else digest(name),
    )
    assert key() != before


def test_a_winner_of_another_toolchain_makes_the_others_uncertain(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    own = measured({"Cpu_16x16": 1300, "Cpu_8x32": 1301})
    other = measured({"Fast": 1000}, provider="another")
    mixed = replace(own, kernels=(*other.kernels, *own.kernels), aten=None)
    (bundle,) = built(tmp_path, kernel_cache, rankings(mixed), candidates=3).bundles
    found = ranking_of(bundle.header)
    assert operators(bundle.header, found) == ["Cpu_16x16", "Cpu_8x32"]
    assert found.measured is not None
    assert found.measured.doubts == (), "those left are known to be equal"
    apart = replace(
        mixed,
        kernels=tuple((one, replace(t, spread_ns=200)) for one, t in mixed.kernels),
    )
    (bundle,) = built(tmp_path, kernel_cache, rankings(apart), candidates=3).bundles
    found = ranking_of(bundle.header)
    assert found.measured is not None
    assert found.measured.doubts == (LEFT_UNDECIDED,)


@pytest.mark.usefixtures("compiled_here")
def test_a_winner_that_does_not_compile_is_left_out_and_the_ranking_says_what_is_missing(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    provider = Uncompilable()
    given = rankings(measured(SLOW_WINS, of=provider))
    (bundle,) = built(tmp_path, kernel_cache, given, candidates=2, provider=provider).bundles
    found = ranking_of(bundle.header)
    assert operators(bundle.header, found) == ["Cpu_16x16"]
    assert [bundle.header.failures[place].operator for place in found.missing] == ["Cpu_1x1"]


def test_apart_is_preferred_to_back_to_back_and_the_newer_counts(
    tmp_path: Path, kernel_cache: Cache
) -> None:
    flattering = {"Cpu_16x16": 500, "Cpu_1x1": 900}
    given = rankings(
        measured(SLOW_WINS),
        measured(flattering, launches=BACK_TO_BACK, date="2026-12-01"),
    )
    (bundle,) = built(tmp_path, kernel_cache, given).bundles
    assert orders(bundle.header)[0] == ["Cpu_1x1"]


def test_prune_keeps_only_kernels_that_win_somewhere(tmp_path: Path, kernel_cache: Cache) -> None:
    by_problem = (
        measured({"Cpu_8x32": 1000, "Cpu_16x16": 1300, "Cpu_1x1": 1500}, PROBLEMS[0]),
        measured({"Cpu_16x16": 1000, "Cpu_8x32": 1300, "Cpu_1x1": 1500}, PROBLEMS[1], aten=900),
        measured({"Cpu_8x32": 1000, "Cpu_16x16": 1300, "Cpu_1x1": 1500}, PROBLEMS[2]),
    )
    given = rankings(*by_problem)
    (whole,) = built(tmp_path, kernel_cache, given, candidates=3).bundles
    assert len(whole.header.kernels) == 3
    (pruned,) = built(tmp_path, kernel_cache, given, candidates=3, prunes=True).bundles
    header = header_of(pruned.path)
    # Cpu_1x1 alone takes operands of any alignment, which the bundle still serves.
    assert orders(header) == [["Cpu_8x32", "Cpu_1x1"]] * 3
    aten_won = ranking_of(header, PROBLEMS[1]).measured
    assert aten_won is not None
    assert aten_won.aten is not None
    assert (aten_won.aten.time_ns, aten_won.spreads_ns) == (900, (1, 1))
    assert header.build_key != whole.header.build_key
    some = rankings(by_problem[0])
    (mixed,) = built(tmp_path, kernel_cache, some, candidates=3, prunes=True).bundles
    assert len(mixed.header.kernels) == 3, "estimates keep all that they rank"


def test_a_plan_shows_the_measured_times(tmp_path: Path, kernel_cache: Cache) -> None:
    (item,) = plan_build(
        cpu_provider.manifest(PROBLEMS, candidates=1),
        kernel_cache,
        provider=Recording(),
        rankings=rankings(measured(SLOW_WINS)),
    )
    ((position, time_ns),) = item.plan.problems[0].choices
    assert (item.plan.candidates[position].operator, time_ns) == ("Cpu_1x1", 1000)
    document = documents.plan_document([item], 1, [tmp_path / "r.json"])
    assert [one["times"] for one in document["targets"][0]["problems"]] == [
        "measured",
        "estimated",
        "estimated",
    ]
    text = documents.plan_text(document)
    assert "problem                              candidates  best time, us  basis" in text
    said = "measurements: 1 (1 from your files: 1 measured once); by estimates: 2"
    assert f"cpu: problems ranked by {said}" in text


def test_what_the_build_prints_of_measurements() -> None:
    document = {
        "bundles": [],
        "compiled": 0,
        "removed": [],
        "unserved": [],
        "measured": [
            {
                "arch": "sm_90a",
                "target": "sm_90a-linux_x86_64-cu13",
                "problems": {"confirmed": 2, "measured once": 1},
                "shipped": 2,
                "own": 1,
                "estimated": 4,
                "notes": ["3 times …"],
            },
            {
                "arch": "sm_90a",
                "target": "sm_90a-linux_x86_64-cu12",
                "problems": {},
                "shipped": 0,
                "own": 0,
                "estimated": 7,
                "notes": [],
            },
        ],
    }
    text = documents.build_text(json.loads(json.dumps(document)))
    said = "3 (2 shipped, 1 from your files: 2 confirmed, 1 measured once); by estimates: 4"
    assert f"sm_90a: problems ranked by measurements: {said}\n  3 times …" in text
    said = "problems ranked by measurements: 0; by estimates: 7"
    assert f"sm_90a-linux_x86_64-cu12: {said}" in text
