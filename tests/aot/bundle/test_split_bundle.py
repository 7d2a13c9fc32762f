"""Parts of bundles: what each holds, and that all together are the bundle again."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle import writer
from nvgemm_aot.bundle.compression import compress_quickly
from nvgemm_aot.bundle.parts.copied_frames import OpenedBundle, open_whole
from nvgemm_aot.bundle.parts.merge_bundles import SPLIT, Merged, merge_bundles
from nvgemm_aot.bundle.parts.split_bundle import Part, split_below, split_into
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.rankings.join_rankings import joining
from nvgemm_runtime.bundle.encode import encode_header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import PackagingError
from nvgemm_runtime.matching.index import all_but_m
from varied_content import varied_content


def opened(path: Path) -> OpenedBundle:
    with Bundle(path) as bundle:
        return open_whole(bundle)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> OpenedBundle:
    path = tmp_path_factory.mktemp("whole") / "mine.nvgemm"
    write_bundle(path, varied_content())
    return opened(path)


def write(directory: Path, parts: list[Part]) -> list[Path]:
    paths = [directory / f"{number}.nvgemm" for number in range(len(parts))]
    for path, part in zip(paths, parts):
        path.write_bytes(part.data)
    return paths


def merge(*paths: Path) -> Merged:
    join = functools.partial(joining, keeps_untimed=False)
    return merge_bundles(paths, join, generator="nvgemm-aot merge")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_all_parts_merged_in_any_order_are_the_original_to_the_byte(
    whole: OpenedBundle, tmp_path: Path, count: int
) -> None:
    paths = write(tmp_path, split_into(whole, count))
    assert len(paths) == count
    for order in itertools.islice(itertools.permutations(paths), 4):
        merged = merge(*order)
        assert merged.equals == (SPLIT if count > 1 else str(paths[0]))
        assert merged.data == whole.data


def test_a_bundle_without_a_dictionary_comes_back_too(tmp_path: Path) -> None:
    path = tmp_path / "quick.nvgemm"
    write_bundle(path, varied_content(), pack=compress_quickly)
    paths = write(tmp_path, split_into(opened(path), 3))
    assert merge(*paths).data == path.read_bytes()


def test_parts_differ_and_say_what_they_are_a_part_of(whole: OpenedBundle) -> None:
    parts = split_into(whole, 3)
    assert len({part.header.build_key for part in parts} | {whole.header.build_key}) == 4
    assert {part.header.part_of for part in parts} == {(whole.whole,)}
    assert [part.data for part in split_into(whole, 3)] == [part.data for part in parts]


def test_a_row_is_in_one_part_and_each_ranking_and_reason_once(whole: OpenedBundle) -> None:
    parts = split_into(whole, 7)
    rows = [{all_but_m(one.problem) for one in part.header.rankings} for part in parts]
    assert sum(map(len, rows)) == len(set().union(*rows)) == 12
    rankings = [one.name for part in parts for one in part.header.rankings]
    assert sorted(rankings) == sorted(one.name for one in whole.header.rankings)
    unserved = [problem for part in parts for problem in part.header.unserved]
    assert sorted(unserved) == sorted(whole.header.unserved)
    ids = {kernel.id for part in parts for kernel in part.header.kernels}
    assert ids == {kernel.id for kernel in whole.header.kernels}
    for part in parts:
        ranked = {ranked.kernel for one in part.header.rankings for ranked in one.kernels}
        assert len(part.header.kernels) - len(ranked) in (0, 1)  # one kernel is ranked nowhere


def test_signatures_stay_together_where_they_fit(whole: OpenedBundle) -> None:
    for part in split_into(whole, 3):
        assert len({kernel.signature for kernel in part.header.kernels}) == 1


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_parts_are_below_the_size_and_few(tmp_path: Path, share: float) -> None:
    path = tmp_path / "large.nvgemm"
    write_bundle(path, varied_content(rows=8, kernels=24, payload_bytes=9000), compress_quickly)
    large = opened(path)
    most = int(len(large.data) * share)
    parts = split_below(large, most)
    assert 2 <= len(parts) <= 4
    assert all(len(part.data) <= most for part in parts)
    assert merge(*write(tmp_path, parts)).data == large.data


def test_parts_of_a_bundle_in_pages_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = varied_content(rows=80)
    path = tmp_path / "plain.nvgemm"
    header = write_bundle(path, content)
    plain_bytes = len(path.read_bytes())
    monkeypatch.setattr(writer, "PAGED_ABOVE_BYTES", len(encode_header(header)) - 1)
    write_bundle(path, content)
    large = opened(path)
    assert large.bundle.is_paged
    assert len(large.data) < plain_bytes / 2, "sizes are estimated from compressed pages"
    most = len(large.data) * 3 // 4
    parts = split_below(large, most)
    assert all(len(part.data) <= most for part in parts)
    assert len(parts) <= 2 * (plain_bytes // most + 1)
    assert merge(*write(tmp_path, parts)).data == large.data


def test_a_bundle_that_fits_is_its_only_part(whole: OpenedBundle) -> None:
    [part] = split_below(whole, len(whole.data))
    assert part.data == whole.data


def test_a_part_of_a_part_finds_back_to_both(whole: OpenedBundle, tmp_path: Path) -> None:
    first, *others = write(tmp_path, split_into(whole, 3))
    (tmp_path / "inner").mkdir()
    inner = write(tmp_path / "inner", split_into(opened(first), 2))
    assert merge(*inner).data == first.read_bytes()
    assert merge(*inner, *others).data == whole.data
    one_and_a_half = tmp_path / "some.nvgemm"
    one_and_a_half.write_bytes(merge(inner[0], others[0]).data)
    rest = merge(one_and_a_half, inner[1], others[1])
    assert rest.data == whole.data


def test_a_changed_part_is_no_part_any_more(whole: OpenedBundle, tmp_path: Path) -> None:
    first, second = write(tmp_path, split_into(whole, 2))
    content = opened(first).content
    changed = replace(content, build_key="1" * 64, rankings=content.rankings[1:])
    write_bundle(first, changed)
    merged = merge(first, second)
    assert merged.equals is None
    assert merged.header.part_of == ()
    assert merged.header.build_key != whole.header.build_key


def test_more_parts_than_rows_are_refused(whole: OpenedBundle) -> None:
    with pytest.raises(PackagingError, match=r"has 12 rows, at most as many .*\(got 13\)"):
        split_into(whole, 13)


def test_a_row_larger_than_the_size_is_refused_by_name(whole: OpenedBundle) -> None:
    with pytest.raises(PackagingError, match=r"mm/.*/m1n\d+k1024 and all other m .* at most 999"):
        split_below(whole, 999)


@pytest.mark.parametrize("parts_are_paged", [False, True])
def test_parts_of_a_bundle_in_pages_are_the_original_again(
    whole: OpenedBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts_are_paged: bool
) -> None:
    header_bytes = len(encode_header(whole.header))
    monkeypatch.setattr(writer, "PAGED_ABOVE_BYTES", 0 if parts_are_paged else header_bytes - 1)
    paged = tmp_path / "paged.nvgemm"
    write_bundle(paged, varied_content())
    assert opened(paged).bundle.is_paged
    paths = write(tmp_path, split_into(opened(paged), 3))
    assert [opened(path).bundle.is_paged for path in paths] == [parts_are_paged] * 3
    merged = merge(*reversed(paths))
    assert (merged.equals, merged.data) == (SPLIT, paged.read_bytes())
