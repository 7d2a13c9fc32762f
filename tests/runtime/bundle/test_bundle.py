"""The bundle file: what is written can be read, and nothing else can."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_runtime.bundle.decode import decode_header
from nvgemm_runtime.bundle.encode import encode_header
from nvgemm_runtime.bundle.format import (
    FORMAT_VERSION,
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK, CompileFailure
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError
from nvgemm_runtime.gemm.problem import Signature
from synthetic_content import synthetic_content


@pytest.fixture
def content() -> BundleContent:
    return synthetic_content(kernels=12, problems=5)


@pytest.fixture
def path(tmp_path: Path, content: BundleContent) -> Path:
    path = tmp_path / "some.nvgemm"
    write_bundle(path, content)
    return path


def read(path: Path) -> dict[str, bytes]:
    """Everything that a reader can be made to give."""
    with Bundle(path) as bundle:
        bundle.check_body()
        return {kernel.id: bundle.payload(kernel) for kernel in bundle.header.kernels}


def header_of(data: bytes) -> Any:
    _, _, size, _ = PREFIX.unpack(data[: PREFIX.size])
    return json.loads(data[PREFIX.size : PREFIX.size + size])


def with_header(data: bytes, document: Any, *, encode: Any = canonical_json) -> bytes:
    """The bundle with another header: digest, length and spans agree with it again."""
    size = PREFIX.unpack(data[: PREFIX.size])[2]
    return assemble(document, data[PREFIX.size + size :], PREFIX.size + size, encode)


def assemble(document: Any, body: bytes, body_offset: int, encode: Any = canonical_json) -> bytes:
    header = encode(document)
    while (moved := PREFIX.size + len(header) - body_offset) and shift_spans(document, moved):
        body_offset += moved
        header = encode(document)
    digest = bytes.fromhex(sha256_hex(header))
    return PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), digest) + header + body


def shift_spans(document: Any, by: int) -> bool:
    """Move every span that still is one; say whether there was any."""
    moved = False
    for holder in iterate_holders(document):
        span = holder.get("span") if isinstance(holder, dict) else None
        if isinstance(span, list) and span and type(span[0]) is int and span[0] > 1:
            span[0] += by
            moved = True
    return moved


def iterate_holders(document: Any) -> list[Any]:
    if not isinstance(document, dict):
        return []
    kernels = document.get("kernels")
    return [*(kernels if isinstance(kernels, list) else []), document.get("dictionary")]


def test_reads_back_what_was_written(path: Path, content: BundleContent) -> None:
    assert read(path) == {sha256_hex(k.payload): k.payload for k in content.kernels}
    with Bundle(path) as bundle:
        header = bundle.header
        assert header.target == content.target
        assert [r.problem for r in header.rankings] == sorted(r.problem for r in content.rankings)
        for ranking, given_ in zip(
            header.rankings, sorted(content.rankings, key=lambda r: r.problem)
        ):
            named = [(header.kernels[p.kernel].id, p.time_ns) for p in ranking.kernels]
            assert named == list(given_.kernels)
            assert header.sources[ranking.source] == given_.source
            assert ranking.measured == given_.measured


def test_header_encodes_to_the_bytes_it_was_decoded_from(path: Path) -> None:
    with Bundle(path) as bundle:
        data = encode_header(bundle.header)
        assert data == path.read_bytes()[PREFIX.size : PREFIX.size + len(data)]


def test_bytes_do_not_depend_on_the_order_of_kernels_and_problems(content: BundleContent) -> None:
    shuffled = replace(
        content,
        kernels=tuple(reversed(content.kernels)),
        rankings=tuple(reversed(content.rankings)),
        toolchain=dict(reversed(content.toolchain.items())),
    )
    assert encode_bundle(shuffled)[0] == encode_bundle(content)[0]


def test_equal_payloads_are_stored_once(content: BundleContent) -> None:
    doubled = replace(content, kernels=content.kernels + content.kernels[:3])
    assert encode_bundle(doubled)[0] == encode_bundle(content)[0]


def test_every_changed_bit_is_noticed() -> None:
    data = bytearray(encode_bundle(synthetic_content(kernels=2, problems=1))[0])
    descriptor = os.memfd_create("damaged")
    os.write(descriptor, data)
    for position, byte in enumerate(data):
        os.pwrite(descriptor, bytes([byte ^ 1 << (position % 8)]), position)
        with pytest.raises(BundleFormatError):
            read(Path(f"/proc/self/fd/{descriptor}"))
        os.pwrite(descriptor, bytes([byte]), position)
    read(Path(f"/proc/self/fd/{descriptor}"))
    os.close(descriptor)


def test_every_truncation_is_noticed(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    damaged = tmp_path / "damaged.nvgemm"
    for size in (*range(200), *range(200, len(data), 97), len(data) - 1):
        damaged.write_bytes(data[:size])
        with pytest.raises(BundleFormatError):
            read(damaged)


def test_appended_bytes_are_noticed(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(BundleFormatError, match="spans-tile"):
        read(path)


Edit = Callable[[Any], object]


def set_(*keys: Any, to: Any) -> Edit:
    def edit(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return edit


def reverse_kernels(kernels: list[Any]) -> None:
    """Other order of ids, same order of spans."""
    spans = [kernel["span"] for kernel in kernels]
    kernels.reverse()
    for kernel, span in zip(kernels, spans):
        kernel["span"] = span


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        ("header-field", lambda h: h.pop("device")),
        ("header-field", set_("target", "arch", to=90)),
        ("header-field", set_("device", to="")),
        ("header-field", set_("device", to="B\n200")),
        ("header-field", set_("build_key", to="0" * 63)),
        ("header-field", set_("build_key", to="G" * 64)),
        ("header-field", set_("toolchain", to={})),
        ("header-field", set_("toolchain", "dsl", to=4)),
        ("header-field", set_("toolchain", "", to="1")),
        ("header-field", set_("toolchain", "\x1b[2J", to="1")),
        ("header-field", set_("toolchain", "\ud800", to="1")),
        ("header-field", set_("kernels", to={})),
        ("header-field", set_("kernels", 0, to=None)),
        ("header-field", set_("kernels", 0, "span", to=[0, 1])),
        ("header-field", set_("kernels", 0, "span", 1, to=0)),
        ("header-field", set_("kernels", 0, "span", 1, to=True)),
        ("header-field", set_("kernels", 0, "span", 0, to=-1)),
        ("header-field", set_("kernels", 0, "span", 2, to=2**40)),
        ("header-field", set_("kernels", 0, "span", 2, to=1.5)),
        ("header-field", set_("kernels", 0, "alignment_bytes", to=12)),
        ("header-field", set_("kernels", 0, "alignment_bytes", to=0)),
        ("header-field", set_("kernels", 0, "alignment_bytes", to=8192)),
        ("header-field", set_("kernels", 0, "design", "tile", to=[1, 2])),
        ("header-field", set_("kernels", 0, "design", "tile", to=[1, 2, 0])),
        ("header-field", set_("kernels", 0, "design", "ctas_per_tile", to=3)),
        ("header-field", set_("sources", 0, "conditions", to=None)),
        ("header-field", set_("sources", 1, "conditions", "date", to=20261121)),
        ("header-field", lambda h: h["sources"][1]["conditions"].pop("driver")),
        ("header-field", set_("sources", 1, "conditions", "launches", to="")),
        ("header-field", set_("sources", 1, "conditions", "launches", to=None)),
        ("header-field", set_("sources", 1, "conditions", "gpu_sha256", to="GPU-1234")),
        ("header-field", set_("sources", 1, "conditions", "gpu_sha256", to=None)),
        ("header-field", set_("rankings", 1, "measured", "confirmed_by", to="a" * 64)),
        ("header-field", set_("rankings", 1, "measured", "confirmed_by", to=["a", "b"])),
        ("header-field", set_("rankings", 1, "measured", "confirmed_by", to=[])),
        ("header-field", set_("rankings", 1, "measured", "repeated", to=119)),
        ("header-field", set_("rankings", 1, "measured", "repeated", to=True)),
        ("header-field", set_("rankings", 1, "measured", "repeated", to=None)),
        ("ranking-measured", set_("rankings", 1, "measured", "confirmed_by", to=["a" * 64])),
        ("ranking-measured", set_("rankings", 1, "measured", "confirmed_by", to=["a" * 64] * 2)),
        ("ranking-measured",
         set_("rankings", 1, "measured", "confirmed_by", to=["b" * 64, "a" * 64])),
        ("header-field", set_("rankings", 0, "measured", to=None)),
        ("header-field", lambda h: h["rankings"][1]["measured"].pop("aten")),
        ("header-field", set_("rankings", 1, "measured", "aten", to=[1000])),
        ("header-field", set_("rankings", 1, "measured", "aten", to=[0, 5])),
        ("header-field", set_("rankings", 1, "measured", "triton", to=[1000, -1])),
        ("header-field", set_("rankings", 1, "measured", "spreads_ns", 0, to=-1)),
        ("header-field", set_("rankings", 1, "measured", "doubts", to=[""])),
        ("ranking-measured", set_("rankings", 1, "measured", "spreads_ns", to=[1])),
        ("ranking-measured", set_("rankings", 1, "source", to=0)),
        ("ranking-measured", lambda h: h["sources"][1].pop("conditions")),
        ("ranking-measured", set_("rankings", 1, "kernels", 0, 1, to=5000)),
        ("ranking-measured", set_("rankings", 1, "kernels", 2, 1, to=None)),
        ("header-field", set_("rankings", 0, "kernels", 0, to=[0])),
        ("header-field", set_("rankings", 0, "kernels", 0, 1, to=0)),
        ("header-field", set_("unserved", to={})),
        ("header-field", set_("unserved", to=[{"problem": "mm/tn"}])),
        ("header-field", set_("unserved", to=[{"problem": "mm/tn", "reason": ""}])),
        ("header-field", lambda h: h.pop("imports")),
        ("header-field", set_("imports", to=["b", "a"])),
        ("header-field", set_("imports", to=["a", "a"])),
        ("header-field", set_("imports", to=[7])),
        ("header-field", set_("part_of", to="x")),
        ("header-field", set_("part_of", to=[["0" * 64]])),
        ("header-field", set_("part_of", to=[["0" * 64, "0" * 63]])),
        ("header-field", set_("failures", to=[{"operator": "o", "reason": "r"}])),
        ("header-field",
         set_("failures", to=[{"operator": "o", "reason": "r", "is_transient": 1}])),
        ("header-field", set_("requires", to="x")),
        ("header-field", set_("kernels", 0, "requires", to=[""])),
        ("feature", set_("requires", to=["bodies-elsewhere"])),
        ("ranking-missing", set_("rankings", 0, "missing", to=[0])),
        ("spans-tile", set_("kernels", 0, "span", 0, to=1)),
        ("spans-tile", set_("kernels", 0, "span", 1, to=2**62)),
        ("kernel-order", lambda h: reverse_kernels(h["kernels"])),
        ("kernel-order", lambda h: set_("kernels", 1, "id", to=h["kernels"][0]["id"])(h)),
        ("ranking-order", lambda h: h["rankings"].reverse()),
        ("ranking-order", lambda h: h["rankings"].insert(0, h["rankings"][0])),
        ("ranking-source", set_("rankings", 0, "source", to=99)),
        ("ranking-kernels", set_("rankings", 0, "kernels", to=[])),
        ("ranking-kernels", set_("rankings", 0, "kernels", to=[[0, 1], [0, 2]])),
        ("ranking-kernels", set_("rankings", 0, "kernels", to=[[99, 1]])),
        ("ranking-unserved",
         lambda h: h.update(unserved=[{"problem": h["rankings"][0]["problem"], "reason": "r"}])),
        ("ranking-signature",
         set_("rankings", 0, "problem", to="mm/nn/bf16xbf16/fp32/bf16/m1n8k8")),
    ],
)  # fmt: skip
def test_names_the_broken_rule(path: Path, rule: str, edit: Edit) -> None:
    data = path.read_bytes()
    document = header_of(data)
    edit(document)
    path.write_bytes(with_header(data, document))
    with pytest.raises(BundleFormatError) as caught:
        read(path)
    assert caught.value.rule == rule
    assert str(path) in str(caught.value)


def test_rejects_a_bundle_without_kernels(path: Path) -> None:
    document = header_of(path.read_bytes())
    document.update(kernels=[], rankings=[], dictionary=None)
    path.write_bytes(assemble(document, b"", 0))
    with pytest.raises(BundleFormatError, match=r"\[no-kernels\]"):
        Bundle(path)


def test_rejects_a_header_that_is_not_canonical(path: Path) -> None:
    data = path.read_bytes()
    spaced = with_header(data, header_of(data), encode=lambda d: json.dumps(d).encode())
    path.write_bytes(spaced)
    with pytest.raises(BundleFormatError, match="header-canonical"):
        Bundle(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"\xff", b"NaN", b'{"a":1,"a":1}'])
def test_rejects_a_header_that_is_no_json_object(path: Path, text: bytes) -> None:
    path.write_bytes(with_header(path.read_bytes(), None, encode=lambda _: text))
    with pytest.raises(BundleFormatError, match="header-"):
        Bundle(path)


def test_rejects_a_future_format_and_says_what_to_do(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 4
    path.write_bytes(data)
    with pytest.raises(
        BundleFormatError,
        match=r"\[version\] format version 4; this release reads 1, 2, 3; upgrade",
    ):
        Bundle(path)


def test_rejects_a_foreign_file(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())
    with pytest.raises(BundleFormatError, match=r"\[magic\]"):
        Bundle(path)


def test_rejects_a_header_longer_than_the_file(path: Path) -> None:
    data = path.read_bytes()
    magic, version, _, digest = PREFIX.unpack(data[: PREFIX.size])
    path.write_bytes(PREFIX.pack(magic, version, 2**32 - 1, digest) + data[PREFIX.size :])
    with pytest.raises(BundleFormatError, match=r"\[header-size\]"):
        Bundle(path)


def test_rejects_a_header_over_the_limit_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "huge.nvgemm"
    size = MAX_HEADER_BYTES + 1
    path.write_bytes(PREFIX.pack(MAGIC, FORMAT_VERSION, size, bytes(32)))
    os.truncate(path, PREFIX.size + size)  # sparse: another rule would be named if it were read
    with pytest.raises(BundleFormatError, match=rf"\[header-size\] .*{size} .*{MAX_HEADER_BYTES}"):
        Bundle(path)


def test_rejects_a_frame_that_would_grow_past_its_entry(path: Path) -> None:
    """A payload replaced by a bomb: small frame, huge content, everything else consistent."""
    data = path.read_bytes()
    document = header_of(data)
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(50_000_000))
    last = max(document["kernels"], key=lambda kernel: kernel["span"][0])
    body_offset = PREFIX.size + PREFIX.unpack(data[: PREFIX.size])[2]
    body = data[body_offset : last["span"][0]] + bomb
    last["span"][1] = len(bomb)
    document["body_sha256"] = sha256_hex(body)
    path.write_bytes(assemble(document, body, body_offset))
    with pytest.raises(BundleFormatError, match=r"\[frame-size\] .* declares 50000000 bytes"):
        read(path)


def replace_span(document: Any, index: int, body: bytes, frame: bytes, offset: int) -> bytes:
    """The body with one kernel's frame replaced, and the header told of it, digest included."""
    span = document["kernels"][index]["span"]
    start = span[0] - offset
    changed = body[:start] + frame + body[start + span[1] :]
    grown = len(frame) - span[1]
    span[1] = len(frame)
    for kernel in document["kernels"][index + 1 :]:
        kernel["span"][0] += grown
    document["body_sha256"] = sha256_hex(changed)
    return changed


