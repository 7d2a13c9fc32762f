"""Describes the files that ``nvgemm-aot confirm`` wrote, and whether they count here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nvgemm_runtime.installed.confirmed_files import ConfirmedFile
from nvgemm_runtime.matching.confirmed_rankings import why_elsewhere
from nvgemm_runtime.matching.device import TorchVersions
from nvgemm_runtime.matching.thresholds import gains_enough

Document = dict[str, Any]


def confirmed_documents(
    files: Iterable[ConfirmedFile], gpus: Sequence[str], versions: TorchVersions | None
) -> list[Document]:
    """Describes files with confirmations, in order of preference.

    Args:
        files: Files found.
        gpus: GPU products in this machine.
        versions: Versions of torch; None without torch.

    Returns:
        An entry per file. ``problem``: why it cannot be used, or None. ``elsewhere``: why it does
        not count on these GPUs with this torch, or None. ``problems``: number of measured
        problems. ``gaining``: those in which a kernel gains the least that can count.
    """
    return [_document(file, gpus, versions) for file in files]


def _document(file: ConfirmedFile, gpus: Sequence[str], versions: TorchVersions | None) -> Document:
    document = {"path": str(file.path), "origin": file.origin, "problem": file.problem}
    confirmations = file.confirmations
    if confirmations is None:
        return document
    conditions = confirmations.conditions
    return {
        **document,
        "gpu": confirmations.gpu,
        "torch": conditions.torch,
        "cuda": conditions.cuda,
        "date": conditions.date,
        "elsewhere": "torch is not installed"
        if versions is None
        else why_elsewhere(confirmations, gpus, versions),
        "problems": len(confirmations.problems),
        "gaining": sum(
            not times.doubts
            and gains_enough(next(iter(times.kernels.values())).time_ns, times.aten)
            for times in confirmations.problems.values()
        ),
    }
