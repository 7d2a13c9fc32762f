"""Which bundled kernels to offer for a GEMM that Inductor compiles."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import device_facts
from ..format import Kernel
from ..installation import INSTALLATION
from ..match import Match, Miss
from ..operands import Request


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kernel that joins the choices.

    Attributes:
        kernel: Its entry.
        origin: The distribution and version that brought it, or the variable that names its bundle.
    """

    kernel: Kernel
    origin: str


def find_offers(
    requests: tuple[Request, ...], device_type: str, device_index: int, limit: int
) -> tuple[Request, Match | Miss, tuple[Offer, ...]]:
    """Find the kernels to offer.

    Args:
        requests: Every way to read the operands, best first.
        device_type: ``cuda`` or ``cpu``.
        device_index: Which one, as torch counts.
        limit: Most kernels to offer.

    Returns:
        The reading that is served (the first where none is), what matching says of it, and the
        kernels, best-ranked first.
    """
    facts = device_facts(device_type, device_index)
    index, bundles = INSTALLATION.index(facts)
    reasons: dict[str, None] = {}  # in order, each once
    for request in requests:
        found = index.match(request.problem, request.alignment_bytes)
        if isinstance(found, Match):
            origins = {id(one.bundle): one.origin for one in INSTALLATION.bundles()}
            offers = tuple(
                Offer(kernel=served.kernel, origin=origins[id(bundles[served.bundle])])
                for served in found.kernels[:limit]
            )
            return request, found, offers
        reasons.update(dict.fromkeys(found.reasons))
    return requests[0], Miss(reasons=tuple(reasons)), ()