def parts(path: Path) -> tuple[Any, bytes, int]:
    """Header, body and where the body starts."""
    data = path.read_bytes()
    offset = PREFIX.size + PREFIX.unpack(data[: PREFIX.size])[2]
    return header_of(data), data[offset:], offset


def test_rejects_a_payload_that_is_not_what_its_id_says(path: Path) -> None:
    document, body, offset = parts(path)
    second = document["kernels"][1]["span"]
    frame = body[second[0] - offset : second[0] - offset + second[1]]
    body = replace_span(document, 0, body, frame, offset)
    path.write_bytes(assemble(document, body, offset))
    with Bundle(path) as bundle:
        bundle.check_body()
        bundle.payload(bundle.header.kernels[1])
        with pytest.raises(BundleFormatError, match=r"\[payload-digest\]"):
            bundle.payload(bundle.header.kernels[0])


def test_rejects_a_dictionary_that_is_not_what_the_header_says(path: Path) -> None:
    document, body, offset = parts(path)
    document["dictionary"]["sha256"] = "0" * 64
    path.write_bytes(assemble(document, body, offset))
    with Bundle(path) as bundle, pytest.raises(BundleFormatError, match=r"\[dictionary-digest\]"):
        bundle.payload(bundle.header.kernels[0])


def test_rejects_junk_behind_a_frame_in_its_span(path: Path) -> None:
    document, body, offset = parts(path)
    start, size, _ = document["kernels"][0]["span"]
    frame = body[start - offset : start - offset + size] + b"junk"
    body = replace_span(document, 0, body, frame, offset)
    path.write_bytes(assemble(document, body, offset))
    with Bundle(path) as bundle, pytest.raises(BundleFormatError, match=r"\[frame\]"):
        bundle.payload(bundle.header.kernels[0])


