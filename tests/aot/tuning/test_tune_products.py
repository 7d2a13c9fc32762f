"""Tuning on one GPU product leaves the rankings for others alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuner import Tuner

from nvgemm_aot.bundle.content import BundleContent, read_content
from nvgemm_aot.cli.rankings.tune import tuned_document, tuned_text
from nvgemm_aot.rankings.export import export
from nvgemm_aot.tuning.measuring.grid import Grid
from nvgemm_aot.tuning.rewrite import rankings_to_measure
from nvgemm_aot.tuning.state.journal import state_path
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import ESTIMATE, MEASUREMENT, Ranking
from nvgemm_runtime.bundle.reader import Bundle
from tuning_bench import PROBLEMS, SLOW_FIRST, Bench, bench, header_of, operators

HERE = bench().facts.name
OTHER = "another CPU"

OTHER_ORDER = {**SLOW_FIRST, "Cpu_16x16": [100.0], "Cpu_8x32": [400.0]}


def on_other(tuner: Tuner) -> Bench:
    return bench(tuner.timer, facts=replace(bench().facts, name=OTHER))


def of(header: Header, gpu: str) -> list[Ranking]:
    return [one for one in header.rankings if header.gpu_of(one) == gpu]


def facts_of(header: Header, gpu: str) -> list[object]:
    """All of a product's rankings, by the names of their kernels."""
    return [
        (
            one.problem,
            operators(header, one),
            [place.time_ns for place in one.kernels],
            one.measured,
            one.is_declared,
            header.sources[one.source],
        )
        for one in of(header, gpu)
    ]


def for_both(tuner: Tuner, keep: slice = slice(None)) -> Path:
    """The tunable bundle with estimates for the other product too, of some kernels."""

    def make(content: BundleContent) -> BundleContent:
        further = tuple(
            replace(
                one,
                source=replace(one.source, gpu=OTHER),
                kernels=one.kernels[keep],
                is_further=True,
            )
            for one in content.rankings
        )
        return replace(content, rankings=(*content.rankings, *further), further_devices=("x",))

    return tuner.change(make).rename(tuner.beside("both.nvgemm"))


def test_a_product_that_the_bundle_does_not_list_gets_rankings_of_its_own(tuner: Tuner) -> None:
    before = facts_of(header_of(tuner.tunable), HERE)
    tuner.timer.times = SLOW_FIRST
    tuned = tuner(on=on_other(tuner))
    header = tuner.header
    assert header.products == (HERE, OTHER)
    assert facts_of(header, HERE) == before
    added = of(header, OTHER)
    assert [one.problem for one in added] == sorted(PROBLEMS)
    assert all(one.is_further and one.measured is not None for one in added)
    assert {operators(header, one)[0] for one in added} == {"Cpu_8x32"}
    document = tuned_document(tuned)
    assert (document["gpu"], document["products"]) == (OTHER, [HERE, OTHER])
    assert document["standings"] == {"measured once": 3}
    assert f"ranked for {OTHER}, with unchanged rankings for {HERE}" in tuned_text(document)


def test_the_second_products_run_keeps_the_first_ones_measurements(tuner: Tuner) -> None:
    tuner.timer.times = SLOW_FIRST
    tuner()
    first = facts_of(tuner.header, HERE)
    tuner.timer.times = OTHER_ORDER
    second = tuner.beside("second.nvgemm")
    tuner(tuner.path, second, on=on_other(tuner))
    header = header_of(second)
    assert facts_of(header, HERE) == first
    assert {operators(header, one)[0] for one in of(header, OTHER)} == {"Cpu_16x16"}
    tuner.timer.times = SLOW_FIRST
    third = tuner.beside("third.nvgemm")
    tuner(second, third)
    again = header_of(third)
    assert facts_of(again, OTHER) == facts_of(header, OTHER)
    assert all(one.measured is not None and not one.is_further for one in of(again, HERE))


def test_a_listed_product_measures_the_kernels_of_all_rankings(tuner: Tuner) -> None:
    bundle = for_both(tuner, slice(1))
    with Bundle(bundle) as opened:
        content = read_content(opened)
    for gpu, own in ((HERE, 3), (OTHER, 1)):
        for one in rankings_to_measure(content, gpu):
            assert one.gpu == gpu
            assert len({id_ for id_, _ in one.kernels}) == 3
            assert one.is_further == (gpu == OTHER)
            assert [time for _, time in one.kernels[own:]] == [None] * (3 - own)
    tuner.timer.times = SLOW_FIRST
    tuner(bundle, on=on_other(tuner))
    header = tuner.header
    assert {len(one.kernels) for one in of(header, OTHER)} == {3}
    assert {header.sources[one.source].kind for one in of(header, HERE)} == {ESTIMATE}
    assert {header.sources[one.source].kind for one in of(header, OTHER)} == {MEASUREMENT}


def test_what_is_not_measured_keeps_its_ranking(tuner: Tuner) -> None:
    bundle = for_both(tuner, slice(1))
    before = header_of(bundle)
    tuner(bundle, on=on_other(tuner), budget_s=0.0)
    for gpu in (HERE, OTHER):
        assert facts_of(tuner.header, gpu) == facts_of(before, gpu)
    tuner.path.unlink()
    state_path(tuner.path).unlink(missing_ok=True)
    tuner(on=on_other(tuner), budget_s=0.0)
    assert tuner.header.products == (HERE,), "nothing was measured for the other"


def test_sizes_between_declared_ones_are_added_for_the_product_alone(tuner: Tuner) -> None:
    problems = [replace(PROBLEMS[0], m=m) for m in (4, 16)]
    bundle = tuner.build(problems)
    tuner.timer.times = SLOW_FIRST
    tuner(bundle, on=on_other(tuner), grid=Grid.STEPS)
    header = tuner.header
    assert [one.problem.m for one in of(header, HERE)] == [4, 16]
    beside = [one for one in of(header, OTHER) if not one.is_declared]
    assert [one.problem.m for one in beside] == [8]
    assert (header.declared_count, header.undeclared_count) == (2, 1)


def test_a_kernel_that_is_wrong_on_one_product_is_thrown_out_for_all(tuner: Tuner) -> None:
    tuner.timer.times = SLOW_FIRST
    tuner()
    second = tuner.beside("second.nvgemm")
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": []}
    with pytest.raises(Exception, match="leaves the GPU unusable"):
        tuner(tuner.path, second, on=on_other(tuner))
    tuner(tuner.path, second, on=on_other(tuner))
    header = header_of(second)
    assert "Cpu_8x32" not in {kernel.operator for kernel in header.kernels}
    for gpu in (HERE, OTHER):
        assert {len(one.kernels) for one in of(header, gpu)} == {2}


def test_measurements_of_both_products_are_taken_from_one_bundle(tuner: Tuner) -> None:
    tuner.timer.times = SLOW_FIRST
    tuner()
    second = tuner.beside("second.nvgemm")
    tuner(tuner.path, second, on=on_other(tuner))
    found = export([header_of(second)])
    assert [(entry.problem, entry.origin.gpu) for entry in found.entries] == [
        (problem, gpu) for problem in sorted(PROBLEMS) for gpu in sorted((OTHER, HERE))
    ]
