"""Whether so many kernels were thrown out that something else than these may be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nvgemm_runtime.gemm.problem import Signature

from .outcome import Outcome, contender_name

MOST_SHARE = 0.5
"""Share of a bundle's kernels beyond which it is suspect that they are wrong."""

_EXAMPLES = 5
"""Signatures that are named, each with one fault."""


def thrown_out(outcomes: Mapping[str, Outcome], broken: Mapping[str, str]) -> dict[str, str]:
    """By id, kernels that no bundle may have, and what is wrong with each.

    Args:
        outcomes: By problem key.
        broken: By name, contenders that left the GPU unusable, and how.
    """
    wrong = {
        id_: f"{key}: {fault}"
        for key, outcome in outcomes.items()
        for id_, fault in outcome.wrong.items()
    }
    return wrong | dict(broken)


def suspicion(kernels: Iterable[tuple[str, Signature]], wrong: Mapping[str, str]) -> str | None:
    """Why a tuning is suspect, or None.

    Args:
        kernels: Ids and signatures of all kernels that there are.
        wrong: By id, what is wrong with those that were thrown out.
    """
    by_signature: dict[Signature, list[str]] = {}
    for id_, signature in kernels:
        by_signature.setdefault(signature, []).append(id_)
    ids = [id_ for some in by_signature.values() for id_ in some]
    gone = [id_ for id_ in ids if id_ in wrong]
    lost = {
        signature: some
        for signature, some in by_signature.items()
        if all(id_ in wrong for id_ in some)
    }
    if not lost and len(gone) <= MOST_SHARE * len(ids):
        return None
    head = f"{len(gone)} of {len(ids)} kernels were thrown out"
    if not lost:
        return "; ".join([f"{head}, more than half", *_examples(gone[:1], wrong)])
    named = [
        f"all {len(some)} of {signature.key}, {_examples(some[:1], wrong)[0]}"
        for signature, some in [*lost.items()][:_EXAMPLES]
    ]
    if len(lost) > _EXAMPLES:
        named.append(f"all of {len(lost) - _EXAMPLES} more signatures")
    return f"{head}, among them {'; '.join(named)}"


def _examples(ids: Sequence[str], wrong: Mapping[str, str]) -> list[str]:
    return [f"{contender_name(id_)} for {wrong[id_]}" for id_ in ids]
