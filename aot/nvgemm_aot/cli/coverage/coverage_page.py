"""Writes coverage as one HTML page without network or scripts; its chart is inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element, SubElement, tostring

from ...manifest.parse import Manifest
from ...workload.coverage import SERVED, GemmCoverage, Status, TargetCoverage, Weight
from ..terminal.printing import count_text, percent_text
from .names import WEIGHT_NAMES, ranked_as_text

_STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --faint: #59636e; --grid: #e4e7eb;
  --declared: #0072b2; --signature: #56b4e9; --missed: #d55e00; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --ink: #e8eaed; --faint: #9aa4af; --grid: #2b3138;
  --declared: #2f95d8; --signature: #8fd0f7; --missed: #ff7a33; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; }
p { margin: 0.25rem 0; } .faint { color: var(--faint); }
table { display: block; overflow-x: auto; border-collapse: collapse; margin: 0.75rem 0;
  font-size: 14px; }
th, td { padding: 0.2rem 0.9rem 0.2rem 0; text-align: left; vertical-align: top;
  white-space: nowrap; border-bottom: 1px solid var(--grid); }
.number { text-align: right; } .why { white-space: normal; overflow-wrap: anywhere; }
.chart { display: block; width: 100%; height: auto; font-size: 13px; }
.chart text { fill: var(--faint); } .grid { stroke: var(--grid); stroke-width: 1; }
.legend span { margin-right: 1.5rem; white-space: nowrap; }
.key { width: 1em; height: 1em; margin-right: 0.4em; vertical-align: -0.125em; }
.marker { stroke: var(--paper); stroke-width: 1; fill-opacity: 0.8; }
circle.declared { fill: var(--declared); }
polygon.signature { fill: var(--signature); }
polygon.missed { fill: var(--missed); }
"""

_NAMES = {
    Status.DECLARED: "declared",
    Status.SIGNATURE: "served by signature",
    Status.MISSED: "missed",
}