def test_rejects_a_changed_body_even_where_no_other_rule_sees_it(path: Path) -> None:
    document, body, offset = parts(path)
    document["body_sha256"] = "0" * 64
    path.write_bytes(assemble(document, body, offset))
    with Bundle(path) as bundle, pytest.raises(BundleFormatError, match=r"\[body-digest\]"):
        bundle.check_body()


def test_rejects_a_header_that_its_digest_does_not_fit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[PREFIX.size + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleFormatError, match=r"\[header-digest\]"):
        Bundle(path)


@pytest.mark.parametrize("size", [0, 7, PREFIX.size - 1])
def test_rejects_a_file_without_a_whole_prefix(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BundleFormatError, match=rf"\[truncated\] {size} bytes"):
        Bundle(path)


def test_rejects_a_body_that_shrinks_while_it_is_open(path: Path) -> None:
    with Bundle(path) as bundle:
        os.truncate(path, bundle.file_bytes - 1)
        with pytest.raises(BundleFormatError, match=r"\[truncated\]"):
            bundle.check_body()


def test_refuses_a_named_pipe_instead_of_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        Bundle(tmp_path / "pipe")


def test_gives_the_whole_content_it_was_opened_with(path: Path) -> None:
    data = path.read_bytes()
    with Bundle(path) as bundle:
        path.unlink()
        assert bundle.content() == data


