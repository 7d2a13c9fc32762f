"""What the command prints of a tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..tuning.outcome import contender_name
from ..tuning.outcome_json import outcome_json
from .tables import size_text, table

if TYPE_CHECKING:
    from ..tuning.outcome import Outcome
    from ..tuning.tune import Tuned

Document = dict[str, Any]


def tuned_document(tuned: Tuned) -> Document:
    """Describe what was measured and written."""
    pruned = tuned.pruned
    return {
        "suspicion": tuned.suspicion,
        "path": str(tuned.path),
        "bytes": tuned.file_bytes,
        "kernels": len(tuned.header.kernels),
        "problems": {key: _outcome_document(item) for key, item in tuned.outcomes.items()},
        "unmeasured": dict(tuned.unmeasured),
        "broken": dict(tuned.broken),
        "pruned": pruned
        and {
            "dropped": list(pruned.dropped),
            "bytes": tuned.pruned_bytes,
            "declared_loss": pruned.declared_loss,
            "undeclared_loss": pruned.undeclared_loss,
            "unknown_losses": pruned.unknown_losses,
        },
        "state": None if tuned.state is None else str(tuned.state),
        "measured_now": tuned.measured_now,
        "is_complete": tuned.is_complete,
    }


def _outcome_document(outcome: Outcome) -> Document:
    document = outcome_json(outcome)
    conditions = document.pop("conditions")  # but for the date they are the same for all
    return {**document, "date": conditions["date"]}


def tuned_text(document: Document) -> str:
    """A table of the problems, and below it what needs to be known of the new bundle."""
    header = ("problem", "first", "ours, us", "ATen, us", "Triton, us", "ours / ATen", "kernel")
    rows = [_row(key, item) for key, item in document["problems"].items()]
    parts = [] if document["suspicion"] is None else [f"SUSPECT: {document['suspicion']}"]
    parts += [table(rows, header)] if rows else []
    return "\n".join([*parts, *_wrong(document), *_doubts(document), *_written(document)])


def _row(key: str, item: Document) -> list[object]:
    times = {"ATen": item["aten"], "Triton": item["triton"]}
    ours = item["kernels"][0][1:] if item["kernels"] else None
    known = {name: timing for name, timing in {"ours": ours, **times}.items() if timing}
    first = min(known, key=lambda name: known[name][0]) if known else "-"
    ratio = f"{ours[0] / item['aten'][0]:.3f}" if ours and item["aten"] else "-"
    return [
        key,
        first + (" ?" if item["doubts"] else ""),
        *(_text(timing) for timing in (ours, *times.values())),
        ratio,
        item["kernels"][0][0][:12] if ours else "-",
    ]


def _text(timing: list[int] | None) -> str:
    return "-" if timing is None else f"{timing[0] / 1e3:.2f} ± {timing[1] / 1e3:.2f}"


def _wrong(document: Document) -> Iterator[str]:
    faults: dict[str, list[str]] = {}
    for key, item in document["problems"].items():
        for id_, fault in item["wrong"].items():
            faults.setdefault(id_, []).append(f"{key}: {fault}")
    for id_, fault in document["broken"].items():
        faults.setdefault(id_, []).append(fault)
    for id_, texts in faults.items():
        yield f"WRONG: {contender_name(id_)} is thrown out:"
        yield from (f"  {text}" for text in texts)


def _doubts(document: Document) -> Iterator[str]:
    """Problems by why they are uncertain: what disturbs mostly disturbs many."""
    doubted: dict[tuple[str, ...], list[str]] = {}
    for key, item in document["problems"].items():
        if item["doubts"]:
            doubted.setdefault(tuple(item["doubts"]), []).append(key)
    for doubts, keys in doubted.items():
        yield f"uncertain ({len(keys)}), and timed again wherever it is used: {'; '.join(doubts)}"
        yield from (f"  {key}" for key in keys)
    for key, reason in document["unmeasured"].items():
        yield f"not measured: {key}: {reason}"


def _written(document: Document) -> Iterator[str]:
    measured, left = len(document["problems"]), len(document["unmeasured"])
    pruned = document["pruned"]
    if pruned is not None:
        unknown = pruned["unknown_losses"]
        yield (
            f"pruned: kernels dropped: {len(pruned['dropped'])}; bytes saved: "
            f"{size_text(pruned['bytes'])}; speed lost: {_loss(pruned['declared_loss'])} on "
            f"measured problems, {_loss(pruned['undeclared_loss'])} on others like them"
            + (
                f" (not known of {unknown}, whose own kernels alone were measured)"
                if unknown
                else ""
            )
        )
    yield (
        f"{document['path']}: written, {measured} of {measured + left} problems measured, "
        f"{document['kernels']} kernels, {size_text(document['bytes'])}"
    )
    state = document["state"]
    if state is not None and not document["is_complete"]:
        yield f"what was measured is kept in {state}; the same command goes on"
    elif state is not None and document["measured_now"] == 0:
        yield (
            f"all of that was measured already, and is kept in {state}; to measure it anew, name "
            "another output"
        )


def _loss(ratio: float | None) -> str:
    return "an unknown part" if ratio is None else f"{(ratio - 1) * 100:.1f} %"
