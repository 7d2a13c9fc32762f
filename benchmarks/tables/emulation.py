"""Tables about the emulator: Blackwell's rows, agreement with Hopper GPUs, and mutants."""

from __future__ import annotations

from collections import Counter

from benchmarks.emulation.hopper.outcomes import OUTCOMES
from benchmarks.tables.selection import NONE, Selection, gpu, markdown
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES

BLACKWELL = ("sm_100f", "sm_100a", "sm_103a")
_EPILOGUES = {epilogue.name for epilogue in ALL_EPILOGUES}


def blackwell(records: Selection) -> str:
    """Right kernels of those that were emulated, with and without epilogues, by target."""
    right: Counter[tuple[str, str]] = Counter()
    emulated: Counter[tuple[str, str]] = Counter()
    for record in records.where("emulation", f"({'|'.join(BLACKWELL)})/.*"):
        target, _, row = record.case.name.partition("/")
        kernels = " ".join(word for word in row.split() if word not in _EPILOGUES)
        assert record.case.baseline is not None
        right[kernels, target] += round(record.case.figure)
        emulated[kernels, target] += round(record.case.baseline.value)

    def cell(kernels: str, target: str) -> str:
        count = emulated[kernels, target]
        return f"{right[kernels, target]} of {count}" if count else NONE

    rows = [
        (f"`{kernels}`", *(cell(kernels, target) for target in BLACKWELL))
        for kernels in sorted({kernels for kernels, _ in emulated})
    ]
    return markdown(("right kernels", *(f"`{target}`" for target in BLACKWELL)), rows)


def hopper(records: Selection) -> str:
    """Outcomes of cases that a GPU and the emulator ran on the same operands."""
    rows = []
    for name in records.where("emulation.hopper").products:
        for what in ("instructions", "kernels"):
            cases = records.where("emulation.hopper", f"{what}/.*", on=name)
            if not len(cases):
                continue
            counts = {record.case.name.partition("/")[2]: record.case.figure for record in cases}
            shown = (f"{counts.get(kind, 0):.0f}" for kind in OUTCOMES)
            rows.append((what, gpu(name), *shown, cases.date))
    return markdown(("cases", "GPU", *OUTCOMES, "date"), rows)


_CHANGES = ("mutants", "removed fences")
_NOTICED = ("error", "wrong result", "deadlock", "finding")
_SUMS = {"survived", "caught", "caught of all"}
"""Cases that other cases add up to."""


def mutants(records: Selection) -> str:
    """Ends of kernels with one changed instruction, or without a fence; noticed changes first."""
    counts: dict[str, Counter[str]] = {}
    for change in _CHANGES:
        for record in records.where("emulation.mutants", f"{change}/.*"):
            end = record.case.name.partition("/")[2]
            if end not in _SUMS:
                counts.setdefault(end, Counter())[change] = round(record.case.figure)
    rows = [
        (end, *(str(by_change[change]) for change in _CHANGES))
        for end, by_change in sorted(
            counts.items(), key=lambda item: (item[0] not in _NOTICED, -item[1].total())
        )
    ]
    return markdown(("end", *_CHANGES), rows)
