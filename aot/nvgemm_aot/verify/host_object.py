"""The host part of a kernel: a small shared object that a process loads and calls.

The linker stage and ``verify`` use the same rules, which hold what the toolchain is known to make.
They find another compiler, linker or setting at work, not somebody's malice: loading a kernel runs
its code anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS, FFI_SYMBOLS
from nvgemm_runtime.errors import LinkError
from nvgemm_runtime.matching.device import FFI_LIBRARY, RUNTIME_LIBRARY

from .elf import MAX_SYMBOLS, MalformedElfError, open_elf, reading
from .findings import Check, Gap
from .launch_code import vector_extension

ALLOWED_SYMBOLS = FFI_SYMBOLS | DEVICE_SYMBOLS
"""Symbols a kernel may leave undefined: the runtime says where they come from."""

NEEDED_LIBRARIES = frozenset({RUNTIME_LIBRARY, FFI_LIBRARY})
"""Libraries a kernel names as needed: the SONAMEs of the two that export `ALLOWED_SYMBOLS`. A
kernel for the CPU calls, and may name, but the one of TVM-FFI."""

_MACHINE = {"linux_x86_64": "EM_X86_64"}
"""By host platform: the machine that an ELF header must name."""

_RELOCATIONS = {1: "R_X86_64_64", 6: "R_X86_64_GLOB_DAT", 7: "R_X86_64_JUMP_SLOT", 8: "RELATIVE"}
"""Dynamic relocations that kernels have (System V ABI, AMD64 supplement, table 4.10): they only
store addresses."""

_DF_TEXTREL = 0x4
_PF_X = 0x1


def check_host_elf(
    data: bytes, exported: str, *, platform: str = "linux_x86_64", on_cpu: bool = False
) -> None:
    """Refuse a payload that is not what the toolchain is known to make.

    Args:
        data: The shared object.
        exported: Name of the one function it must export, e.g. ``__tvm_ffi_gemm``.
        platform: Host platform of the target.
        on_cpu: Whether the kernel runs on the host itself.

    Raises:
        LinkError: Naming everything that is wrong, each with what is allowed.
    """
    gaps = find_host_gaps(data, exported, platform=platform, on_cpu=on_cpu)
    if gaps:
        raise LinkError(
            f"the linked kernel is not as it must be: {'; '.join(gap.message for gap in gaps)}"
        )


def find_host_gaps(
    data: bytes, exported: str | None, *, platform: str, on_cpu: bool = False
) -> tuple[Gap, ...]:
    """Find how a payload differs from what it must be; arguments as in `check_host_elf`.

    ``exported`` is None where nobody can say what its one function is called.

    Returns:
        What is wrong; empty if nothing is. Malformed input is one of the gaps.
    """
    try:
        elf = read_host_elf(data)
    except MalformedElfError as error:
        return (Gap(check=Check.HOST_FORMAT, message=str(error)),)
    return (
        *_check_format(elf, platform),
        *_check_exports(elf, exported),
        *_check_imports(elf, on_cpu),
        *_check_stack(elf),
        *_check_relocations(elf),
        *_check_processor(data, platform),
    )


def _check_processor(data: bytes, platform: str) -> list[Gap]:
    extension = vector_extension(data)
    if extension is None:
        return []
    message = f"host code uses {extension}; not every {platform} processor has it"
    return [Gap(check=Check.HOST_PROCESSOR, message=message)]


def _check_format(elf: HostElf, platform: str) -> Iterator[Gap]:
    wanted = _MACHINE.get(platform)
    observed = (elf.machine, elf.kind, elf.system)
    if wanted is None:
        yield Gap(
            check=Check.HOST_FORMAT,
            message=f"no rules for platform {platform!r} (known: {', '.join(sorted(_MACHINE))})",
        )
    elif observed != (wanted, "ET_DYN", "ELFOSABI_SYSV"):
        yield Gap(
            check=Check.HOST_FORMAT,
            message=f"machine, type and system are {', '.join(observed)}; platform {platform} "
            f"needs {wanted}, ET_DYN, ELFOSABI_SYSV",
        )


def _check_exports(elf: HostElf, exported: str | None) -> Iterator[Gap]:
    defined = [symbol for symbol in elf.symbols if symbol.defined and not symbol.local]
    names = sorted(symbol.name for symbol in defined)
    if len(names) != 1 or exported not in (None, *names):
        yield Gap(
            check=Check.HOST_EXPORTS,
            message=f"exports {', '.join(names) or 'nothing'}; must export exactly "
            f"{exported or 'one function'}",
        )


def _check_imports(elf: HostElf, on_cpu: bool) -> Iterator[Gap]:
    allowed = FFI_SYMBOLS if on_cpu else ALLOWED_SYMBOLS
    libraries = {FFI_LIBRARY} if on_cpu else NEEDED_LIBRARIES
    undefined = {symbol.name for symbol in elf.symbols if not symbol.defined and symbol.name}
    for name in sorted(undefined - allowed):
        yield Gap(
            check=Check.HOST_SYMBOLS,
            message=f"needs the symbol {name}, which is not among the {len(allowed)} that "
            "the runtime libraries are known to export",
        )
    needed = sorted(str(value) for kind, value in elf.tags if kind == "DT_NEEDED")
    if needed != sorted(libraries):
        yield Gap(
            check=Check.HOST_LIBRARIES,
            message=f"needs the libraries {', '.join(needed) or '(none)'}; must need exactly "
            f"{', '.join(sorted(libraries))}",
        )
    for kind, value in elf.tags:
        if kind in ("DT_RPATH", "DT_RUNPATH"):
            yield Gap(
                check=Check.HOST_LIBRARIES,
                message=f"{kind[3:]} makes the loader search {value!r}; none is allowed",
            )


def _check_stack(elf: HostElf) -> Iterator[Gap]:
    stacks = [part.flags for part in elf.segments if part.kind == "PT_GNU_STACK"]
    # Without the header, an object asks for one too, and glibc 2.41 refuses to load it.
    if not stacks or any(flags & _PF_X for flags in stacks):
        yield Gap(
            check=Check.HOST_STACK,
            message="asks for an executable stack; a GNU_STACK header without X is needed",
        )


def _check_relocations(elf: HostElf) -> Iterator[Gap]:
    flags = {kind: value for kind, value in elf.tags if kind in ("DT_TEXTREL", "DT_FLAGS")}
    if "DT_TEXTREL" in flags or flags.get("DT_FLAGS", 0) & _DF_TEXTREL:
        yield Gap(check=Check.HOST_RELOCATIONS, message="has text relocations; none are allowed")
    if any(kind == "DT_RELR" for kind, _ in elf.tags):
        yield Gap(
            check=Check.HOST_RELOCATIONS,
            message="has packed relative relocations, which loaders before glibc 2.36 ignore; link "
            "with -z nopack-relative-relocs",
        )
    for kind in sorted(elf.relocations - _RELOCATIONS.keys()):
        yield Gap(
            check=Check.HOST_RELOCATIONS,
            message=f"has a relocation of type {kind}, allowed are {sorted(_RELOCATIONS)}",
        )


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
