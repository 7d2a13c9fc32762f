"""Multiplications of a warp group in flight, and the registers that they hold until waited for."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.ordering import Clock
from ...ptx.program import Instruction

WARPS = 4
"""Warps of a warp group (PTX ISA, "Warpgroup")."""

Unpack = Callable[["Sums"], npt.NDArray[np.uint32]]
"""Returns the words of accumulators in registers, as ``(warps, registers, lanes)``."""

_KEY = "warp group"


class HeldRegister:
    """Stands in a register that a multiplication in flight reads or writes.

    Whatever an instruction does with it is an error that names the multiplication.
    """

    def __init__(self, name: str, use: str, instruction: Instruction) -> None:
        self._about = (
            f"register {name}, {use} of the wgmma at line {instruction.line}, is used before "
            "wgmma.wait_group has waited for that"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise EmulationError(self._about)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise EmulationError(self._about)

    __array_ufunc__ = __array_function__ = __array__ = _refuse
    __getitem__ = __len__ = __iter__ = __bool__ = __invert__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __sub__ = __mul__ = __lshift__ = __rshift__ = _refuse
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = _refuse

    def refuse(self) -> NoReturn:
        """Raises the error."""
        self._refuse()


class Sums:
    """The accumulators of a chain of multiplications, as one matrix of the warp group.

    Attributes:
        registers: Numbers of the registers, the same in all four warps.
        given: First contents by warp; afterwards ``matrix`` holds the values.
        held: Stand-ins in each warp's registers meanwhile.
        pending: Multiplications that each warp has not waited for.
        unpacked: A matrix and its words in registers, once a warp needs them.
    """

    def __init__(self, registers: tuple[int, ...]) -> None:
        self.registers = registers
        self.given: list[list[Any] | None] = [None] * WARPS
        self.matrix: npt.NDArray[Any] | None = None
        self.held: list[list[HeldRegister]] = [[] for _ in range(WARPS)]
        self.pending = [0] * WARPS
        self.unpacked: tuple[Any, npt.NDArray[np.uint32]] | None = None

    def words(self) -> npt.NDArray[np.uint32]:
        """Returns what the registers held at first, as ``(warps, registers, lanes)``."""
        return np.array(self.given, np.uint32)


class Multiplication:
    """One `wgmma.mma_async` of a warp group.

    Attributes:
        operands: Descriptors and whether it accumulates, the same in all warps.
        fragments: Registers with A by warp, or None for each.
        operations: The asynchronous operation of each warp; ``clocks``, what it finished.
    """

    def __init__(self, instruction: Instruction, operands: tuple[int, ...], sums: Sums) -> None:
        self.instruction = instruction
        self.operands = operands
        self.sums = sums
        self.fragments: list[Any] = [None] * WARPS
        self.operations: list[Any] = [None] * WARPS
        self.clocks: list[Clock] = [None] * WARPS
        self.arrived: set[int] = set()
        self.is_done = False


class _Member:
    """A warp's part of the group: its multiplications, groups of them, and held registers."""

    def __init__(self) -> None:
        self.issued = 0
        self.open: list[Multiplication] = []
        self.committed: collections.deque[list[Multiplication]] = collections.deque()
        self.sums: dict[tuple[int, ...], Sums] = {}
        self.fragments: dict[int, list[Any]] = {}
        self.fenced = False


