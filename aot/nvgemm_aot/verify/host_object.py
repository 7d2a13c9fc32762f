"""The host part of a kernel: a small shared object that a process loads and calls.

The build checks what it has linked and ``verify`` checks what a bundle holds by the same rules,
which describe what the toolchain is known to make. They find another compiler, linker or setting,
not malice: loading a kernel runs its code anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS, FFI_SYMBOLS
from nvgemm_runtime.errors import LinkError
from nvgemm_runtime.matching.device import FFI_LIBRARY, RUNTIME_LIBRARY

from .elf import MalformedElfError, open_elf, reading
from .findings import Check, Finding
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
_PF_X, _PF_W = 0x1, 0x2


@dataclass(frozen=True, kw_only=True)
class HostObject:
    """A shared object as a loader sees it; values are named as in the System V ABI.

    Attributes:
        machine, kind, system: From its header, e.g. ``EM_X86_64``, ``ET_DYN``, ``ELFOSABI_SYSV``.
        tags: Entries of its dynamic segment, a name with a text or a number.
        exports: Names that it defines for others, sorted.
        imports: Names that it leaves for other libraries to define, sorted.
        relocations: The types of its relocations.
        has_plain_stack: Whether it states that its stack need not be executable.
        code: Its executable part in memory.
        read_only: Its part in memory that cannot be written, ``code`` included.
    """

    machine: str
    kind: str
    system: str
    tags: tuple[tuple[str, Any], ...]
    exports: tuple[str, ...]
    imports: tuple[str, ...]
    relocations: frozenset[int]
    has_plain_stack: bool
    code: bytes
    read_only: bytes


def read_host_object(payload: bytes) -> HostObject:
    """Read a shared object by its program headers and dynamic segment.

    Raises:
        MalformedElfError: If it cannot be read.
    """
    elf = open_elf(payload)
    with reading("the shared object"):
        dynamic = [part for part in elf.iter_segments() if part["p_type"] == "PT_DYNAMIC"]
        if len(dynamic) != 1:
            raise MalformedElfError(f"{len(dynamic)} dynamic segments, a shared object has 1")
        exports, imports = _dynamic_names(dynamic[0])
        stacks = [int(s["p_flags"]) for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK"]
        loaded = [
            (int(part["p_flags"]), payload[part["p_offset"] : part["p_offset"] + part["p_filesz"]])
            for part in elf.iter_segments()
            if part["p_type"] == "PT_LOAD"
        ]
        return HostObject(
            machine=str(elf["e_machine"]),
            kind=str(elf["e_type"]),
            system=str(elf["e_ident"]["EI_OSABI"]),
            tags=tuple(_tags(dynamic[0])),
            exports=exports,
            imports=imports,
            relocations=frozenset(_relocation_types(dynamic[0])),
            has_plain_stack=bool(stacks) and not any(flags & _PF_X for flags in stacks),
            code=b"".join(content for flags, content in loaded if flags & _PF_X),
            read_only=b"".join(content for flags, content in loaded if not flags & _PF_W),
        )


def _dynamic_names(dynamic: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that a shared object defines for others, and names that it leaves undefined."""
    exports: list[str] = []
    imports: set[str] = set()
    for index in range(dynamic.num_symbols()):
        symbol = dynamic.get_symbol(index)
        if symbol["st_shndx"] == "SHN_UNDEF":
            imports.add(str(symbol.name))
        elif symbol["st_info"]["bind"] != "STB_LOCAL":
            exports.append(str(symbol.name))
    return tuple(sorted(exports)), tuple(sorted(imports - {""}))


def _tags(dynamic: Any) -> Iterator[tuple[str, Any]]:
    names = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    for tag in dynamic.iter_tags():
        kind = str(tag.entry.d_tag)
        yield kind, getattr(tag, names[kind]) if kind in names else int(tag.entry.d_val)


def _relocation_types(dynamic: Any) -> Iterator[int]:
    for name, table in dynamic.get_relocation_tables().items():
        if name == "RELR":  # has no types; _check_relocations refuses its tag
            continue
        yield from (int(relocation["r_info_type"]) for relocation in table.iter_relocations())


def require_host_object(payload: bytes, exported: str, *, on_cpu: bool = False) -> None:
    """Refuse a payload that is not what the toolchain is known to make.

    Args:
        payload: The shared object.
        exported: Name of the one function it must export, e.g. ``__tvm_ffi_gemm``.
        on_cpu: Whether the kernel runs on the host itself.

    Raises:
        LinkError: With every rule that it breaks.
    """
    try:
        host = read_host_object(payload)
        broken = [one.message for one in check_host_object(host, exported, on_cpu=on_cpu)]
    except MalformedElfError as error:
        broken = [str(error)]
    if broken:
        raise LinkError(f"the linked kernel is not as it must be: {'; '.join(broken)}")


