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
        entry: The one that counts; see `assess`.
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
    """Assess the measurements of one group of `Rankings.groups`, the newest last.

    The newest that was repeated counts, unless others confirm the newest alone: then that one does.
    """
    sound = [entry for entry in entries if not entry.doubts]
    newest = _assess_one((sound or entries)[-1], entries, sound)
    repeated = [entry for entry in sound if entry.repeated is not None]
    if not repeated or repeated[-1] is newest.entry:
        return newest
    last_repeated = _assess_one(repeated[-1], entries, sound)
    is_better = newest.confirmed_by and not last_repeated.confirmed_by
    return newest if is_better else last_repeated


def _assess_one(one: Entry, entries: Sequence[Entry], sound: Sequence[Entry]) -> Assessment:
    """Assess one measurement, beside all others and those of them without doubts."""
    doubts = list(one.doubts)
    agreement = Agreement(one.measurement)
    for other in _latest_of_each_gpu(sound, one) if sound else ():
        compared = compare(other.measurement, one.measurement)
        if compared.relation is Relation.CONTRADICTS:
            doubts.append(compared.why)
        elif compared.relation is Relation.CONFIRMS:
            agreement.add(other.measurement)
    confirmed = len(agreement.gpus) > 1 and not doubts
    gpus = [entry.origin.conditions for entry in entries]
    known = Counter(gpu_name(gpu) for gpu in gpus if gpu.gpu_sha256 is not None)
    return Assessment(
        entry=one,
        doubts=tuple(dict.fromkeys(doubts)),
        confirmed_by=agreement.gpus if confirmed else (),
        repeated=None if doubts else one.repeated,
        measured_again=tuple(sorted(name for name, count in known.items() if count > 1)),
    )


def _latest_of_each_gpu(sound: Sequence[Entry], last: Entry) -> list[Entry]:
    """Of each GPU the newest measurement beside the last: of its own GPU the one before."""
    before = {one.origin.conditions.gpu_sha256: one for one in sound if one is not last}
    return list(before.values())
