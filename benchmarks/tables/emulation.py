"""Tables about the emulator: Blackwell's rows, and its agreement with Hopper GPUs."""

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