class WarpGroup:
    """Four warps that multiply together; `group_of` returns a warp's."""

    def __init__(self, block: Block, first: int) -> None:
        self.block = block
        self.first = first
        self.members = [_Member() for _ in range(WARPS)]
        self._multiplications: list[Multiplication] = []
        self._begin = 0

    def fence(self, warp: Warp) -> None:
        """Orders a warp's accesses of registers before its multiplications that follow.

        NVVM writes zeros to accumulators behind the fence, which ptxas puts right; so what counts
        here is that there is one since registers were given back.
        """
        self.members[warp.index % WARPS].fenced = True

    def issue(
        self,
        warp: Warp,
        instruction: Instruction,
        operands: tuple[int, ...],
        registers: tuple[int, ...],
        fragment: tuple[int, ...],
        names: Sequence[str],
    ) -> Multiplication | None:
        """Counts a warp's arrival at its next multiplication; returns it if it was the last one.

        Args:
            warp: The warp.
            instruction: Its instruction.
            operands: Descriptors and whether it accumulates.
            registers: Accumulators.
            fragment: A's registers, or none.
            names: Names of both, in this order.

        Raises:
            EmulationError: If warps disagree, or a register is not fenced or in flight.
        """
        rank = warp.index % WARPS
        member = self.members[rank]
        place = member.issued - self._begin
        if place == len(self._multiplications):
            sums = member.sums.get(registers) or Sums(registers)
            self._multiplications.append(Multiplication(instruction, operands, sums))
        found = self._multiplications[place]
        if found.instruction is not instruction or found.operands != operands:
            raise EmulationError(
                f"the warps of a warp group must issue the same wgmma with the same descriptors; "
                f"another one issued line {found.instruction.line} with "
                f"{[*map(hex, found.operands)]}, this one has {[*map(hex, operands)]}"
            )
        self._hold_sums(warp, member, found, names)
        self._hold_fragment(warp, member, found, fragment, names[len(registers) :])
        found.operations[rank] = warp.block.cluster.grid.ordering.begin(warp)
        member.issued += 1
        member.open.append(found)
        found.arrived.add(rank)
        if len(found.arrived) < WARPS:
            return None
        self._begin += 1
        self._multiplications.pop(0)
        return found

    def _hold_sums(
        self, warp: Warp, member: _Member, found: Multiplication, names: Sequence[str]
    ) -> None:
        rank, sums = warp.index % WARPS, found.sums
        if member.sums.get(sums.registers) is not sums:
            given = [
                self._fenced(warp, member, number, name)
                for number, name in zip(sums.registers, names)
            ]
            sums.given[rank] = given
            member.sums[sums.registers] = sums
            sums.held[rank] = [
                HeldRegister(name, "an accumulator", found.instruction) for name in names
            ][: len(sums.registers)]
            for number, held in zip(sums.registers, sums.held[rank]):
                warp.registers[number] = held
        sums.pending[rank] += 1

    def _hold_fragment(
        self,
        warp: Warp,
        member: _Member,
        found: Multiplication,
        fragment: tuple[int, ...],
        names: Sequence[str],
    ) -> None:
        if not fragment:
            return
        values = []
        for number, name in zip(fragment, names):
            entry = member.fragments.get(number)
            if entry is not None and warp.registers[number] is entry[0]:
                entry[2] += 1
            else:
                value = self._fenced(warp, member, number, name)
                held = HeldRegister(name, "part of A", found.instruction)
                entry = member.fragments[number] = [held, value, 1]
                warp.registers[number] = held
            values.append(entry[1])
        found.fragments[warp.index % WARPS] = (fragment, values)

    @staticmethod
    def _fenced(warp: Warp, member: _Member, number: int, name: str) -> Any:
        """Returns a register's value, whose accesses a fence must have ordered."""
        value = warp.registers[number]
        if isinstance(value, HeldRegister):
            value.refuse()
        if not member.fenced:
            raise EmulationError(
                f"register {name} was not fenced: wgmma.fence must come first, and again after "
                "wgmma.wait_group gave registers back"
            )
        return value

    def commit(self, warp: Warp) -> None:
        """Makes a group of a warp's multiplications that are in none."""
        member = self.members[warp.index % WARPS]
        member.committed.append(member.open)
        member.open = []

    def wait(
        self,
        warp: Warp,
        allowed: int,
        unpack: Unpack,
    ) -> str | None:
        """Returns what a warp waits for, or None once at most ``allowed`` groups are pending.

        Raises:
            EmulationError: If a held register was written meanwhile.
        """
        member = self.members[warp.index % WARPS]
        while len(member.committed) > allowed:
            for multiplication in member.committed[0]:
                if not multiplication.is_done:
                    return self._waits_for(multiplication)
            for multiplication in member.committed.popleft():
                self._release(warp, member, multiplication, unpack)
        return None

    def _waits_for(self, multiplication: Multiplication) -> str:
        line = multiplication.instruction.line
        missing = [
            str(self.first + rank) for rank in range(WARPS) if rank not in multiplication.arrived
        ]
        if missing:
            return f"the wgmma at line {line}, which warps {', '.join(missing)} have not issued"
        return f"the wgmma at line {line}"

    def _release(
        self,
        warp: Warp,
        member: _Member,
        multiplication: Multiplication,
        unpack: Unpack,
    ) -> None:
        """Gives registers back."""
        rank, sums = warp.index % WARPS, multiplication.sums
        warp.block.cluster.grid.ordering.acquire(warp, multiplication.clocks[rank])
        sums.pending[rank] -= 1
        if sums.pending[rank] == 0:
            words = unpack(sums)[rank]
            for number, held, value in zip(sums.registers, sums.held[rank], words):
                self._give_back(warp, member, number, held, value)
            del member.sums[sums.registers]
        fragment = multiplication.fragments[rank]
        for number in fragment[0] if fragment is not None else ():
            entry = member.fragments[number]
            entry[2] -= 1
            if entry[2] == 0:
                self._give_back(warp, member, number, entry[0], entry[1])
                del member.fragments[number]

    @staticmethod
    def _give_back(warp: Warp, member: _Member, number: int, held: Any, value: Any) -> None:
        if warp.registers[number] is not held:
            held.refuse()
        warp.registers[number] = value
        member.fenced = False


def group_of(warp: Warp) -> WarpGroup:
    """Returns a warp's group.

    Raises:
        EmulationError: If its block has not four warps for it.
    """
    first = warp.index - warp.index % WARPS
    warps = warp.block.warps
    if first + WARPS > len(warps):
        raise EmulationError(
            f"a warp group has {WARPS} warps; the block has only {len(warps) - first} from warp "
            f"{first} on"
        )
    memory = warps[first].memory
    if _KEY not in memory:
        memory[_KEY] = WarpGroup(warp.block, first)
    found: WarpGroup = memory[_KEY]
    return found