def test_writer_refuses_rankings_of_unknown_kernels(content: BundleContent) -> None:
    ranking = replace(content.rankings[0], kernels=(("0" * 64, 1),))
    with pytest.raises(ValueError, match="rankings name unknown kernels"):
        encode_bundle(replace(content, rankings=(ranking,)))


def test_writer_refuses_two_rankings_of_one_problem(content: BundleContent) -> None:
    with pytest.raises(ValueError, match="ranked more than once"):
        encode_bundle(replace(content, rankings=content.rankings[:1] * 2))


def test_of_operators_with_equal_code_the_first_by_name_stands(content: BundleContent) -> None:
    twin = replace(content.kernels[0], operator="a first name")
    both = (
        encode_bundle(replace(content, kernels=(twin, *content.kernels))),
        encode_bundle(replace(content, kernels=(*content.kernels, twin))),
    )
    assert both[0] == both[1]
    assert "a first name" in {kernel.operator for kernel in both[0][1].kernels}


def test_writer_refuses_equal_code_for_different_signatures(content: BundleContent) -> None:
    other = Signature.parse("mm/nn/bf16xbf16/fp32/bf16")
    twin = replace(content.kernels[0], signature=other)
    with pytest.raises(ValueError, match="equal code but compute"):
        encode_bundle(replace(content, kernels=(twin, *content.kernels)))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (
         lambda content: replace(
                content,
                rankings=(
                    replace(
                        content.rankings[0],
                        missing=(CompileFailure(operator="o", reason="", is_transient=False),),
                    ),
                ),
            ), r"failures\[0\]\.reason"),
        (lambda content: replace(content, device="B200\n"), "device"),
        (lambda content: replace(
            content, kernels=(replace(content.kernels[0], operator=""), *content.kernels[1:])),
         r"kernels\[\d+\]\.operator"),
    ],
)  # fmt: skip
def test_writer_refuses_what_the_reader_would(
    content: BundleContent, change: Callable[[BundleContent], BundleContent], path: str
) -> None:
    with pytest.raises(BundleFormatError, match=rf"\[header-field\] {path} must be non-empty"):
        encode_bundle(change(content))


