"""Reads how thread blocks sharing a sum or counter, and successive kernels, wait for each other.

Seen in 19 quack-kernels 0.6.5 kernels for sm_90a that split k and 2 that do not (nvdisasm 13.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import KernelDesign

from ...providers.base import CLC, DYNAMIC_PERSISTENT
from ..findings import Check, Finding

_ATOMIC = frozenset({"RED", "REDG", "ATOM", "ATOMG"})
"""Instructions that change global memory atomically, without and with the previous value (CUDA
Binary Utilities)."""

_ATOMIC_READS = frozenset({"ATOM", "ATOMG"})
"""Atomics that return the previous value: taking the next tile requires its number."""

_FLOAT = re.compile(r"B?F(?:16|32|64)")
"""Start of modifiers that name a float, or a vector of floats: ``F32x4``."""

_LOADS, _STORES = frozenset({"LD", "LDG"}), frozenset({"ST", "STG"})
_SHARED_SCOPES = frozenset({"GPU", "SYS"})
"""Scopes in which other thread blocks see a STRONG access."""

_WAITS, _SIGNALS = "ACQBULK", "PREEXIT"
"""Opcodes for griddepcontrol.wait and griddepcontrol.launch_dependents in PTX."""


_WORK_REQUEST = "UGETNEXTWORKID"
"""Opcode for clusterlaunchcontrol.try_cancel in PTX."""


@dataclass(frozen=True, kw_only=True)
class OrderCode:
    """Ordering evidence.

    Attributes:
        adds_floats: True if floats are added to global memory atomically.
        counts: True if whole numbers are added so, as for an arrival counter.
        draws: True if a whole number in global memory is incremented and read at once, as a
            schedule that hands out tiles does.
        waits: True if the code waits for the previous kernel on the stream.
        signals: True if it lets the next kernel on the stream begin.
        takes_turns: True if code that adds floats first loads, and then stores, values that other
            thread blocks see at once: it waits for its turn, and passes it on.
        asks_for_work: True if it requests the next tile through cluster launch control.
    """

    adds_floats: bool
    counts: bool
    draws: bool
    waits: bool
    signals: bool
    takes_turns: bool = False
    asks_for_work: bool = False


def read_order_code(instructions: Iterable[tuple[str, str]]) -> OrderCode:
    """Reads the evidence from instructions, each an opcode with modifiers and its operands."""
    parts = [opcode.split(".") for opcode, _ in instructions]
    adds = [instruction for instruction in parts if _is_add(instruction)]
    adds_float = [_uses_floats(add) for add in adds]
    names = {instruction[0] for instruction in parts}
    return OrderCode(
        adds_floats=any(adds_float),
        counts=not all(adds_float),
        draws=any(
            instruction[0] in _ATOMIC_READS and not floats
            for instruction, floats in zip(adds, adds_float)
        ),
        waits=_WAITS in names,
        signals=_SIGNALS in names,
        takes_turns=_takes_turns(parts),
        asks_for_work=_WORK_REQUEST in names,
    )


def _takes_turns(instructions: Sequence[Sequence[str]]) -> bool:
    """Returns True if a strong load precedes the first float sum, and a strong store follows it."""
    sums = (
        index
        for index, instruction in enumerate(instructions)
        if _is_add(instruction) and _uses_floats(instruction)
    )
    first = next(sums, len(instructions))
    return any(
        _is_visible_to_all(instruction, _LOADS) for instruction in instructions[:first]
    ) and any(_is_visible_to_all(instruction, _STORES) for instruction in instructions[first:])


def _is_add(instruction: Sequence[str]) -> bool:
    return instruction[0] in _ATOMIC and not {"ADD", "INC"}.isdisjoint(instruction)


def _uses_floats(instruction: Sequence[str]) -> bool:
    return any(map(_FLOAT.match, instruction))


def _is_visible_to_all(instruction: Sequence[str], names: frozenset[str]) -> bool:
    is_strong = "STRONG" in instruction and not _SHARED_SCOPES.isdisjoint(instruction)
    return instruction[0] in names and is_strong


def check_order_code(
    code: OrderCode, design: KernelDesign, *, is_deterministic: bool
) -> Iterator[Finding]:
    """Checks an entry's facts about order.

    Thread blocks add floats to a sum in order of arrival, unless the code shows that each waits for
    its turn: it loads a counter, adds, stores the counter, and counts nothing atomically.
    Determinism needs evidence in the code.
    """
    if code.adds_floats != (design.splits > 1):
        adds = "adds" if code.adds_floats else "does not add"
        yield Check.SPLITS.finding(
            f"device code {adds} to floats in global memory, its entry says that {design.splits} "
            "thread blocks share the k of a tile"
        )
    in_any_order = code.adds_floats and (code.counts or not code.takes_turns)
    if in_any_order == is_deterministic:
        how = "in the order of arrival" if in_any_order else "in a fixed order, or not at all"
        yield Check.DETERMINISM.finding(
            f"device code adds to sums in global memory {how}; its entry says that results "
            f"{'do not ' if is_deterministic else ''}depend on timing"
        )
    if code.asks_for_work != (design.scheduler == CLC):
        asks = "asks" if code.asks_for_work else "never asks"
        yield Check.SCHEDULER.finding(
            f"device code {asks} for its next tile by cluster launch control ({_WORK_REQUEST}), "
            f"its entry says scheduler {design.scheduler}"
        )
    if code.draws != (design.scheduler == DYNAMIC_PERSISTENT):
        draws = "takes numbers" if code.draws else "takes no number"
        yield Check.SCHEDULER.unseen(
            f"device code {draws} from a counter in global memory, its entry says scheduler "
            f"{design.scheduler}; {DYNAMIC_PERSISTENT} does, and no other"
        )
    if design.dependent_launch != code.waits:
        waits = "waits" if code.waits else "never waits"
        yield Check.DEPENDENT_LAUNCH.finding(
            f"device code {waits} for the kernel ahead of it on the stream ({_WAITS}); its entry "
            f"says that it {'may' if design.dependent_launch else 'does not'} begin before that "
            "one has ended"
        )
