"""Coverage as one page that needs nothing else: no network, no script, pictures inline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from ..manifest.parse import Manifest
from ..workload.coverage import SERVED, GemmCoverage, Status, TargetCoverage, Weight
from .coverage_chart import draw_chart, draw_key
from .render_coverage import WEIGHT_NAMES
from .tables import percent_text

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

_ALL = frozenset(Status)


def coverage_page(manifest: Manifest, targets: Sequence[TargetCoverage], by: Weight) -> bytes:
    """Make the page: for each target the percentages, the picture of the shape space, the table.

    Args:
        manifest: What was asked for.
        targets: What is covered.
        by: What tables are sorted by, most first.
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
    return text.encode("utf-8", errors="replace")  # names of files may be no text


def _add_target(section: Element, target: TargetCoverage, by: Weight) -> None:
    name = f"{target.target.target.key} on {target.target.device.name}"
    _add(section, "h2", name)
    _add_percentages(section, target)
    _add_legend(section, target)
    section.append(draw_chart(target.gemms, f"m against n times k of the GEMMs of {name}"))
    _add_caption(section, target)
    _add_gemms(section, target, by)
    _add_bundles(section, target)


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
        entry = SubElement(legend, "span")
        key = draw_key(status)
        key.tail = f"{name} ({target.weight(Weight.PROBLEMS, {status})})"
        entry.append(key)


def _add_caption(section: Element, target: TargetCoverage) -> None:
    caption = (
        "Each marker is a GEMM, its area in proportion to how often it was recorded (but for the "
        "smallest). GEMMs of equal m and n · k stand side by side. Point at one to see what it is."
    )
    unsized = sum(gemm.sizes is None for gemm in target.gemms)
    if unsized:
        caption += f" {unsized} of unknown sizes are in the table alone, with 0 FLOPs."
    _add(section, "p", caption, "faint")


def _add_gemms(section: Element, target: TargetCoverage, by: Weight) -> None:
    header = ["GEMM", "found as", "count", "% of count", "% of FLOPs", "ranked as, or why not"]
    rows = _add_table(section, header)
    totals = {weight: target.weight(weight) for weight in (Weight.COUNT, Weight.FLOPS)}
    for gemm in target.heaviest(by, _ALL):
        row = SubElement(rows, "tr", {"class": gemm.status.value})
        _add(row, "td", gemm.gemm)
        found = SubElement(row, "td")
        key = draw_key(gemm.status)
        key.tail = gemm.status.value
        found.append(key)
        _add(row, "td", str(gemm.count), "number")
        for weight, total in totals.items():
            _add(row, "td", percent_text(100 * gemm.weight(weight) / total), "number")
        _add(row, "td", _explanation(gemm), "why")


def _explanation(gemm: GemmCoverage) -> str:
    if gemm.ranked_as is None:
        return gemm.reasons[0]
    if gemm.problem is None or gemm.ranked_as == gemm.problem:
        return ""
    if gemm.is_split:
        return f"{gemm.ranked_as.key}, and torch adds"
    signature, _, sizes = gemm.ranked_as.key.rpartition("/")
    return sizes if signature == gemm.problem.signature.key else gemm.ranked_as.key


def _add_bundles(section: Element, target: TargetCoverage) -> None:
    _add_list(section, "Bundles that this GPU can use", target.bundles)
    _add_list(section, "Bundles, or kernels of them, that it cannot use", target.refusals)


def _add_list(section: Element, title: str, items: Iterable[str]) -> None:
    lines = list(items)
    if lines:
        _add(section, "p", f"{title}:")
        entries = SubElement(section, "ul")
        for line in lines:
            _add(entries, "li", line)


def _add_table(section: Element, header: Sequence[str]) -> Element:
    """Add a table with its header; returns where its rows go."""
    table = SubElement(section, "table")
    row = SubElement(SubElement(table, "thead"), "tr")
    for title in header:
        _add(row, "th", title)
    return SubElement(table, "tbody")


def _add(parent: Element, tag: str, text: str, kind: str = "") -> None:
    SubElement(parent, tag, {"class": kind} if kind else {}).text = text