def coverage_page(manifest: Manifest, targets: Sequence[TargetCoverage], by: Weight) -> bytes:
    """Makes the page: for each target the percentages, a chart of the shapes, and the GEMMs.

    Tables are sorted by ``by``, heaviest first.
    """
    html = Element("html", {"lang": "en"})
    head = SubElement(html, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width"})
    _add(head, "title", f"Coverage of {manifest.name}")
    _add(head, "style", _STYLE)
    body = SubElement(html, "body")
    _add(body, "h1", f"Coverage of {manifest.name}")
    if manifest.description:
        _add(body, "p", manifest.description)
    for target in targets:
        _add_target(SubElement(body, "section"), target, by)
    text = "<!DOCTYPE html>\n" + tostring(html, encoding="unicode", method="html") + "\n"
    return text.encode("utf-8", errors="replace")  # file names may not be valid text


def _add_target(section: Element, target: TargetCoverage, by: Weight) -> None:
    name = f"{target.target.target.key} on {target.target.device.name}"
    _add(section, "h2", name)
    _add_percentages(section, target)
    _add_legend(section, target)
    section.append(draw_chart(target.gemms, f"m against n times k of the GEMMs of {name}"))
    _add_caption(section, target)
    _add_gemms(section, target, by)
    _add_list(section, "Bundles that this GPU can use", target.bundles)
    _add_list(section, "Bundles and kernels that it cannot use", target.refusals)


def _add_percentages(section: Element, target: TargetCoverage) -> None:
    rows = _add_table(section, ["", "covered", *_NAMES.values()])
    for weight in Weight:
        row = SubElement(rows, "tr")
        _add(row, "th", f"by {WEIGHT_NAMES[weight.value]}")
        for statuses in (SERVED, *({status} for status in _NAMES)):
            _add(row, "td", percent_text(target.percent(weight, statuses)), "number")


def _add_legend(section: Element, target: TargetCoverage) -> None:
    legend = SubElement(section, "p", {"class": "legend"})
    for status, name in _NAMES.items():
        text = f"{name} ({target.weight(Weight.PROBLEMS, {status})})"
        _add_key(SubElement(legend, "span"), status, text)


def _add_caption(section: Element, target: TargetCoverage) -> None:
    caption = (
        "Each marker is a GEMM. Its area is proportional to its recorded count, except for the "
        "smallest. GEMMs with equal m and n · k are side by side. Point at a marker for details."
    )
    unsized = sum(gemm.sizes is None for gemm in target.gemms)
    if unsized:
        caption += f" {unsized} with unknown sizes are only in the table, with 0 FLOPs."
    _add(section, "p", caption, "faint")


def _add_gemms(section: Element, target: TargetCoverage, by: Weight) -> None:
    header = ["GEMM", "found as", "count", "% of count", "% of FLOPs", "ranked as, or reason"]
    rows = _add_table(section, header)
    totals = {weight: target.weight(weight) for weight in (Weight.COUNT, Weight.FLOPS)}
    for gemm in target.heaviest(by, frozenset(Status)):
        row = SubElement(rows, "tr", {"class": gemm.status.value})
        _add(row, "td", gemm.gemm)
        _add_key(SubElement(row, "td"), gemm.status, gemm.status.value)
        _add(row, "td", str(gemm.count), "number")
        for weight, total in totals.items():
            _add(row, "td", percent_text(100 * gemm.weight(weight) / total), "number")
        _add(row, "td", _ranking_or_reason(gemm), "why")


def _ranking_or_reason(gemm: GemmCoverage) -> str:
    if gemm.ranked_as is None:
        return gemm.reasons[0]
    return ranked_as_text(gemm.gemm, gemm.ranked_as.key, is_split=gemm.is_split)


def _add_list(section: Element, title: str, lines: Sequence[str]) -> None:
    if lines:
        _add(section, "p", f"{title}:")
        entries = SubElement(section, "ul")
        for line in lines:
            _add(entries, "li", line)


def _add_table(section: Element, header: Sequence[str]) -> Element:
    """Adds a table with its header; returns the parent for its rows."""
    table = SubElement(section, "table")
    row = SubElement(SubElement(table, "thead"), "tr")
    for title in header:
        _add(row, "th", title)
    return SubElement(table, "tbody")


def _add(parent: Element, tag: str, text: str, kind: str = "") -> None:
    SubElement(parent, tag, {"class": kind} if kind else {}).text = text


_WIDTH, _HEIGHT = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 872, 16, 468
"""Edges of the plot within the chart; labels are outside."""

_LEAST_RADIUS, _USUAL_RADIUS, _MOST_RADIUS = 3.5, 5.0, 14.0
"""Circle radii: for the rarest problems, for equally frequent ones, and for the most frequent."""

_MOST_TICKS = 16

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Maps the binary logarithm of a size to a coordinate."""

    least: int
    most: int
    start: float
    end: float

    @property
    def octave(self) -> float:
        """Distance from a size to its double; negative if larger sizes are higher up."""
        return (self.end - self.start) / (self.most - self.least)

    def coordinate(self, size: int) -> float:
        """Returns a size's coordinate."""
        return self.start + (math.log2(size) - self.least) * self.octave

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yields coordinates and labels for powers of two, from 1 on."""
        step = -(-(self.most - self.least) // _MOST_TICKS)
        for power in range(max(self.least, 0), self.most + 1, step):
            high = f"2{str(power).translate(_SUPERSCRIPTS)}"
            yield self.coordinate(2**power), str(2**power) if power <= 14 else high


def draw_chart(gemms: Iterable[GemmCoverage], label: str) -> Element:
    """Draws a marker for each GEMM with known sizes, at its m and n * k, with a tooltip.

    The colours come from the classes ``declared``, ``signature`` and ``missed``. At least one GEMM
    has known sizes. ``label`` is for screen readers.
    """
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    attributes = {"class": "chart", "viewBox": box, "role": "img", "aria-label": label}
    chart = Element("svg", attributes)
    sized = [(gemm, gemm.sizes) for gemm in gemms if gemm.sizes is not None]
    ms = _make_axis([sizes.m for _, sizes in sized], _LEFT, _RIGHT)
    nks = _make_axis([sizes.n * sizes.k for _, sizes in sized], _BOTTOM, _TOP)
    _draw_axes(chart, ms, nks)
    radii = _radii([gemm.count for gemm, _ in sized])
    positions: dict[tuple[int, int], list[tuple[float, GemmCoverage]]] = {}
    for radius, (gemm, sizes) in zip(radii, sized):
        positions.setdefault((sizes.m, sizes.n * sizes.k), []).append((radius, gemm))
    markers = []
    for (m, nk), group in positions.items():
        across = _side_by_side([radius for radius, _ in group], ms.octave)
        for (radius, gemm), shift in zip(group, across):
            markers.append((radius, ms.coordinate(m) + shift, nks.coordinate(nk), gemm))
    # Small markers last, so that none is hidden under a large one.
    for radius, x, y, gemm in sorted(markers, key=lambda marker: -marker[0]):
        SubElement(_marker(chart, gemm.status, x, y, radius), "title").text = _describe(gemm)
    return chart


def _add_key(parent: Element, status: Status, text: str) -> None:
    """Adds a single marker, as in a legend, followed by a text."""
    attributes = {"class": "key", "viewBox": "0 0 16 16", "aria-hidden": "true"}
    key = SubElement(parent, "svg", attributes)
    _marker(key, status, 8, 8, 6)
    key.tail = text


def _describe(gemm: GemmCoverage) -> str:
    """Describes a GEMM and its kernels, in lines."""
    times = count_text(gemm.count, "time")
    lines = [gemm.gemm, f"recorded {times}, {gemm.weight(Weight.FLOPS):.3g} FLOPs"]
    if gemm.ranked_as is None:
        return "\n".join([*lines, "missed", *gemm.reasons])
    served = f"{gemm.status.value}, {count_text(gemm.kernels, 'kernel')}"
    if gemm.ranked_as != gemm.problem:
        served += f" ranked as for {gemm.ranked_as.key}"
    if gemm.is_split:
        served += ", and torch adds"
    return "\n".join([*lines, served])


def _make_axis(sizes: Sequence[int], start: float, end: float) -> _Axis:
    """Returns an axis that extends at least half an octave beyond the sizes."""
    least = math.floor(math.log2(min(sizes)) - 0.5)
    return _Axis(least=least, most=math.ceil(math.log2(max(sizes)) + 0.5), start=start, end=end)


def _draw_axes(chart: Element, ms: _Axis, nks: _Axis) -> None:
    for x, text in ms.ticks():
        _add_line(chart, x1=x, y1=_TOP, x2=x, y2=_BOTTOM)
        _add_text(chart, x, _BOTTOM + 20, text)
    for y, text in nks.ticks():
        _add_line(chart, x1=_LEFT, y1=y, x2=_RIGHT, y2=y)
        _add_text(chart, _LEFT - 8, y + 4, text, anchor="end")
    _add_text(chart, (_LEFT + _RIGHT) / 2, _HEIGHT - 8, "m")
    middle = (_TOP + _BOTTOM) / 2
    name = _add_text(chart, 14, middle, "n · k")
    name.set("transform", f"rotate(-90 14 {middle:g})")


def _radii(counts: Sequence[int]) -> list[float]:
    """Returns circle radii with areas proportional to the counts, except for the rarest."""
    most = max(counts)
    if most == min(counts):
        return [_USUAL_RADIUS] * len(counts)
    return [max(_LEAST_RADIUS, _MOST_RADIUS * math.sqrt(count / most)) for count in counts]


def _side_by_side(radii: Sequence[float], most_width: float) -> Iterator[float]:
    """Yields offsets that spread markers side by side around a common position, within a width."""
    steps = [0.0, *((left + right) for left, right in pairwise(radii))]
    width = sum(steps)
    scale = min(1.0, most_width / width) if width else 1.0
    shift = -width * scale / 2
    for step in steps:
        shift += step * scale
        yield shift


def _marker(parent: Element, status: Status, x: float, y: float, radius: float) -> Element:
    """Draws a status's shape with the area of a circle of ``radius``."""
    name = {"class": f"marker {status.value}"}
    if status is Status.DECLARED:
        return SubElement(
            parent, "circle", {**name, "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": f"{radius:.1f}"}
        )
    if status is Status.SIGNATURE:
        half = radius * math.sqrt(math.pi) / 2
        corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
    else:
        side = radius * math.sqrt(4 * math.pi / math.sqrt(3))
        height = side * math.sqrt(3) / 2  # the centre is a third of it above the base
        corners = [(0, -2 * height / 3), (side / 2, height / 3), (-side / 2, height / 3)]
    points = " ".join(f"{x + across:.1f},{y + down:.1f}" for across, down in corners)
    return SubElement(parent, "polygon", {**name, "points": points})


def _add_line(parent: Element, **ends: float) -> None:
    attributes = {name: f"{coordinate:.1f}" for name, coordinate in ends.items()}
    SubElement(parent, "line", {"class": "grid", **attributes})


def _add_text(parent: Element, x: float, y: float, text: str, *, anchor: str = "middle") -> Element:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    element = SubElement(parent, "text", attributes)
    element.text = text
    return element
