"""The page of coverage: well-formed, self-contained, one marker a GEMM, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from nvgemm_aot.cli.coverage.coverage_page import coverage_page, draw_chart
from nvgemm_aot.manifest.parse import Manifest
from nvgemm_aot.workload.coverage import GemmCoverage, TargetCoverage, Weight, cover
from nvgemm_runtime.gemm.problem import MAX_EXTENT
from recorded_gemms import (
    DECLARED,
    OTHER_SIZE,
    OTHER_TYPE,
    RECORDING,
    content,
    problem,
    recording,
    view,
)

VOID = {"meta"}


class Page(HTMLParser):
    """Reads a page, and fails where an element is not closed in its place."""

    def __init__(self, text: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None], bool]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text.decode())
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        in_chart = any(held.get("class") == "chart" for _, held in self.open)
        self.elements.append((tag, dict(attrs), in_chart))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1][0] if self.open else "", data))

    @property
    def markers(self) -> list[str]:
        """Classes of the markers in charts."""
        return [
            str(attributes["class"]).removeprefix("marker ")
            for _, attributes, in_chart in self.elements
            if in_chart and "marker" in str(attributes.get("class"))
        ]

    def said(self, tag: str) -> list[str]:
        return [text for at, text in self.texts if at == tag]


def page(manifest: Manifest, targets: Sequence[TargetCoverage]) -> Page:
    return Page(coverage_page(manifest, targets, Weight.COUNT))


def test_every_gemm_is_one_marker_with_its_story() -> None:
    shown = page(RECORDING, cover(RECORDING, [view(content())]))
    assert sorted(shown.markers) == ["declared", "missed", "signature"]
    tooltips = shown.said("title")[1:]
    assert len(tooltips) == 3
    by_name = {text.splitlines()[0]: text.splitlines()[1:] for text in tooltips}
    flops = f"{3 * 2 * 16 * 64 * 64:.3g}"
    assert by_name[DECLARED.key] == [f"recorded 3 times, {flops} FLOPs", "declared, 1 kernel"]
    assert by_name[OTHER_SIZE.key][1] == f"signature, 1 kernel ranked as for {DECLARED.key}"
    assert by_name[OTHER_TYPE.key][1] == "missed"
    assert "no bundled kernel computes" in by_name[OTHER_TYPE.key][2]


def test_percentages_and_table_are_those_of_the_target() -> None:
    shown = page(RECORDING, cover(RECORDING, [view(content())]))
    cells = shown.said("td")
    assert cells[:12] == [
        *("66.6 %", "33.3 %", "33.3 %", "33.3 %"),
        *("50.0 %", "37.5 %", "12.5 %", "50.0 %"),
        *("55.5 %", "33.3 %", "22.2 %", "44.4 %"),
    ]
    assert cells[12:17] == [OTHER_TYPE.key, "missed", "4", "50.0 %", "44.4 %"]
    assert cells[-6:] == [OTHER_SIZE.key, "signature", "1", "12.5 %", "22.2 %", "m16n64k64"]


def test_everything_is_escaped() -> None:
    evil = "</title></style><script>alert('1')</script>&amp;\""
    manifest = recording([(DECLARED, 1), (OTHER_TYPE, 1)], description=evil)
    bias = GemmCoverage(gemm=evil, problem=None, sizes=None, count=1, reasons=(evil,))
    targets = cover(
        manifest, [view(content(), evil)], unusable=[f"{evil}\udcff"], undeclarable=[bias]
    )
    shown = page(manifest, targets)
    assert "script" not in {tag for tag, _, _ in shown.elements}
    assert evil in shown.said("p"), "the description"
    assert shown.said("td").count(evil) == 2, "the GEMM and the reason"
    assert shown.said("li") == [evil, f"{evil}?"]
    assert len(shown.markers) == 2, "what has no sizes is in the table alone"
    assert any("1 with unknown sizes" in text for text in shown.said("p"))


def test_the_page_needs_nothing_else() -> None:
    shown = page(RECORDING, cover(RECORDING, [view(content())]))
    for tag, attributes, _ in shown.elements:
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "image"}
        assert not attributes.keys() & {"src", "href", "xlink:href", "style", "onclick"}
    style = "".join(shown.said("style"))
    assert "prefers-color-scheme: dark" in style
    assert "url(" not in style
    assert "@import" not in style


def positions(manifest: Manifest) -> list[tuple[float, float, float]]:
    """x, y and radius of the circles, in drawing order."""
    [target] = cover(manifest, [view(content(*(one.problem for one in manifest.declared)))])
    return [
        (float(circle.attrib["cx"]), float(circle.attrib["cy"]), float(circle.attrib["r"]))
        for circle in draw_chart(target.gemms, "").iter("circle")
    ]


def test_a_doubled_size_is_an_octave_away() -> None:
    by_m = sorted(positions(recording([(problem(m), 1) for m in (1, 2, 4, 64)])))
    steps = [right[0] - left[0] for left, right in pairwise(by_m)]
    assert steps == pytest.approx([steps[0], steps[0], 4 * steps[0]], abs=0.3)
    assert len({y for _, y, _ in by_m}) == 1
    by_nk = [y for _, y, _ in positions(recording([(problem(1, n=n), 1) for n in (64, 128)]))]
    assert by_nk[1] < by_nk[0], "larger is higher"


def test_areas_are_as_counts_and_small_markers_are_drawn_last() -> None:
    drawn = positions(recording([(problem(1), 25), (problem(2), 100), (problem(4), 1)]))
    radii = [radius for _, _, radius in drawn]
    assert radii[0] == 2 * radii[1], "a quarter of the area"
    assert radii == sorted(radii, reverse=True)
    assert radii[2] > radii[0] / 10, "the rarest are still seen"


def test_gemms_of_one_place_stand_side_by_side() -> None:
    together = [problem(16, n=64, k=128), problem(16, n=128, k=64)]
    alone = positions(recording([(together[0], 1)]))[0]
    left, right = sorted(positions(recording([(one, 1) for one in together])))
    assert left[1] == right[1]
    assert right[0] - left[0] >= left[2] + right[2] - 0.2, "they do not overlap"
    assert (left[0] + right[0]) / 2 == pytest.approx(alone[0], abs=0.2)


@pytest.mark.parametrize("size", [1, MAX_EXTENT])
def test_the_least_and_the_largest_sizes_are_within_the_picture(size: int) -> None:
    manifest = recording([(problem(size, n=size, k=size), 10**9)])
    [target] = cover(manifest, [])
    chart = draw_chart(target.gemms, "label")
    assert chart.attrib["aria-label"] == "label"
    _, _, width, height = map(float, chart.attrib["viewBox"].split())
    [marker] = [one for one in chart if "marker" in one.attrib.get("class", "")]
    for corner in marker.attrib["points"].split():
        x, y = map(float, corner.split(","))
        assert 0 < x < width
        assert 0 < y < height
    labels = [text.text for text in chart.iter("text")]
    assert len(labels) > 4
    assert len(set(labels)) == len(labels) or size == 1
