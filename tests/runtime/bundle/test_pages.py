"""Bundles of version 3: their header is in pages, each checked when it is read."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_runtime.bundle.decode import HeaderDecoder
from nvgemm_runtime.bundle.format import (
    MAGIC,
    MAX_PAGE_BYTES,
    MAX_PAGES_BYTES,
    PAGED_ABOVE_BYTES,
    PAGED_VERSION,
    PREFIX,
    Header,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.bundle.paging.tables import LISTS, row_sizes
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError
from nvgemm_runtime.gemm.problem import Problem, Signature
from paged_bundles import LEFT_OUT, encode_in_pages, in_pages, made_content, write_in_pages
from synthetic_content import synthetic_content

SEED = 4  # its content has further products, unserved problems and failures
CONTENT = made_content(SEED, kernels=9, problems=14)


class Document:
    """A bundle of version 3, to be changed: its root, the entries of its pages, and its body."""

    def __init__(self, data: bytes) -> None:
        _, _, size, _ = PREFIX.unpack(data[: PREFIX.size])
        self.root: Any = json.loads(data[PREFIX.size : PREFIX.size + size])
        self.frames: dict[str, list[bytes]] = {}
        offset = PREFIX.size + size
        for name in LISTS:
            self.frames[name] = []
            for stored in self.root["pages"][name]["stored"]:
                self.frames[name].append(data[offset : offset + stored])
                offset += stored
        self.body = data[offset:]

    def lines(self, name: str, page: int) -> list[Any]:
        content = zstandard.ZstdDecompressor().decompress(self.frames[name][page])
        return [json.loads(line) for line in content.split(b"\n")]

    def set_lines(self, name: str, page: int, entries: list[Any]) -> None:
        """Replaces a page; its digest and sizes follow."""
        self.set_content(name, page, b"\n".join(map(canonical_json, entries)))

    def set_content(self, name: str, page: int, content: bytes) -> None:
        self.frames[name][page] = zstandard.ZstdCompressor().compress(content)
        self.root["pages"][name]["content"][page] = len(content)
        self.seal()

    def seal(self) -> None:
        """Makes the root state the digests and sizes of the pages."""
        for name, frames in self.frames.items():
            table = self.root["pages"][name]
            table["sha256"] = "".join(map(sha256_hex, frames))
            table["stored"] = [len(frame) for frame in frames]

    def encode(self) -> bytes:
        root = canonical_json(self.root)
        prefix = PREFIX.pack(MAGIC, PAGED_VERSION, len(root), bytes.fromhex(sha256_hex(root)))
        pages = b"".join(frame for frames in self.frames.values() for frame in frames)
        return prefix + root + pages + self.body


@pytest.fixture
def document() -> Document:
    return Document(encode_in_pages(CONTENT))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.nvgemm"


def ask(path: Path) -> list[Any]:
    """Everything that look-ups give, without reading the header as a whole."""
    with Bundle(path) as bundle:
        pages = bundle.pages()
        assert pages is not None
        problems = [ranking.problem for ranking in CONTENT.rankings] + list(CONTENT.unserved)
        signatures = sorted({problem.signature for problem in problems})
        return [
            [pages.row(problem.signature, row_sizes(problem)) for problem in problems],
            [pages.signature(signature) for signature in signatures],
            [list(pages.rows_below(signature, 96)) for signature in signatures],
            [list(pages.rows_above(signature, 96)) for signature in signatures],
            [pages.kernel(kernel.id) for kernel in CONTENT.kernels],
        ]


def verify(path: Path) -> Header:
    """What ``verify`` reads besides payloads."""
    with Bundle(path) as bundle:
        bundle.check_body()
        for kernel in bundle.header.kernels:
            bundle.payload(kernel)
        return bundle.header


def refused(path: Path, document: Document, rule: str, *, by_look_ups: bool = True) -> str:
    """Requires that a rule is broken, for ``verify`` and, unless told otherwise, look-ups."""
    path.write_bytes(document.encode())
    with pytest.raises(BundleFormatError, match=rf"\[{rule}\]") as error:
        verify(path)
    if by_look_ups:
        with pytest.raises(BundleFormatError, match=rf"\[{rule}\]"):
            ask(path)
    return str(error.value)


@pytest.mark.parametrize("entries", [1, 2, 3, 100])
def test_the_header_is_that_of_version_2(path: Path, entries: int) -> None:
    _, written = encode_bundle(CONTENT)
    with write_in_pages(path, CONTENT, entries) as bundle:
        header = bundle.header
        moved = header.kernels[0].span.offset - written.kernels[0].span.offset
        for ours, theirs in zip(header.kernels, written.kernels):
            span = replace(theirs.span, offset=theirs.span.offset + moved)
            assert ours == replace(theirs, span=span)
        assert header.dictionary is not None
        assert header == replace(
            written,
            kernels=header.kernels,
            dictionary=header.dictionary,
            format_version=PAGED_VERSION,
        )
        payloads = {kernel.id: bundle.payload(kernel) for kernel in header.kernels}
        bundle.check_body()
    assert payloads == {kernel.id: kernel.payload for kernel in CONTENT.kernels}
    with in_pages(entries):
        assert encode_bundle(CONTENT)[1] == header, "the writer returns what a reader reads"


def test_parts_have_the_entries_of_their_row_and_no_others(path: Path) -> None:
    with write_in_pages(path, CONTENT) as bundle:
        header, pages = bundle.header, bundle.pages()
        assert pages is not None
        for ranking in header.rankings:
            problem = ranking.problem
            part = pages.row(problem.signature, row_sizes(problem))
            assert [one.problem for one in part.rankings] == [
                one.problem
                for one in header.rankings
                if one.problem.signature == problem.signature
                and row_sizes(one.problem) == row_sizes(problem)
            ]
            ranked = {one.kernel for each in part.rankings for one in each.kernels}
            assert ranked == set(range(len(part.kernels)))
        for kernel in header.kernels:
            assert pages.kernel(kernel.id) == kernel
        for other in ("0" * 64, "f" * 64, "", "no id", header.kernels[0].id[:-1]):
            assert pages.kernel(other) is None
        absent = Problem(signature=LEFT_OUT, m=1, n=7, k=7)
        assert not pages.row(absent.signature, row_sizes(absent)).rankings
        unknown = Signature.parse("mm/tt/int8xint8/int32/int32")
        assert not pages.signature(unknown).rankings


def test_small_bundles_stay_in_version_2_and_large_ones_are_in_pages(path: Path) -> None:
    content = synthetic_content(kernels=3, problems=2)
    assert encode_bundle(content)[1].format_version == 2
    long_name = "x" * (PAGED_ABOVE_BYTES // 2)
    first, *others = content.kernels
    content = replace(
        content, kernels=(*(replace(one, operator=long_name) for one in (first, *others)),)
    )
    with pytest.raises(BundleFormatError, match=r"pages.kernels.content must be .*1048576"):
        encode_bundle(content)
    shorter = "x" * (PAGED_ABOVE_BYTES * 2 // 5)
    content = replace(
        content, kernels=tuple(replace(one, operator=shorter) for one in content.kernels)
    )
    header = write_bundle(path, content)
    assert header.format_version == PAGED_VERSION
    assert verify(path) == header
    assert path.read_bytes() == encode_bundle(content)[0], "equal inputs, equal bytes"


def test_opening_reads_no_page(path: Path, document: Document) -> None:
    for frames in document.frames.values():
        frames[:] = [bytes(len(frame)) for frame in frames]
    path.write_bytes(document.encode())
    with Bundle(path) as bundle:
        assert bundle.facts.target == CONTENT.target
        with pytest.raises(BundleFormatError, match=r"\[page-digest\] page 0 of kernels"):
            bundle.header  # noqa: B018


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_breaks_a_rule(path: Path, every: int) -> None:
    data = encode_in_pages(made_content(SEED, kernels=4, problems=4), entries=3)
    source = random.Random(0)
    for byte in range(0, len(data), every):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(BundleFormatError):
            verify(path)


def test_a_part_is_refused_if_a_page_that_it_needs_was_changed(path: Path) -> None:
    clean = Document(encode_in_pages(CONTENT))
    for name in ("kernels", "rankings", "failures", "rows", "unserved"):
        assert clean.frames[name], "the content has entries in every list"
        document = copy.deepcopy(clean)
        frame = bytearray(document.frames[name][0])
        frame[-1] ^= 1
        document.frames[name][0] = bytes(frame)
        refused(path, document, "page-digest")


def test_every_truncated_file_is_refused(path: Path, document: Document) -> None:
    data = document.encode()
    for length in range(0, len(data), 29):
        path.write_bytes(data[:length])
        with pytest.raises(BundleFormatError):
            verify(path)


@pytest.mark.parametrize("name", ["kernels", "rankings", "rows"])
def test_swapped_pages_are_refused(path: Path, document: Document, name: str) -> None:
    frames = document.frames[name]
    frames[0], frames[1] = frames[1], frames[0]
    document.root["pages"][name]["stored"][:2] = [len(frame) for frame in frames[:2]]
    refused(path, document, "page-digest|truncated|spans-tile")


def test_a_page_of_another_bundle_is_refused(path: Path, document: Document) -> None:
    other = Document(encode_in_pages(made_content(SEED + 1, kernels=9, problems=14)))
    document.frames["kernels"][1] = other.frames["kernels"][1]
    document.root["pages"]["kernels"]["stored"][1] = len(document.frames["kernels"][1])
    refused(path, document, "page-digest")


def _swap(frames: list[Any]) -> None:
    frames[0], frames[1] = frames[1], frames[0]


def test_sealed_kernel_pages_out_of_order_are_refused(path: Path, document: Document) -> None:
    _swap(document.frames["kernels"])
    _swap(document.root["pages"]["kernels"]["content"])
    document.seal()
    refused(
        path, document, "kernel-order|spans-tile|page-rows|ranking-signature", by_look_ups=False
    )


def test_a_first_id_that_lies_is_refused_by_verify(path: Path, document: Document) -> None:
    first = document.root["pages"]["kernels"]["first"]
    later = f"{int(first[64:128], 16) + 1:064x}"  # hides the second page's first kernel
    document.root["pages"]["kernels"]["first"] = first[:64] + later + first[128:]
    assert "page 1 of kernels begins with" in refused(
        path, document, "page-order", by_look_ups=False
    )
    with Bundle(path) as bundle:
        pages = bundle.pages()
        assert pages is not None
        assert pages.kernel(first[64:128]) is None


def test_first_ids_must_be_sorted(path: Path, document: Document) -> None:
    first = document.root["pages"]["kernels"]["first"]
    document.root["pages"]["kernels"]["first"] = first[64:128] + first[:64] + first[128:]
    refused(path, document, "page-order")


def test_a_kernel_on_two_pages_is_refused(path: Path, document: Document) -> None:
    kernels = document.lines("kernels", 1)
    kernels[-1] = document.lines("kernels", 0)[0]
    document.set_lines("kernels", 1, kernels)
    refused(path, document, "kernel-order|spans-tile", by_look_ups=False)


def test_first_sizes_that_lie_are_refused_where_the_page_is_read(
    path: Path, document: Document
) -> None:
    document.root["pages"]["rows"]["first"][-1] += 1
    refused(path, document, "page-order")


def test_a_ranking_in_the_row_of_another_problem_is_refused(path: Path, document: Document) -> None:
    rankings = document.lines("rankings", 0)
    signature, _, _ = rankings[0]["problem"].rpartition("/")
    batch = "b1" if signature.startswith("bmm") else ""
    rankings[0]["problem"] = f"{signature}/{batch}m1n1k2"
    document.set_lines("rankings", 0, rankings)
    refused(path, document, "page-rows|ranking-product")


@pytest.mark.parametrize("member", [3, 4, 5, 6])
def test_rows_must_divide_all_rankings_and_unserved_entries(
    path: Path, document: Document, member: int
) -> None:
    rows = document.lines("rows", 0)
    rows[0][member] += 1
    document.set_lines("rows", 0, rows)
    refused(path, document, "page-rows", by_look_ups=False)


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_size_of_a_row_is_at_least_1(path: Path, document: Document, member: int) -> None:
    rows = document.lines("rows", 0)
    rows[0][member] = 0
    document.set_lines("rows", 0, rows)
    document.root["pages"]["rows"]["first"][member] = 1
    refused(path, document, "header-field")


def test_rows_that_share_rankings_are_refused_by_look_ups(path: Path, document: Document) -> None:
    rows = document.lines("rows", 0)
    assert len(rows) > 1
    rows[1][3:] = rows[0][3:]
    document.set_lines("rows", 0, rows)
    refused(path, document, "page-rows")


def test_rows_of_two_pages_that_share_rankings_are_refused_before_they_are_decoded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Document(encode_in_pages(CONTENT, entries=1))
    counts = [count for _, count, *_ in document.root["signatures"]]
    index = next(index for index, count in enumerate(counts) if count > 1)
    text, first = document.root["signatures"][index][0], sum(counts[:index])
    (row,), (other,) = document.lines("rows", first), document.lines("rows", first + 1)
    document.set_lines("rows", first + 1, [[*other[:3], *row[3:]]])
    path.write_bytes(document.encode())
    monkeypatch.setattr(HeaderDecoder, "ranking", lambda *_: pytest.fail("a ranking was decoded"))
    with Bundle(path) as bundle:
        pages = bundle.pages()
        assert pages is not None
        with pytest.raises(BundleFormatError, match=r"\[page-rows\] pages .* begins with ranking"):
            pages.signature(Signature.parse(text))


def test_a_hidden_row_is_refused_by_verify(path: Path, document: Document) -> None:
    signatures = document.root["signatures"]
    index = next(index for index, (_, rows, *_) in enumerate(signatures[:-1]) if rows > 1)
    signatures[index][1] -= 1
    signatures[index + 1][1] += 1
    refused(path, document, "page-rows|page-order", by_look_ups=False)


@pytest.mark.parametrize("place", [2, 3])
def test_a_stated_alignment_above_a_kernels_is_refused(
    path: Path, document: Document, place: int
) -> None:
    for signature in document.root["signatures"]:
        if signature[place] is not None:
            signature[place] = 64
    refused(path, document, "page-rows", by_look_ups=False)


@pytest.mark.parametrize("change", ["another", "one more", "none"])
def test_products_must_be_those_that_have_rankings(
    path: Path, document: Document, change: str
) -> None:
    products = document.root["products"]
    assert products, "the content has further products"
    changes = {"another": ["NVIDIA A100"], "one more": ["NVIDIA A100", *products], "none": []}
    document.root["products"] = changes[change]
    refused(path, document, "page-rows", by_look_ups=False)


def test_a_bundle_without_further_rankings_states_no_products(path: Path) -> None:
    document = Document(encode_in_pages(synthetic_content(kernels=3, problems=2)))
    assert "products" not in document.root
    document.root["products"] = ["NVIDIA A100"]  # would hide what is declared for other products
    path.write_bytes(document.encode())
    with pytest.raises(BundleFormatError, match=r"\[page-rows\] products are NVIDIA A100, must"):
        verify(path)


@pytest.mark.parametrize("kernel", [9, 2**40])
def test_a_ranking_that_names_no_kernel_is_refused(
    path: Path, document: Document, kernel: int
) -> None:
    rankings = document.lines("rankings", 0)
    rankings[0]["kernels"][0][0] = kernel
    document.set_lines("rankings", 0, rankings)
    refused(path, document, "ranking-kernels")


@pytest.mark.parametrize("span", [[0, 2**62, 100], [2**63 - 1, 1, 1], [2**40, 1, 1]])
def test_a_dictionary_behind_the_files_end_is_refused_at_opening(
    path: Path, document: Document, span: list[int]
) -> None:
    document.root["dictionary"]["span"] = span
    assert "dictionary ends at byte" in refused(path, document, "spans-tile")


def test_a_kernel_behind_the_files_end_is_refused(path: Path, document: Document) -> None:
    kernels = document.lines("kernels", 0)
    kernels[0]["span"][0] = 2**40
    document.set_lines("kernels", 0, kernels)
    refused(path, document, "spans-tile")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: content + b"\n" + content, "page-entries"),
        (lambda content: content.split(b"\n")[0], "page-entries"),
        (lambda content: content.replace(b"\n", b",\n", 1), "header-json"),
        (lambda content: content.replace(b"\n", b" \n", 1), "header-canonical"),
        (lambda content: b"[" * len(content) + b"\n", "header-json|page-entries"),
        (lambda content: content.replace(b"\n", b",{}\n", 1), "header-json"),
    ],
)
def test_damaged_entries_are_refused(
    path: Path, document: Document, change: Callable[[bytes], bytes], rule: str
) -> None:
    content = b"\n".join(map(canonical_json, document.lines("kernels", 0)))
    document.set_content("kernels", 0, change(content))
    refused(path, document, rule)


def test_an_entry_torn_over_two_lines_is_refused(path: Path, document: Document) -> None:
    entries = document.lines("kernels", 0)
    torn, _, rest = canonical_json(entries[0]).partition(b",")
    pair = b"%s,%s" % (rest, canonical_json(entries[1]))
    document.set_content("kernels", 0, torn + b"\n" + pair)
    refused(path, document, "header-json")


def test_pages_in_all_cannot_be_a_bomb(path: Path, document: Document) -> None:
    many = 300
    table = document.root["pages"]["failures"]
    page = zstandard.ZstdCompressor().compress(bytes(MAX_PAGE_BYTES))
    document.frames["failures"] = [page] * many
    table["count"] = many * table["entries"]
    table["content"] = [MAX_PAGE_BYTES] * many
    document.seal()
    assert str(MAX_PAGES_BYTES) in refused(path, document, "header-size")


def test_a_page_cannot_be_a_bomb(path: Path, document: Document) -> None:
    document.frames["kernels"][0] = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    document.seal()
    refused(path, document, "frame-size")
    document.root["pages"]["kernels"]["content"][0] = 64 << 20
    assert str(MAX_PAGE_BYTES) in refused(path, document, "header-field")


def test_a_frame_with_more_behind_it_is_refused(path: Path, document: Document) -> None:
    document.frames["kernels"][0] += document.frames["kernels"][1]
    document.seal()
    refused(path, document, "frame")


TABLE_CHANGES: dict[str, Any] = {
    "count": (0, -1, 10, 2**63, "9", None, True),
    "entries": (0, 1, 4097, 2**63, None),
    "sha256": ("", "0" * 64, "G" * 64, None, 7),
    "stored": ([], [0], [1 << 40], None, ["1"], [True]),
    "content": ([], [0], [1 << 40], None, [1.0]),
    "first": ("", "0" * 64, None, [], [1]),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("member", TABLE_CHANGES)
def test_whatever_a_table_states_is_a_broken_rule_or_right(
    path: Path, document: Document, name: str, member: str
) -> None:
    clean = document.root["pages"][name]
    if member not in clean:
        return
    for value in TABLE_CHANGES[member]:
        if value == clean[member]:
            continue
        changed = copy.deepcopy(document)
        changed.root["pages"][name][member] = value
        path.write_bytes(changed.encode())
        with pytest.raises(BundleFormatError):
            verify(path)
    del document.root["pages"][name][member]
    path.write_bytes(document.encode())
    with pytest.raises(BundleFormatError, match=r"\[header-field\]"):
        Bundle(path)


@pytest.mark.parametrize("name", ["pages", "signatures", "imports", "sources", "target"])
def test_a_root_without_a_member_is_refused_by_its_name(
    path: Path, document: Document, name: str
) -> None:
    del document.root[name]
    path.write_bytes(document.encode())
    with pytest.raises(BundleFormatError, match=rf"lacks {name}, which it must have"):
        Bundle(path)


def test_signatures_must_be_sorted(path: Path, document: Document) -> None:
    _swap(document.root["signatures"])
    refused(path, document, "page-order")


def test_a_root_that_requires_an_unknown_feature_is_refused(path: Path, document: Document) -> None:
    document.root["requires"] = ["later"]
    assert "requires later" in refused(path, document, "feature")


def test_entries_that_require_an_unknown_feature_are_left_out(
    path: Path, document: Document
) -> None:
    clean = Document(encode_in_pages(CONTENT))
    kernels = document.lines("kernels", 0)
    kernels[0] = {
        "id": kernels[0]["id"],
        "span": kernels[0]["span"],
        "operator": "o",
        "signature": "later",
        "requires": ["later"],
    }
    document.set_lines("kernels", 0, kernels)
    document.root["later"] = {"a member": "of a later release"}
    path.write_bytes(document.encode())
    header = verify(path)
    (unknown,) = header.unknown_kernels
    with Bundle(path) as bundle:
        pages = bundle.pages()
        assert pages is not None
        assert pages.kernel(unknown.id) is None
        for ranking in header.rankings:
            part = pages.row(ranking.problem.signature, row_sizes(ranking.problem))
            (own,) = (
                one
                for one in part.rankings
                if (one.problem, one.product) == (ranking.problem, ranking.product)
            )
            assert own.measured == ranking.measured
            assert [part.kernels[one.kernel] for one in own.kernels] == [
                header.kernels[one.kernel] for one in ranking.kernels
            ]
    assert clean.root["signatures"] == document.root["signatures"]


def test_threads_look_up_at_once(path: Path) -> None:
    path.write_bytes(encode_in_pages(CONTENT))
    expected = ask(path)
    results: list[Any] = []
    with Bundle(path) as bundle:
        pages = bundle.pages()
        assert pages is not None

        def look_up() -> None:
            results.append([pages.kernel(kernel.id) for kernel in CONTENT.kernels])

        threads = [threading.Thread(target=look_up) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [expected[-1]] * 8


def test_a_forked_child_looks_up_in_an_open_bundle(path: Path) -> None:
    with write_in_pages(path, CONTENT) as bundle:
        pages = bundle.pages()
        assert pages is not None
        expected = [pages.kernel(kernel.id) for kernel in CONTENT.kernels]
        child = os.fork()
        if child == 0:
            fresh = bundle.pages()
            assert fresh is not None
            found = [fresh.kernel(kernel.id) for kernel in CONTENT.kernels]
            os._exit(0 if found == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = enumerate(value)
    for key, item in inner:
        yield (*before, key)
        yield from places(item, (*before, key))


def test_whatever_stands_in_a_root_or_an_entry_is_a_broken_rule_or_no_matter(path: Path) -> None:
    clean = Document(encode_in_pages(made_content(SEED, kernels=4, problems=4), entries=3))
    source = random.Random(0)
    values = (None, True, -1, 0, 2**63, "", "x", [], {}, [[]], ["x"], {"requires": ["x"]})
    targets: list[tuple[str, int]] = [("", 0)]
    targets += [(name, page) for name in LISTS for page in range(len(clean.frames[name]))]
    for (name, page), _ in itertools.product(targets, range(25)):
        document = copy.deepcopy(clean)
        tree = document.lines(name, page) if name else document.root
        place = source.choice(list(places(tree)))
        holder = tree
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = source.choice(values)
        if name:
            document.set_lines(name, page, tree)
        path.write_bytes(document.encode())
        for use in (verify, ask):
            try:
                use(path)
            except BundleFormatError:
                continue
