"""Rankings for several GPU products in one bundle: how they are written, read and left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_bundle import header_of, with_header

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking, read_content
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle import decode
from nvgemm_runtime.bundle.format import DEVICE_RANKING, KNOWN_FEATURES
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError
from synthetic_content import synthetic_content

FIRST, SECOND = "NVIDIA B200", "NVIDIA B300 SXM6 AC"

Edit = Callable[[Any], object]


def of_second(ranking: ProblemRanking) -> ProblemRanking:
    """The same order in reverse, as of another product."""
    source = replace(ranking.source, gpu=SECOND)
    kernels = tuple((id_, None) for id_, _ in ranking.kernels[::-1])
    if ranking.measured is not None:
        kernels = tuple(zip((id_ for id_, _ in kernels), (t for _, t in ranking.kernels)))
    return replace(ranking, source=source, kernels=kernels, is_further=True)


def for_two() -> BundleContent:
    one = synthetic_content(kernels=4, problems=4)
    further = tuple(map(of_second, one.rankings))
    return replace(one, rankings=(*further, *one.rankings), further_devices=("B300",))


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def edited(path: Path, edit: Edit) -> Path:
    data = encode_bundle(for_two())[0]
    document = header_of(data)
    edit(document)
    return written(path, with_header(data, document))


def test_what_is_written_for_two_products_is_read_back(tmp_path: Path) -> None:
    data, header = encode_bundle(for_two())
    with Bundle(written(tmp_path / "two.nvgemm", data)) as bundle:
        assert bundle.header == header
        assert encode_bundle(read_content(bundle))[0] == data
    assert header.devices == ("B200", "B300")
    assert header.products == (FIRST, SECOND)
    assert (header.declared_count, header.undeclared_count) == (4, 0)
    for gpu in (FIRST, SECOND):
        chosen = header.rankings_on(gpu)
        assert len(chosen) == 4
        assert {header.gpu_of(one) for one in chosen} == {gpu}


def test_a_bundle_for_one_product_has_nothing_new() -> None:
    data, header = encode_bundle(synthetic_content(kernels=4, problems=4))
    document = header_of(data)
    assert document.keys() == {
        *("target", "device", "generator", "build_key", "toolchain", "body_sha256", "dictionary"),
        *("kernels", "sources", "rankings", "imports"),
    }
    known = {"problem", "source", "kernels", "measured"}
    assert all(one.keys() <= known for one in document["rankings"])
    assert [one["problem"] for one in document["rankings"]] == [
        one.problem.key for one in header.rankings
    ]


def test_a_release_that_knows_no_products_uses_the_first_ones_rankings_and_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "KNOWN_FEATURES", KNOWN_FEATURES - {DEVICE_RANKING})
    alone = encode_bundle(synthetic_content(kernels=4, problems=4))[1]
    with Bundle(written(tmp_path / "two.nvgemm", encode_bundle(for_two())[0])) as bundle:
        header = bundle.header
        assert [one.problem for one in header.rankings] == [one.problem for one in alone.rankings]
        assert {header.gpu_of(one) for one in header.rankings} == {FIRST}
        assert [one.problem for one in header.unknown_rankings] == [
            f"{one.problem.key} on {SECOND}" for one in alone.rankings
        ]
        with pytest.raises(BundleFormatError, match=f"requires {DEVICE_RANKING}"):
            read_content(bundle)


def test_a_product_without_rankings_uses_the_first_ones(tmp_path: Path) -> None:
    header = encode_bundle(for_two())[1]
    assert {header.gpu_of(one) for one in header.rankings_on("NVIDIA GB300")} == {FIRST}


def test_a_problem_that_its_product_does_not_rank_is_ranked_as_for_the_first() -> None:
    content = for_two()
    lost = content.rankings[0].problem
    rankings = tuple(
        one for one in content.rankings if not (one.is_further and one.problem == lost)
    )
    header = encode_bundle(replace(content, rankings=rankings))[1]
    gpus = {one.problem: header.gpu_of(one) for one in header.rankings_on(SECOND)}
    assert [problem for problem, gpu in gpus.items() if gpu == FIRST] == [lost]


def test_sizes_that_were_measured_on_another_product_alone_are_not_used(tmp_path: Path) -> None:
    content = for_two()
    measured = [one for one in content.rankings if one.measured is not None]
    beside = replace(measured[0].problem, m=3)
    (first,) = (
        one for one in measured if one.problem == measured[0].problem and not one.is_further
    )
    more = replace(first, problem=beside, is_declared=False)
    header = encode_bundle(replace(content, rankings=(*content.rankings, more)))[1]
    assert header.undeclared_count == 1
    assert beside not in {one.problem for one in header.rankings_on(SECOND)}
    assert beside in {one.problem for one in header.rankings_on(FIRST)}
    assert beside in {one.problem for one in header.rankings_on("NVIDIA GB300")}


def test_a_problem_that_only_a_further_product_ranks_is_used_by_all() -> None:
    content = for_two()
    lost = content.rankings[0].problem
    rankings = tuple(one for one in content.rankings if one.is_further or one.problem != lost)
    header = encode_bundle(replace(content, rankings=rankings))[1]
    (found,) = (one for one in header.rankings_on(FIRST) if one.problem == lost)
    assert header.gpu_of(found) == SECOND


def test_a_problem_is_ranked_once_for_a_product() -> None:
    content = for_two()
    with pytest.raises(ValueError, match="ranked more than once"):
        encode_bundle(replace(content, rankings=(*content.rankings, content.rankings[0])))


def swap(document: Any) -> None:
    rankings = document["rankings"]
    rankings[0], rankings[1] = rankings[1], rankings[0]


def name(text: str) -> Edit:
    def edit(document: Any) -> None:
        entry = document["rankings"][1]
        entry["problem"] = text.format(entry["problem"].partition(" on ")[0])

    return edit


def first_for_second(document: Any) -> None:
    first, second = document["rankings"][:2]
    first["source"] = second["source"]


@pytest.mark.parametrize(
    ("rule", "edit", "said"),
    [
        ("ranking-order", swap, f"on {SECOND}; must be sorted, each once"),
        ("ranking-product", name("{} on NVIDIA B300"), f"must be of that GPU (got '{SECOND}')"),
        ("ranking-product", first_for_second, "the ranking before it is for that GPU too"),
        ("header-field", name("{}"), "must be PROBLEM on PRODUCT"),
        ("header-field", name("{} on "), "must be PROBLEM on PRODUCT"),
        ("header-field", lambda d: d.update(further_devices=["B200"]), "other names than 'B200'"),
        ("header-field", lambda d: d.update(further_devices=["B", "B"]), "each once"),
        ("header-field", lambda d: d.update(further_devices="B300"), "must be a list"),
        ("header-field", lambda d: d["rankings"][1].update(requires=1), "must be a list"),
    ],
)
def test_refuses_rankings_that_break_a_rule(
    tmp_path: Path, rule: str, edit: Edit, said: str
) -> None:
    with pytest.raises(BundleFormatError, match=f"\\[{rule}\\]") as raised:
        Bundle(edited(tmp_path / "x.nvgemm", edit))
    assert said in str(raised.value)
