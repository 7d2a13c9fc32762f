"""Counts the problems for which plain torch.compile uses installed measured rankings here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.matching.device import NO_CUDA, TorchVersions
from nvgemm_runtime.matching.dispatch import CONFIRM_STEP
from nvgemm_runtime.matching.refusals import version_numbers
from nvgemm_runtime.matching.trust import why_another_release
from nvgemm_runtime.settings import REPEATED_VARIABLE, counts_repeated_rankings, fuses_gates

from ...rankings.counting import Counted, count_by_product
from ..terminal.printing import count_text

Document = dict[str, Any]


@dataclass
class _Product:
    """Sums over bundles, for one GPU product."""

    measured: int = 0
    used: int = 0
    used_with_setting: int = 0
    measured_with: Counter[str] = field(default_factory=Counter)


def rankings_document(
    headers: Iterable[Header], gpus: Collection[str], versions: TorchVersions | None
) -> list[Document]:
    """Counts the problems for which plain torch.compile uses measured kernels here, by product.

    Args:
        headers: Headers of the installed bundles.
        gpus: GPU products in this machine; if empty, counts measurements for every product.
        versions: The installed torch, or None. Its CUDA version is not compared for a CPU build,
            which is a problem of its own.

    Returns:
        An entry per measured product. ``measured``: number of problems measured with this torch.
        ``used``: those for which default mode uses kernels (`matching.evidence`), with gated
        products if the user allows fusing them.
        ``used_with_setting``: the same if repeated rankings count like confirmed ones.
        ``measured_with``: number of problems measured with each other torch, as ``torch 2.11, CUDA
        13.0``.
    """
    products: dict[str, _Product] = {}
    for counted in (count for header in headers for count in count_by_product(header)):
        if gpus and counted.gpu not in gpus:
            continue
        product = products.setdefault(counted.gpu, _Product())
        if _counts_with_this_torch(counted, versions):
            product.measured += counted.measured
            by_default = counted.confirmed + counted.repeated
            fused = counted.if_fused if fuses_gates() else 0
            product.used += fused
            product.used += counted.with_setting if counts_repeated_rankings() else by_default
            product.used_with_setting += counted.with_setting + fused
        else:
            release = ".".join(map(str, version_numbers(counted.torch)[:2]))
            product.measured_with[f"torch {release}, CUDA {counted.cuda}"] += counted.measured
    return [
        {"gpu": gpu, **vars(product), "measured_with": dict(sorted(product.measured_with.items()))}
        for gpu, product in sorted(products.items())
    ]


def _counts_with_this_torch(counted: Counted, versions: TorchVersions | None) -> bool:
    if versions is None:
        return True
    cuda = counted.cuda if versions.cuda == NO_CUDA else versions.cuda
    here = TorchVersions(torch=versions.torch, cuda=cuda)
    return why_another_release(counted.torch, counted.cuda, here) is None


NONE = f"none: plain torch.compile uses no bundled kernel; {CONFIRM_STEP}"


def rankings_text(document: Document, torch: str | None, *, is_confirmed: bool = False) -> str:
    """Renders one product's counts, and the next step if some measurements do not count.

    ``is_confirmed`` is True if confirmations on the product count with this torch.
    """
    measured, used, others = (document[key] for key in ("measured", "used", "measured_with"))
    parts = []
    if measured:
        more = document["used_with_setting"]
        setting = f" ({more} with {REPEATED_VARIABLE}=1)" if more > used else ""
        parts.append(
            f"plain torch.compile uses kernels for {used} of {count_text(measured, 'problem')} "
            f"measured with this torch{setting}"
        )
    if others:
        listed = "; ".join(
            f"{count_text(n, 'problem')} with {release}" for release, n in others.items()
        )
        only = "under max-autotune, and otherwise where confirmed rankings count"
        if not is_confirmed:
            only = "under max-autotune only; install that torch, or " + CONFIRM_STEP
        parts.append(f"{listed}, used with the installed torch {torch} {only}")
    return "; ".join(parts)
