"""Reads how thread blocks that share a sum or a counter, and kernels, wait for each other.

Seen in 19 kernels of quack-kernels 0.6.5 for sm_90a that split k and 2 that do not (nvdisasm 13.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import KernelDesign

from ..providers.base import CLC, DYNAMIC_PERSISTENT
from .findings import Check, Finding

_ATOMIC = frozenset({"RED", "REDG", "ATOM", "ATOMG"})
"""Instructions that change global memory atomically, without and with the value before
(CUDA Binary Utilities)."""

_READING = frozenset({"ATOM", "ATOMG"})
"""Of these, those that give the value before: who takes the next tile must know which."""

_FLOAT = re.compile(r"B?F(?:16|32|64)")
"""How modifiers begin that name a float, or a vector of them: ``F32x4``."""

_LOADS, _STORES = frozenset({"LD", "LDG"}), frozenset({"ST", "STG"})
_SHARED_SCOPES = frozenset({"GPU", "SYS"})
"""Scopes of a STRONG access that other thread blocks see."""

_WAITS, _SIGNALS = "ACQBULK", "PREEXIT"
"""What griddepcontrol.wait and griddepcontrol.launch_dependents of PTX become."""


_ASKS_FOR_WORK = "UGETNEXTWORKID"
"""What clusterlaunchcontrol.try_cancel of PTX becomes."""


@dataclass(frozen=True, kw_only=True)
class OrderCode:
    """What shows an order.

    Attributes:
        adds_floats: Whether floats in global memory are added to atomically.
        counts: Whether whole numbers are, as a counter of arrivals is.
        draws: Whether a whole number in global memory is counted up and read at once, as a schedule
            does that hands out tiles.
        waits: Whether the code waits for the kernel ahead of it on the stream.
        signals: Whether it lets the kernel behind it begin.
        takes_turns: Whether what adds floats first loads, and then stores, what other thread blocks
            see at once: it waits for its turn, and passes it on.
        asks_for_work: Whether it asks for the next tile by cluster launch control.
    """

    adds_floats: bool
    counts: bool
    draws: bool
    waits: bool
    signals: bool
    takes_turns: bool = False
    asks_for_work: bool = False


def read_order_code(instructions: Iterable[tuple[str, str]]) -> OrderCode:
    """Read opcodes, each with its modifiers, and operands."""
    parts = [opcode.split(".") for opcode, _ in instructions]
    adds = [one for one in parts if _is_add(one)]
    of_floats = [_is_of_floats(add) for add in adds]
    names = {one[0] for one in parts}
    return OrderCode(
        adds_floats=any(of_floats),
        counts=not all(of_floats),
        draws=any(one[0] in _READING and not floats for one, floats in zip(adds, of_floats)),
        waits=_WAITS in names,
        signals=_SIGNALS in names,
        takes_turns=_takes_turns(parts),
        asks_for_work=_ASKS_FOR_WORK in names,
    )


def _takes_turns(instructions: Sequence[Sequence[str]]) -> bool:
    """Whether a strong load stands before the first sum of floats, and a strong store behind it."""
    sums = (place for place, one in enumerate(instructions) if _is_add(one) and _is_of_floats(one))
    first = next(sums, len(instructions))
    return any(_is_seen_by_all(one, _LOADS) for one in instructions[:first]) and any(
        _is_seen_by_all(one, _STORES) for one in instructions[first:]
    )


def _is_add(instruction: Sequence[str]) -> bool:
    return instruction[0] in _ATOMIC and not {"ADD", "INC"}.isdisjoint(instruction)


def _is_of_floats(instruction: Sequence[str]) -> bool:
    return any(map(_FLOAT.match, instruction))


def _is_seen_by_all(instruction: Sequence[str], names: frozenset[str]) -> bool:
    is_strong = "STRONG" in instruction and not _SHARED_SCOPES.isdisjoint(instruction)
    return instruction[0] in names and is_strong


def check_order_code(
    code: OrderCode, design: KernelDesign, *, is_deterministic: bool
) -> Iterator[Finding]:
    """Check what an entry says about order.

    Thread blocks that add floats to one sum do so in the order in which they arrive, unless the
    code shows that each waits for its turn: it loads a counter, adds, and stores the counter, and
    counts nothing atomically. Determinism that the code does not show is not believed.
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
            f"device code {asks} for its next tile by cluster launch control ({_ASKS_FOR_WORK}), "
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
