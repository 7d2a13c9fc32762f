"""Finds where the lanes of a warp come together again after a branch that splits them."""

from __future__ import annotations

from collections.abc import Sequence

from .program import Instruction
from .ptx_operands import Label

_ENDS = ("ret", "exit", "trap")


def successors(instructions: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """Returns the instructions that may follow each one; ``len(instructions)`` is the end.

    Only the last instruction leads to the end. Lanes that exit earlier come together with nobody,
    so they do not decide where others do.
    """
    end = len(instructions)
    found: list[tuple[int, ...]] = []
    for place, instruction in enumerate(instructions):
        after: tuple[int, ...] = (place + 1,)
        if instruction.opcode == "bra":
            (label,) = instruction.operands
            assert isinstance(label, Label)
            after = (label.target, place + 1)
        elif instruction.opcode in _ENDS and place < end - 1:
            found.append(() if instruction.predicate is None else (place + 1,))
            continue
        if instruction.predicate is None:
            after = after[:1]
        found.append(after)
    return found


def immediate_post_dominators(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """Returns each instruction's immediate post-dominator, by Cooper, Harvey and Kennedy's method.

    An instruction from which the end cannot be reached has the end.
    """
    end = len(instructions)
    after = successors(instructions)
    if not any(end in following for following in after):
        # The kernel ends in its middle only.
        after = [
            (*following, end) if instruction.opcode in _ENDS else following
            for instruction, following in zip(instructions, after)
        ]
    order = _backwards(after, end)
    while (jump := _last_endless_jump(instructions, frozenset(order))) is not None:
        # As if its loop could be left: within it, lanes come together as anywhere else.
        after[jump] = (*after[jump], end)
        order = _backwards(after, end)
    rank = {place: number for number, place in enumerate(order)}
    dominator: dict[int, int] = {end: end}
    changed = True
    while changed:
        changed = False
        for place in order[1:]:
            known = [each for each in after[place] if each in dominator]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    while rank[new] > rank[other]:
                        new = dominator[new]
                    while rank[other] > rank[new]:
                        other = dominator[other]
            if dominator.get(place) != new:
                dominator[place] = new
                changed = True
    return tuple(dominator.get(place, end) for place in range(end))


def _last_endless_jump(instructions: Sequence[Instruction], ending: frozenset[int]) -> int | None:
    """Returns the last jump backwards from which the end cannot be reached, or None."""
    for place in reversed(range(len(instructions))):
        instruction = instructions[place]
        if place not in ending and instruction.opcode == "bra":
            (label,) = instruction.operands
            assert isinstance(label, Label)
            if label.target <= place:
                return place
    return None


def _backwards(after: Sequence[tuple[int, ...]], end: int) -> list[int]:
    """Returns places in reverse post-order from the end, against the flow."""
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for place, following in enumerate(after):
        for each in following:
            before[each].append(place)
    seen, finished = {end}, []
    stack = [(end, iter(before[end]))]
    while stack:
        place, rest = stack[-1]
        for each in rest:
            if each not in seen:
                seen.add(each)
                stack.append((each, iter(before[each])))
                break
        else:
            finished.append(place)
            stack.pop()
    return finished[::-1]
