"""Reading the host part of a kernel: what a loader sees of a shared object, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .elf import MAX_SYMBOLS, MalformedElfError, open_elf, reading


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A program header: its type and PF_* flags."""

    kind: str
    flags: int


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A dynamic symbol."""

    name: str
    defined: bool
    local: bool


@dataclass(frozen=True, kw_only=True)
class HostElf:
    """A shared object; values are named as in the System V ABI, e.g. ``EM_X86_64``.

    Attributes:
        machine, kind, system: From its header.
        segments: Its program headers.
        tags: Entries of its dynamic segment, a name with a text or a number.
        symbols: Its dynamic symbols.
        relocations: The types of its relocations.
    """

    machine: str
    kind: str
    system: str
    segments: tuple[Segment, ...]
    tags: tuple[tuple[str, Any], ...]
    symbols: tuple[Symbol, ...]
    relocations: frozenset[int]


def read_host_elf(data: bytes) -> HostElf:
    """Read a shared object by its program headers and dynamic segment.

    Raises:
        MalformedElfError: If it cannot be read, or a table is too long or outside it.
    """
    elf = open_elf(data)
    with reading("the shared object"):
        dynamic = _dynamic_segment(elf)
        return HostElf(
            machine=str(elf["e_machine"]),
            kind=str(elf["e_type"]),
            system=str(elf["e_ident"]["EI_OSABI"]),
            segments=tuple(
                Segment(kind=str(part["p_type"]), flags=int(part["p_flags"]))
                for part in elf.iter_segments()
            ),
            tags=tuple(_tags(dynamic)),
            symbols=_dynamic_symbols(dynamic),
            relocations=frozenset(_relocations(dynamic)),
        )


def imported_symbols(data: bytes) -> tuple[str, ...]:
    """Names that a shared object leaves for other libraries to define, sorted.

    Raises:
        MalformedElfError: If it cannot be read, or a table is too long or outside it.
    """
    elf = open_elf(data)
    with reading("the shared object"):
        symbols = _dynamic_symbols(_dynamic_segment(elf))
        return tuple(sorted({one.name for one in symbols if not one.defined and one.name}))


def _dynamic_segment(elf: Any) -> Any:
    dynamic = [part for part in elf.iter_segments() if part["p_type"] == "PT_DYNAMIC"]
    if len(dynamic) != 1:
        raise MalformedElfError(f"{len(dynamic)} dynamic segments, a shared object has 1")
    return dynamic[0]


def _dynamic_symbols(dynamic: Any) -> tuple[Symbol, ...]:
    count = dynamic.num_symbols()
    if count > MAX_SYMBOLS:
        raise MalformedElfError(f"{count} dynamic symbols, at most {MAX_SYMBOLS}")
    return tuple(_symbol(dynamic.get_symbol(index)) for index in range(count))


def _tags(dynamic: Any) -> Iterator[tuple[str, Any]]:
    names = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    for tag in dynamic.iter_tags():
        kind = str(tag.entry.d_tag)
        yield kind, getattr(tag, names[kind]) if kind in names else int(tag.entry.d_val)


def _symbol(symbol: Any) -> Symbol:
    return Symbol(
        name=str(symbol.name),
        defined=symbol["st_shndx"] != "SHN_UNDEF",
        local=symbol["st_info"]["bind"] == "STB_LOCAL",
    )


def _relocations(dynamic: Any) -> Iterator[int]:
    for name, table in dynamic.get_relocation_tables().items():
        if name == "RELR":  # has no types; _check_relocations refuses its tag
            continue
        yield from (int(relocation["r_info_type"]) for relocation in table.iter_relocations())
