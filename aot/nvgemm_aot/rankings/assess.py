"""Combines all measurements for one problem: picks the one that counts and rates it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .agreement import Agreement, Relation, compare, gpu_name
from .entries import Entry

STANDINGS = ("doubtful", "measured once", "repeated", "confirmed")
"""Ratings for a problem's measurements, least reliable first."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Combined result for one problem on one product.

    Attributes:
        entry: The measurement that counts; see `assess`.
        doubts: Reasons not to rely on its order: its own, and contradictions by others.
        confirmed_by: UUID digests for the GPUs that confirm each other; none, or at least two.
        repeated: Seconds after which another process measured the same on this GPU.
        measured_again: GPUs with several measurements for the problem, by their digests' first
            digits. Such measurements confirm nothing.
    """

    entry: Entry
    doubts: tuple[str, ...]
    confirmed_by: tuple[str, ...]
    repeated: int | None
    measured_again: tuple[str, ...]

    @property
    def standing(self) -> str:
        """Rating from `STANDINGS`."""
        if self.doubts:
            return "doubtful"
        if self.confirmed_by:
            return "confirmed"
        return "measured once" if self.repeated is None else "repeated"


def assess(entries: Sequence[Entry]) -> Assessment:
    """Assesses one group's measurements, from `Rankings.groups`, the newest last.

    The newest repeated measurement counts. If there is none, or if only the newest measurement is
    confirmed, the newest counts.
    """
    sound = [entry for entry in entries if not entry.doubts]
    newest = _assess_entry((sound or entries)[-1], entries, sound)
    repeated = [entry for entry in sound if entry.repeated is not None]
    if not repeated or repeated[-1] is newest.entry:
        return newest
    last_repeated = _assess_entry(repeated[-1], entries, sound)
    is_better = newest.confirmed_by and not last_repeated.confirmed_by
    return newest if is_better else last_repeated


def _assess_entry(assessed: Entry, entries: Sequence[Entry], sound: Sequence[Entry]) -> Assessment:
    """Assesses one measurement against all others; ``sound`` are the entries without doubts."""
    doubts = list(assessed.doubts)
    agreement = Agreement(assessed.measurement)
    for other in _latest_of_each_gpu(sound, assessed) if sound else ():
        compared = compare(other.measurement, assessed.measurement)
        if compared.relation is Relation.CONTRADICTS:
            doubts.append(compared.reason)
        elif compared.relation is Relation.CONFIRMS:
            agreement.add(other.measurement)
    confirmed = len(agreement.gpus) > 1 and not doubts
    gpus = [entry.origin.conditions for entry in entries]
    known = Counter(gpu_name(gpu) for gpu in gpus if gpu.gpu_sha256 is not None)
    return Assessment(
        entry=assessed,
        doubts=tuple(dict.fromkeys(doubts)),
        confirmed_by=agreement.gpus if confirmed else (),
        repeated=None if doubts else assessed.repeated,
        measured_again=tuple(sorted(name for name, count in known.items() if count > 1)),
    )


def _latest_of_each_gpu(sound: Sequence[Entry], last: Entry) -> list[Entry]:
    """Returns each GPU's newest measurement other than ``last``."""
    before = {entry.origin.conditions.gpu_sha256: entry for entry in sound if entry is not last}
    return list(before.values())
