"""Loads and stores (PTX ISA, "ld", "ld.global.nc", "st")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...machine.accesses import Space, load, store
from ...machine.hierarchy import Warp
from ...machine.lanes import FULL, Mask
from ...machine.meanings import Step, Value, going_on
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand, Register, Sink, Symbol, Vector
from ..decoders import Qualifiers, decodes
from ..values import BITS, address, natural_dtype, read

SPACES = {
    "global": Space.GLOBAL,
    "shared": Space.SHARED,
    "shared::cta": Space.SHARED,
    "shared::cluster": Space.CLUSTER,
    "param": Space.PARAMETER,
    "param::entry": Space.PARAMETER,
    "const": Space.GLOBAL,
    "local": Space.LOCAL,
}

_SHARED = (Space.SHARED, Space.CLUSTER)

SCOPES = ("cta", "cluster", "gpu", "sys")

_TYPES = (
    *(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in "bus"),
    "f16",
    "bf16",
    "f32",
    "f64",
    "b128",
)

EVICTION = ("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last")
SECOND_LEVEL = ("L2::evict_normal", "L2::evict_first", "L2::evict_last")


class _Access:
    """The qualifiers of a load or store."""

    def __init__(self, instruction: Instruction, *, loads: bool) -> None:
        qualifiers = Qualifiers(instruction)
        order = qualifiers.option(
            "weak", "volatile", "relaxed", "mmio", "acquire" if loads else "release"
        )
        if order == "mmio":
            qualifiers.one_of("relaxed")
            qualifiers.one_of("sys")
        elif order in ("relaxed", "acquire", "release"):
            qualifiers.one_of(*SCOPES)
        self.order = order
        self.is_strong = order not in (None, "weak")
        spaces = [name for name in SPACES if loads or name not in ("const", "param")]
        space = qualifiers.option(*spaces)
        self.space = Space.GENERIC if space is None else SPACES[space]
        if order in (None, "weak"):
            qualifiers.option(*(("ca", "cg", "cs", "lu", "cv") if loads else _STORE_CACHES))
        if loads and self.space is Space.GLOBAL and order is None:
            qualifiers.flag("nc")
        qualifiers.option(*EVICTION, "L1::no_allocate")
        qualifiers.option(*SECOND_LEVEL)
        self.has_policy = qualifiers.flag("L2::cache_hint")
        if loads:
            qualifiers.option("L2::64B", "L2::128B", "L2::256B")
        vector = qualifiers.option("v2", "v4", "v8")
        self.kind = qualifiers.one_of(*_TYPES)
        qualifiers.end()
        self.elements = int(vector[1:]) if vector else 1
        self.width = BITS[self.kind] // 8
        if self.elements * self.width > 32:
            raise instruction.unknown(f"vector .{vector}.{self.kind}")
        self.address_kind = "u32" if self.space in _SHARED else "u64"


_STORE_CACHES = ("wb", "cg", "cs", "wt")


def _elements(operand: Operand, count: int, instruction: Instruction) -> Sequence[Operand]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count or (isinstance(operand, Vector) and count == 1):
        raise instruction.unknown(f"a vector of {len(elements)}")
    return elements


def _address(access: _Access, operand: Operand, instruction: Instruction, program: Program) -> Any:
    base = getattr(operand, "base", None)
    kind = access.address_kind
    if access.space in _SHARED and isinstance(base, Register) and BITS[base.type] == 64:
        # Addresses of shared memory may be held in 64 bits too.
        return address(operand, "u64", instruction, program)
    if isinstance(base, Register) and BITS[base.type] != BITS[kind]:
        raise instruction.unknown(f"address {base.name} of type .{base.type}")
    return address(operand, kind, instruction, program)


@decodes("ld")
def _load(instruction: Instruction, program: Program) -> Step:
    access = _Access(instruction, loads=True)
    operands = list(instruction.operands)
    if len(operands) != (3 if access.has_policy else 2):
        raise instruction.unknown(f"a number of {len(operands)} operands")
    elements = _elements(operands[0], access.elements, instruction)
    where = _address(access, operands[1], instruction, program)
    wide = access.kind == "b128"
    targets = [_Target(each, access.kind, instruction) for each in elements]
    width = 8 if wide else access.width
    count = 2 if wide else access.elements
    space, is_strong = access.space, access.is_strong
    relaxed = access.order != "acquire"
    if space is Space.PARAMETER and isinstance(getattr(operands[1], "base", None), Symbol):
        return _parameter_load(targets, where, width, count, wide=wide)

    def step(warp: Warp, mask: Mask) -> None:
        addresses = where(warp)
        if mask is not FULL:
            addresses = addresses[mask]
        found = load(warp, space, addresses, width, count)
        if wide:
            targets[0].put(warp, found, mask)
            return
        for place, target in enumerate(targets):
            target.put(warp, found[:, place], mask)
        if is_strong:
            warp.block.cluster.grid.acquire_from(warp, addresses, relaxed=relaxed)

    return going_on(step)


def _parameter_load(
    targets: Sequence[_Target], where: Value, width: int, count: int, *, wide: bool
) -> Step:
    """Returns the load from a constant address, which reads memory once in a launch."""
    key = object()

    def step(warp: Warp, mask: Mask) -> None:
        read_before = warp.block.cluster.grid.parameters_read
        if (found := read_before.get(key)) is None:
            found = load(warp, Space.PARAMETER, where(warp), width, count)
            read_before[key] = found = [found] if wide else list(np.ascontiguousarray(found.T))
        for target, value in zip(targets, found):
            target.put(warp, value if mask is FULL else value[mask], mask)

    return going_on(step)


class _Target:
    """A register that takes an element, extended to its width."""

    def __init__(self, operand: Operand, kind: str, instruction: Instruction) -> None:
        self._register: int | None = None
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register) or not BITS[kind] <= BITS[operand.type] <= 128:
            raise instruction.unknown(f"result {operand}")
        if (operand.type == "b128") != (kind == "b128") or operand.type == "pred":
            raise instruction.unknown(f"result {operand.name} of type .{operand.type}")
        self._register = operand.number
        self._wide = kind == "b128"
        self._signed = natural_dtype(kind) if kind[0] == "s" and kind != "s8" else None
        self._signed = np.int8 if kind == "s8" else self._signed
        self._dtype = None if self._wide else np.dtype(f"u{max(BITS[operand.type] // 8, 2)}").type
        signed = None if self._wide else np.dtype(f"i{max(BITS[operand.type] // 8, 2)}").type
        self._extended = signed if self._signed else None

    def put(self, warp: Warp, values: Any, mask: Mask) -> None:
        number = self._register
        if number is None:
            return
        if self._signed:
            values = values.copy().view(self._signed).astype(self._extended).view(self._dtype)
        elif not self._wide:
            values = values.astype(self._dtype)
        if mask is FULL:
            warp.registers[number] = values
        else:
            lanes = warp.registers[number].copy()
            lanes[mask] = values
            warp.registers[number] = lanes


@decodes("st")
def _store(instruction: Instruction, program: Program) -> Step:
    access = _Access(instruction, loads=False)
    operands = list(instruction.operands)
    if len(operands) != (3 if access.has_policy else 2):
        raise instruction.unknown(f"a number of {len(operands)} operands")
    elements = _elements(operands[1], access.elements, instruction)
    where = _address(access, operands[0], instruction, program)
    for each in elements:
        if isinstance(each, Register) and (
            BITS[each.type] < BITS[access.kind] or each.type == "pred"
        ):
            raise instruction.unknown(f"register {each.name} of type .{each.type}")
    wide = access.kind == "b128"
    if wide and not isinstance(elements[0], Register):
        raise instruction.unknown(f"operand {elements[0]}")
    values = [read(each, "b64" if wide else access.kind, instruction, program) for each in elements]
    dtype = np.dtype(f"u{8 if wide else access.width}").type
    space, is_strong = access.space, access.is_strong
    relaxed = access.order != "release"

    def step(warp: Warp, mask: Mask) -> None:
        addresses = where(warp)
        if wide:
            data = values[0](warp)
        elif len(values) == 1:
            data = values[0](warp).astype(dtype)[:, None]
        else:
            data = np.empty((32, len(values)), dtype)
            for place, value in enumerate(values):
                data[:, place] = value(warp)
        if mask is not FULL:
            addresses, data = addresses[mask], data[mask]
        if is_strong:
            warp.block.cluster.grid.release_at(warp, addresses, relaxed=relaxed)
        store(warp, space, addresses, data)

    return going_on(step)
