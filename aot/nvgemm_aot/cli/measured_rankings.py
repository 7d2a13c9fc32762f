"""Says whether the measured rankings of installed bundles count beside this torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from nvgemm_runtime.bundle.format import Header, Measured, RankingSource
from nvgemm_runtime.matching.device import NO_CUDA, TorchVersions
from nvgemm_runtime.matching.refusals import version_numbers
from nvgemm_runtime.matching.trust import why_aten_is_open

from .printing import count_text

Document = dict[str, Any]


def rankings_document(
    headers: Iterable[Header], gpus: Collection[str], versions: TorchVersions | None
) -> Document:
    """Count the problems whose measured ranking counts here.

    Args:
        headers: Of the installed bundles.
        gpus: Products of this machine; if it has none, measurements of every product are counted.
        versions: The installed torch; None where there is none. Its CUDA version is not compared
            where it is a CPU build, which is a problem of its own.

    Returns:
        ``counting``, how many of them count; and ``measured_with``, how many others were measured
        with each other torch, as ``torch 2.11, CUDA 13.0``.
    """
    counting = 0
    others: Counter[str] = Counter()
    for measured, source in _measurements(headers):
        conditions = source.conditions
        assert conditions is not None  # of a measurement
        if gpus and source.gpu not in gpus:
            continue
        here = versions
        if here is not None and here.cuda == NO_CUDA:
            here = TorchVersions(torch=here.torch, cuda=conditions.cuda)
        if here is None or why_aten_is_open(measured, conditions, here) is None:
            counting += 1
            continue
        release = ".".join(map(str, version_numbers(conditions.torch)[:2]))
        others[f"torch {release}, CUDA {conditions.cuda}"] += 1
    return {"counting": counting, "measured_with": dict(sorted(others.items()))}


def _measurements(headers: Iterable[Header]) -> Iterator[tuple[Measured, RankingSource]]:
    """Rankings that compare kernels with ATen, each with its source."""
    for header in headers:
        for ranking in header.rankings:
            measured, source = ranking.measured, header.sources[ranking.source]
            if measured and measured.aten and source.conditions:
                yield measured, source


def rankings_text(document: Document, torch: str | None) -> str:
    """Print what counts, and the next step where something does not."""
    counting, others = document["counting"], document["measured_with"]
    if not counting and not others:
        return "none: plain torch.compile uses no bundled kernel; on the GPU, run: nvgemm-aot tune"
    parts = [f"{count_text(counting, 'problem')} with this torch"] if counting else []
    if others:
        listed = "; ".join(f"{count_text(n, 'problem')} with {what}" for what, n in others.items())
        parts.append(
            f"{listed}, not used with the installed torch {torch} but under max-autotune; install "
            "that torch, or on the GPU run: nvgemm-aot tune"
        )
    return "; ".join(parts)