def test_missing_file_and_directory_are_storage_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        Bundle(tmp_path / "absent.nvgemm")
    with pytest.raises(StorageError, match="not a regular file"):
        Bundle(tmp_path)


def test_reads_the_file_it_opened_even_when_that_is_replaced(path: Path) -> None:
    with Bundle(path) as bundle:
        path.unlink()
        path.write_bytes(b"something else")
        for kernel in bundle.header.kernels:
            assert sha256_hex(bundle.payload(kernel)) == kernel.id


def test_threads_can_read_one_bundle(path: Path) -> None:
    failures: list[Exception] = []
    with Bundle(path) as bundle:

        def read_all() -> None:
            try:
                for _ in range(20):
                    for kernel in bundle.header.kernels:
                        assert sha256_hex(bundle.payload(kernel)) == kernel.id
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=read_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["target", "kernels", "rankings", "dictionary", "x"]),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_json_is_a_format_error_never_another(document: Any) -> None:
    with pytest.raises(BundleFormatError):
        decode_header(canonical_json(document), where="x", version=2, body_offset=48, file_bytes=48)


def test_how_and_where_times_were_taken_is_kept_and_optional(
    tmp_path: Path, content: BundleContent
) -> None:
    path = tmp_path / "apart.nvgemm"
    known = {"launches", "gpu_sha256"}
    write_bundle(path, content)
    before = header_of(path.read_bytes())
    assert known.isdisjoint(before["sources"][1]["conditions"]), "as bundles before have it"
    assert {"confirmed_by", "repeated"}.isdisjoint(before["rankings"][1]["measured"])
    with Bundle(path) as bundle:
        conditions = bundle.header.sources[1].conditions
    assert conditions is not None
    assert (conditions.launches, conditions.gpu_sha256) == (BACK_TO_BACK, None)
    gpus = ("a" * 64, "b" * 64)

    def told(ranking: ProblemRanking) -> ProblemRanking:
        if ranking.measured is None:
            return ranking
        found = replace(conditions, launches=APART, gpu_sha256=gpus[0])
        return replace(
            ranking,
            source=replace(ranking.source, conditions=found),
            measured=replace(ranking.measured, confirmed_by=gpus, repeated=120, doubts=()),
        )

    content = replace(content, rankings=tuple(map(told, content.rankings)))
    write_bundle(path, content)
    test_reads_back_what_was_written(path, content)
    assert header_of(path.read_bytes())["sources"][1]["conditions"]["launches"] == "apart"
