"""Operands of PTX instructions."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Register(NamedTuple):
    """A register: its number in the program's register file, and its declared type."""

    number: int
    name: str
    type: str


class Immediate(NamedTuple):
    """A constant: two's complement of an integer, or the bits of a float of `float_bits` bits."""

    value: int
    float_bits: int = 0


class Special(NamedTuple):
    """A special register, such as ``%tid.x``."""

    name: str


class Symbol(NamedTuple):
    """A parameter, or a variable in shared memory."""

    name: str


class Label(NamedTuple):
    """A place in the program, as the index of its instruction."""

    name: str
    target: int


class Sink(NamedTuple):
    """``_``: a result that is not wanted."""


class Vector(NamedTuple):
    """Operands in braces."""

    elements: tuple[Operand, ...]


class Address(NamedTuple):
    """``[base + offset]``; of tensor copies, ``[base, {coordinates}]``."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: Vector | None = None


class Pair(NamedTuple):
    """``first|second``: two results."""

    first: Operand
    second: Operand


class Negated(NamedTuple):
    """``!register``: a predicate's complement."""

    register: Register


Operand: TypeAlias = (
    "Register | Immediate | Special | Symbol | Label | Sink | Vector | Address | Pair | Negated"
)
