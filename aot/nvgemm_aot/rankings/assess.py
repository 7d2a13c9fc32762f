"""What all measurements of one problem come to: which one counts, and how far to rely on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .agreement import Agreement, Relation, compare, gpu_name
from .entries import Entry

STANDINGS = ("doubtful", "measured once", "repeated", "confirmed")
"""How far measurements of a problem are to be relied on, from the least."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What measurements of one problem on one product come to.

    Attributes:
        entry: The one that counts: the newest of those that were repeated, or else of those
            without doubts, or else of all.
        doubts: Reasons not to rely on its order: its own, and contradictions of others.
        confirmed_by: Digests of the UUIDs of the GPUs that confirm each other; none, or at least
            two.
        repeated: Seconds after which another process measured the same on the GPU of ``entry``.
        measured_again: GPUs with several measurements of the problem, by the first digits of the
            digest: that confirms nothing.
    """

    entry: Entry
    doubts: tuple[str, ...]
    confirmed_by: tuple[str, ...]
    repeated: int | None
    measured_again: tuple[str, ...]

    @property
    def standing(self) -> str:
        """One of `STANDINGS`."""
        if self.doubts:
            return "doubtful"
        if self.confirmed_by:
            return "confirmed"
        return "measured once" if self.repeated is None else "repeated"


def assess(entries: Sequence[Entry]) -> Assessment:
    """Assess the measurements of one group of `Rankings.groups`, the newest last."""
    sound = [entry for entry in entries if not entry.doubts]
    repeated = [entry for entry in sound if entry.repeated is not None]
    last = (repeated or sound or list(entries))[-1]
    doubts = list(last.doubts)
    agreement = Agreement(last.measurement)
    for other in _latest_of_each_gpu(sound, last) if sound else ():
        compared = compare(other.measurement, last.measurement)
        if compared.relation is Relation.CONTRADICTS:
            doubts.append(compared.why)
        elif compared.relation is Relation.CONFIRMS:
            agreement.add(other.measurement)
    confirmed = len(agreement.gpus) > 1 and not doubts
    gpus = [entry.origin.conditions for entry in entries]
    known = Counter(gpu_name(one) for one in gpus if one.gpu_sha256 is not None)
    return Assessment(
        entry=last,
        doubts=tuple(dict.fromkeys(doubts)),
        confirmed_by=agreement.gpus if confirmed else (),
        repeated=None if doubts else last.repeated,
        measured_again=tuple(sorted(name for name, count in known.items() if count > 1)),
    )


def _latest_of_each_gpu(sound: Sequence[Entry], last: Entry) -> list[Entry]:
    """Of each GPU the newest measurement beside the last: of its own GPU the one before."""
    before = {one.origin.conditions.gpu_sha256: one for one in sound if one is not last}
    return list(before.values())