def check_host_object(
    host: HostObject,
    exported: str | None,
    *,
    platform: str = "linux_x86_64",
    on_cpu: bool = False,
) -> Iterator[Finding]:
    """Check a shared object against what the toolchain is known to make.

    Args:
        host: The shared object.
        exported: Name of the one function it must export; None if that is not known.
        platform: Host platform of the target.
        on_cpu: Whether the kernel runs on the host itself.

    Yields:
        Every rule that it breaks.
    """
    yield from _check_format(host, platform)
    yield from _check_exports(host, exported)
    yield from _check_imports(host, on_cpu)
    if not host.has_plain_stack:
        # Without the header, an object asks for an executable stack too, and glibc 2.41 refuses it.
        yield Finding(
            check=Check.HOST_STACK,
            message="asks for an executable stack; a GNU_STACK header without X is needed",
        )
    yield from _check_relocations(host)
    extension = vector_extension(host.code)
    if extension is not None:
        yield Finding(
            check=Check.HOST_PROCESSOR,
            message=f"host code uses {extension}; not every {platform} processor has it",
        )


def _check_format(host: HostObject, platform: str) -> Iterator[Finding]:
    wanted = _MACHINE.get(platform)
    observed = (host.machine, host.kind, host.system)
    if wanted is None:
        yield Finding(
            check=Check.HOST_FORMAT,
            message=f"no rules for platform {platform!r} (known: {', '.join(sorted(_MACHINE))})",
        )
    elif observed != (wanted, "ET_DYN", "ELFOSABI_SYSV"):
        yield Finding(
            check=Check.HOST_FORMAT,
            message=f"machine, type and system are {', '.join(observed)}; platform {platform} "
            f"needs {wanted}, ET_DYN, ELFOSABI_SYSV",
        )


def _check_exports(host: HostObject, exported: str | None) -> Iterator[Finding]:
    names = host.exports
    if len(names) != 1 or exported not in (None, *names):
        yield Finding(
            check=Check.HOST_EXPORTS,
            message=f"exports {', '.join(names) or 'nothing'}; must export exactly "
            f"{exported or 'one function'}",
        )


def _check_imports(host: HostObject, on_cpu: bool) -> Iterator[Finding]:
    allowed = FFI_SYMBOLS if on_cpu else ALLOWED_SYMBOLS
    libraries = {FFI_LIBRARY} if on_cpu else NEEDED_LIBRARIES
    for name in sorted({*host.imports} - allowed):
        yield Finding(
            check=Check.HOST_SYMBOLS,
            message=f"needs the symbol {name}, which is not among the {len(allowed)} that "
            "the runtime libraries are known to export",
        )
    needed = sorted(str(value) for kind, value in host.tags if kind == "DT_NEEDED")
    if needed != sorted(libraries):
        yield Finding(
            check=Check.HOST_LIBRARIES,
            message=f"needs the libraries {', '.join(needed) or '(none)'}; must need exactly "
            f"{', '.join(sorted(libraries))}",
        )
    for kind, value in host.tags:
        if kind in ("DT_RPATH", "DT_RUNPATH"):
            yield Finding(
                check=Check.HOST_LIBRARIES,
                message=f"{kind[3:]} makes the loader search {value!r}; none is allowed",
            )


def _check_relocations(host: HostObject) -> Iterator[Finding]:
    flags = {kind: value for kind, value in host.tags if kind in ("DT_TEXTREL", "DT_FLAGS")}
    if "DT_TEXTREL" in flags or flags.get("DT_FLAGS", 0) & _DF_TEXTREL:
        yield Finding(
            check=Check.HOST_RELOCATIONS, message="has text relocations; none are allowed"
        )
    if any(kind == "DT_RELR" for kind, _ in host.tags):
        yield Finding(
            check=Check.HOST_RELOCATIONS,
            message="has packed relative relocations, which loaders before glibc 2.36 ignore; link "
            "with -z nopack-relative-relocs",
        )
    for kind in sorted(host.relocations - _RELOCATIONS.keys()):
        yield Finding(
            check=Check.HOST_RELOCATIONS,
            message=f"has a relocation of type {kind}, allowed are {sorted(_RELOCATIONS)}",
        )
