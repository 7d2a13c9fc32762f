"""Which bundled kernels to offer for a GEMM that Inductor compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import NoKernelError
from ..facts import device_facts
from ..format import Kernel
from ..installation import INSTALLATION
from ..match import Match
from ..operands import requests
from ..problem import Op, Problem
from .operand import Operand


@dataclass(frozen=True, kw_only=True)
class GemmOnDevice:
    """A GEMM as Inductor compiles it.

    Attributes:
        op: ``mm`` or ``bmm``.
        a: Operand of shape [m, k], with a leading batch for ``bmm``.
        b: Operand of shape [k, n], likewise.
        out: Result of shape [m, n], likewise.
    """

    op: str
    a: Operand
    b: Operand
    out: Operand


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kernel that joins the choices.

    Attributes:
        kernel: Its entry.
        origin: The distribution and version that brought it, or the variable that names its bundle.
    """

    kernel: Kernel
    origin: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is for a GEMM.

    Attributes:
        gemm: Its problem's key, or in words where no problem describes it.
        problem: The problem, if one describes it.
        basis: ``declared``, ``signature`` or ``miss``.
        offers: The kernels, best-ranked first; empty for a miss.
        reasons: Why it is a miss.
    """

    gemm: str
    problem: Problem | None
    basis: str
    offers: Sequence[Offer] = ()
    reasons: Sequence[str] = ()


def find_offers(gemm: GemmOnDevice, limit: int) -> Found:
    """Find the kernels to offer.

    Args:
        gemm: The GEMM.
        limit: Most kernels to offer; 0 makes every GEMM a miss.
    """
    try:
        asked = requests(Op(gemm.op), gemm.a, gemm.b, out=gemm.out)
    except (NoKernelError, ValueError) as error:
        words = f"{gemm.op} of {gemm.a} and {gemm.b}"
        return Found(gemm=words, problem=None, basis="miss", reasons=[str(error)])
    device = gemm.out.device
    index, bundles = INSTALLATION.index(device_facts(device.type, device.index or 0))
    reasons: dict[str, None] = {}  # in order, each once
    for request in asked if limit else ():
        found = index.match(request.problem, request.alignment_bytes)
        if isinstance(found, Match):
            origins = {id(one.bundle): one.origin for one in INSTALLATION.bundles()}
            offers = [
                Offer(kernel=served.kernel, origin=origins[id(bundles[served.bundle])])
                for served in found.kernels[:limit]
            ]
            return Found(
                gemm=request.problem.key,
                problem=request.problem,
                basis=found.basis.value,
                offers=offers,
            )
        reasons.update(dict.fromkeys(found.reasons))
    return Found(
        gemm=asked[0].problem.key,
        problem=asked[0].problem,
        basis="miss",
        reasons=tuple(reasons) if limit else ["at most 0 kernels are to be offered"],
    )
