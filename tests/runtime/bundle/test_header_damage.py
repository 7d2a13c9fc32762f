"""Headers with anything missing or replaced: refused by a rule of the format, or of use."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bundle import header_of

from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.decode import decode_header
from nvgemm_runtime.bundle.encode import design_json
from nvgemm_runtime.bundle.format import PREFIX, Header, canonical_json
from nvgemm_runtime.bundle.ranking_entries import CompileFailure, Scope, UnservedReason
from nvgemm_runtime.errors import BundleFormatError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView
from repository import TESTS
from synthetic_content import synthetic_content
from synthetic_facts import B200, H200

Place = tuple[Any, ...]


def _full_bundle() -> bytes:
    """A bundle of version 2 whose header has every field there is."""
    content = synthetic_content(kernels=3, problems=2)
    failure = CompileFailure(operator="o", reason="killed", is_transient=True)
    first, *others = content.rankings
    unserved = Problem.parse("mm/nn/bf16xbf16/fp32/bf16/m16n4100k4096")
    return encode_bundle(
        replace(
            content,
            rankings=(
                replace(first, missing=(failure,)),
                *(replace(other, is_declared=False) for other in others),
            ),
            unserved={unserved: UnservedReason(text="no", scope=Scope.PROBLEM)},
        )
    )[0]


FORMAT_1 = TESTS / "data/format-1/synthetic.nvgemm"
BUNDLES = {1: FORMAT_1.read_bytes(), 2: _full_bundle()}
DOCUMENTS = {version: header_of(data) for version, data in BUNDLES.items()}


def places(document: Any, before: Place = ()) -> list[Place]:
    """Where each value of a document is, at any depth."""
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [
        found for key, value in inner for found in [(*before, key), *places(value, (*before, key))]
    ]


PLACES = {version: places(document) for version, document in DOCUMENTS.items()}


def holder(document: Any, place: Place) -> Any:
    for key in place[:-1]:
        document = document[key]
    return document


def read(document: Any, version: int) -> Header | None:
    """The header, put to use; None where it breaks a rule."""
    data = BUNDLES[version]
    try:
        header = decode_header(
            canonical_json(document),
            where="a bundle",
            version=version,
            body_offset=PREFIX.size + PREFIX.unpack(data[: PREFIX.size])[2],
            file_bytes=len(data),
        )
    except BundleFormatError:
        return None
    for facts in (B200, H200):
        index = Index([BundleView(name="damaged", header=header)], facts)
        assert not any("internal error" in refusal for refusal in index.refusals)
        for ranking in header.rankings:
            index.match(ranking.problem, 16)
    return header


@pytest.mark.parametrize("version", [1, 2])
def test_undamaged_headers_are_read(version: int) -> None:
    assert read(DOCUMENTS[version], version) is not None


REQUIRED = {
    "target": ("arch", "platform", "cuda"),
    "kernels": (
        *("id", "span", "signature", "provider", "operator", "design"),
        *("alignment_bytes", "workspace_bytes", "calling_convention"),
    ),
    "sources": ("kind", "by", "gpu"),
    "rankings": ("problem", "source", "kernels"),
    "unserved": ("problem", "reason"),
    "failures": ("operator", "reason", "is_transient"),
    "dictionary": ("span", "sha256"),
}
DESIGN = ("tile", "ctas_per_tile", "cluster", "fallback_cluster", "scheduler", "cluster_limits")
TOP = (
    *("target", "device", "generator", "build_key", "toolchain", "body_sha256", "dictionary"),
    *("kernels", "sources", "rankings", "imports"),
)


@pytest.mark.parametrize(
    "place",
    [
        *((name,) for name in TOP),
        *(
            (name, field) if isinstance(DOCUMENTS[2][name], dict) else (name, 0, field)
            for name, fields in REQUIRED.items()
            for field in fields
        ),
        *(("kernels", 0, "design", field) for field in DESIGN),
        *(("sources", 1, "conditions", field) for field in ("driver", "torch", "cuda", "date")),
        *(
            ("rankings", 1, "measured", field)
            for field in ("spreads_ns", "aten", "triton", "doubts")
        ),
    ],
    ids=lambda place: ".".join(map(str, place)),
)
def test_a_header_without_a_required_field_is_refused_by_its_name(place: Place) -> None:
    document = copy.deepcopy(DOCUMENTS[2])
    del holder(document, place)[place[-1]]
    with pytest.raises(BundleFormatError, match=rf"\[header-field\] .* lacks {place[-1]}, which"):
        decode_header(
            canonical_json(document), where="a bundle", version=2, body_offset=48, file_bytes=48
        )


@pytest.mark.parametrize("version", [1, 2])
def test_whatever_is_missing_is_a_broken_rule_or_no_matter(version: int) -> None:
    for place in PLACES[version]:
        document = copy.deepcopy(DOCUMENTS[version])
        del holder(document, place)[place[-1]]
        read(document, version)


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [[], {}, [[]], [{}], [None], ["x"], {"requires": ["x"]}, {"requires": {}}, 2**63, -1, ""]
    )
)


@pytest.mark.slow
@settings(max_examples=400)
@given(st.data())
def test_whatever_stands_in_place_of_a_value_is_a_broken_rule_or_no_matter(
    data: st.DataObject,
) -> None:
    version = data.draw(st.sampled_from([1, 2]))
    document = copy.deepcopy(DOCUMENTS[version])
    for place in data.draw(st.lists(st.sampled_from(PLACES[version]), min_size=1, max_size=3)):
        elsewhere = data.draw(st.sampled_from(PLACES[version]))
        other = holder(DOCUMENTS[version], elsewhere)[elsewhere[-1]]
        value = data.draw(VALUES | st.just(other))
        try:
            target = holder(document, place)
            if isinstance(target, dict) and not isinstance(place[-1], str):
                continue  # an object stands where the list was, and JSON has no such name
            target[place[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # what held it is gone
    read(document, version)


@settings(max_examples=200)
@given(st.data())
def test_members_that_are_added_anywhere_are_a_broken_rule_or_no_matter(
    data: st.DataObject,
) -> None:
    version = data.draw(st.sampled_from([1, 2]))
    document = copy.deepcopy(DOCUMENTS[version])
    place = data.draw(st.sampled_from(PLACES[version]))
    inner = holder(document, place)[place[-1]]
    name = data.draw(
        st.sampled_from(["requires", "missing", "measured", "conditions", "scope", "imports", "x"])
    )
    if isinstance(inner, dict):
        inner[name] = data.draw(VALUES)
    elif isinstance(inner, list):
        inner.append(data.draw(VALUES))
    read(document, version)


@pytest.mark.parametrize("swapped", [True, False, None])
def test_whether_a_kernel_is_swapped_may_be_said(swapped: bool | None) -> None:
    document = copy.deepcopy(DOCUMENTS[2])
    if swapped is not None:
        document["kernels"][0]["design"]["swapped"] = swapped
    header = read(document, 2)
    assert header is not None
    assert header.kernels[0].design.swapped is bool(swapped)
    assert ("swapped" in design_json(header.kernels[0].design)) is bool(swapped)


def test_swapped_must_be_true_or_false() -> None:
    document = copy.deepcopy(DOCUMENTS[2])
    document["kernels"][0]["design"]["swapped"] = 1
    with pytest.raises(BundleFormatError, match=r"swapped must be true or false \(got 1\)"):
        decode_header(
            canonical_json(document), where="a bundle", version=2, body_offset=48, file_bytes=48
        )
