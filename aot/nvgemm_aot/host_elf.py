"""The host part of a kernel: a small shared object that a process loads and calls.

The linker stage and ``verify`` use the same rules, so that no kernel enters a bundle that could
not be loaded for a reason known at build time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.errors import LinkError

from .elf_reading import MAX_SYMBOLS, MalformedElfError, open_elf, reading
from .gap import Check, Gap
from .launcher import vector_extension

ALLOWED_SYMBOLS = frozenset(
    {
        # Exported by libtvm_ffi.so.
        "TVMFFIEnvGetStream",
        "TVMFFIErrorSetRaisedFromCStr",
        "TVMFFIErrorSetRaisedFromCStrParts",
        # Exported by libcute_dsl_runtime.so.
        "CuteDSLRT_TVMFFISetRaisedCudaError",
        "_cuKernelGetAttribute",
        "_cudaDeviceGetAttribute",
        "_cudaFuncSetAttribute",
        "_cudaGetDevice",
        "_cudaKernelSetAttributeForDevice",
        "_cudaLaunchKernelEx",
        "_cudaLibraryGetKernel",
        "_cudaLibraryLoadData",
        "_cudaSetDevice",
        "cuda_dialect_init_library_once",
        "cuda_dialect_unload_library_once",
    }
)
"""Symbols a kernel may leave undefined.

Source: the objects of 96 kernels that cutlass-dsl 4.8.1 compiled for sm_90a, sm_100a, sm_100f and
sm_103a (dense persistent with both schedulers, preferred cluster, epilogue fusion, TGV, SM90,
SM80) all use exactly these; each was found among the exported symbols of libcute_dsl_runtime.so
4.8.1 (cu13) or libtvm_ffi.so 0.1.15.
"""

NEEDED_LIBRARIES = frozenset({"libcute_dsl_runtime.so", "libtvm_ffi.so"})
"""Libraries a kernel may name as needed: the SONAMEs of the two that export `ALLOWED_SYMBOLS`."""

_MACHINE = {"linux_x86_64": "EM_X86_64"}
"""By host platform: the machine that an ELF header must name."""

_RELOCATIONS = {1: "R_X86_64_64", 6: "R_X86_64_GLOB_DAT", 7: "R_X86_64_JUMP_SLOT", 8: "RELATIVE"}
"""Dynamic relocations that only store addresses (System V ABI, AMD64 supplement, table 4.10).

Others would copy data or run code while loading, and no kernel seen has any.
"""

_DF_TEXTREL = 0x4
_PF_X, _PF_W = 0x1, 0x2


@dataclass(frozen=True, kw_only=True)
class _Segment:
    kind: str
    flags: int
    address: int
    memory: int

    def holds(self, address: int) -> bool:
        return self.kind == "PT_LOAD" and self.address <= address < self.address + self.memory


@dataclass(frozen=True, kw_only=True)
class _Symbol:
    name: str
    defined: bool
    local: bool
    function: bool
    address: int


@dataclass(frozen=True, kw_only=True)
class _HostElf:
    machine: str
    kind: str
    system: str
    segments: tuple[_Segment, ...]
    tags: tuple[tuple[str, Any], ...]
    symbols: tuple[_Symbol, ...]
    relocations: tuple[tuple[int, int, int], ...]
    """Type, address, index of the symbol."""


def check_host_elf(data: bytes, exported: str, *, platform: str = "linux_x86_64") -> None:
    """Refuse a payload that a process with the two runtime libraries could not load.

    Args:
        data: The shared object.
        exported: Name of the one function it must export, e.g. ``__tvm_ffi_gemm``.
        platform: Host platform of the target.

    Raises:
        LinkError: Naming everything that is wrong, each with what is allowed.
    """
    gaps = find_host_gaps(data, exported, platform=platform)
    if gaps:
        raise LinkError(
            f"the linked kernel could not be loaded: {'; '.join(gap.message for gap in gaps)}"
        )


def find_host_gaps(data: bytes, exported: str, *, platform: str) -> tuple[Gap, ...]:
    """Find what keeps a payload from being loaded; arguments as in `check_host_elf`.

    Returns:
        What is wrong; empty if nothing is. Malformed input is one of the gaps.
    """
    try:
        elf = _read(data)
    except MalformedElfError as error:
        return (Gap(check=Check.HOST_FORMAT, message=str(error)),)
    return (
        *_check_format(elf, platform),
        *_check_exports(elf, exported),
        *_check_imports(elf),
        *_check_segments(elf),
        *_check_relocations(elf),
        *_check_processor(data, platform),
    )


def _check_processor(data: bytes, platform: str) -> list[Gap]:
    extension = vector_extension(data)
    if extension is None:
        return []
    message = f"host code uses {extension}; not every {platform} processor has it"
    return [Gap(check=Check.HOST_PROCESSOR, message=message)]


def _read(data: bytes) -> _HostElf:
    elf = open_elf(data, sections=False)
    with reading("the shared object"):
        dynamic = [part for part in elf.iter_segments() if part["p_type"] == "PT_DYNAMIC"]
        if len(dynamic) != 1:
            raise MalformedElfError(f"{len(dynamic)} dynamic segments, a shared object has 1")
        count = dynamic[0].num_symbols()
        if count > MAX_SYMBOLS:
            raise MalformedElfError(f"{count} dynamic symbols, at most {MAX_SYMBOLS}")
        return _HostElf(
            machine=str(elf["e_machine"]),
            kind=str(elf["e_type"]),
            system=str(elf["e_ident"]["EI_OSABI"]),
            segments=tuple(_segment(part, len(data)) for part in elf.iter_segments()),
            tags=tuple(_tags(dynamic[0])),
            symbols=tuple(_symbol(dynamic[0].get_symbol(index)) for index in range(count)),
            relocations=tuple(_relocations(dynamic[0])),
        )


def _segment(part: Any, image_bytes: int) -> _Segment:
    if part["p_offset"] + part["p_filesz"] > image_bytes:
        raise MalformedElfError(
            f"a segment ends at byte {part['p_offset'] + part['p_filesz']}, the image at "
            f"{image_bytes}"
        )
    return _Segment(
        kind=str(part["p_type"]),
        flags=int(part["p_flags"]),
        address=int(part["p_vaddr"]),
        memory=int(part["p_memsz"]),
    )


def _tags(dynamic: Any) -> Iterator[tuple[str, Any]]:
    names = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    for tag in dynamic.iter_tags():
        kind = str(tag.entry.d_tag)
        yield kind, getattr(tag, names[kind]) if kind in names else int(tag.entry.d_val)


def _symbol(symbol: Any) -> _Symbol:
    return _Symbol(
        name=str(symbol.name),
        defined=symbol["st_shndx"] != "SHN_UNDEF",
        local=symbol["st_info"]["bind"] == "STB_LOCAL",
        function=symbol["st_info"]["type"] == "STT_FUNC",
        address=int(symbol["st_value"]),
    )


def _relocations(dynamic: Any) -> Iterator[tuple[int, int, int]]:
    for name, table in dynamic.get_relocation_tables().items():
        if name == "RELR":  # has no types; _check_relocations refuses its tag
            continue
        for relocation in table.iter_relocations():
            yield (
                int(relocation["r_info_type"]),
                int(relocation["r_offset"]),
                int(relocation["r_info_sym"]),
            )


def _check_format(elf: _HostElf, platform: str) -> Iterator[Gap]:
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


def _check_exports(elf: _HostElf, exported: str) -> Iterator[Gap]:
    defined = [symbol for symbol in elf.symbols if symbol.defined and not symbol.local]
    names = sorted(symbol.name for symbol in defined)
    if names != [exported]:
        yield Gap(
            check=Check.HOST_EXPORTS,
            message=f"exports {', '.join(names) or 'nothing'}; must export exactly {exported}",
        )
        return
    code = [part for part in elf.segments if part.flags & _PF_X and part.holds(defined[0].address)]
    if not defined[0].function or not code:
        yield Gap(
            check=Check.HOST_EXPORTS,
            message=f"{exported} at address {defined[0].address:#x} is not a function in an "
            "executable segment",
        )


def _check_imports(elf: _HostElf) -> Iterator[Gap]:
    undefined = {symbol.name for symbol in elf.symbols if not symbol.defined and symbol.name}
    for name in sorted(undefined - ALLOWED_SYMBOLS):
        yield Gap(
            check=Check.HOST_SYMBOLS,
            message=f"needs the symbol {name}, which is not among the {len(ALLOWED_SYMBOLS)} that "
            "the runtime libraries are known to export",
        )
    for kind, value in elf.tags:
        if kind == "DT_NEEDED" and value not in NEEDED_LIBRARIES:
            yield Gap(
                check=Check.HOST_LIBRARIES,
                message=f"needs the library {value}; allowed are "
                f"{', '.join(sorted(NEEDED_LIBRARIES))}",
            )
        if kind in ("DT_RPATH", "DT_RUNPATH"):
            yield Gap(
                check=Check.HOST_LIBRARIES,
                message=f"{kind[3:]} makes the loader search {value!r}; none is allowed",
            )


def _check_segments(elf: _HostElf) -> Iterator[Gap]:
    for part in elf.segments:
        if part.kind == "PT_LOAD" and part.flags & _PF_W and part.flags & _PF_X:
            yield Gap(
                check=Check.HOST_SEGMENTS,
                message=f"the segment at address {part.address:#x} is writable and executable",
            )
    stacks = [part.flags for part in elf.segments if part.kind == "PT_GNU_STACK"]
    # Without the header, x86-64 Linux loads the object with an executable stack.
    if not stacks or any(flags & _PF_X for flags in stacks):
        yield Gap(
            check=Check.HOST_SEGMENTS,
            message="asks for an executable stack; a GNU_STACK header without X is needed",
        )


def _check_relocations(elf: _HostElf) -> Iterator[Gap]:
    flags = {kind: value for kind, value in elf.tags if kind in ("DT_TEXTREL", "DT_FLAGS")}
    if "DT_TEXTREL" in flags or flags.get("DT_FLAGS", 0) & _DF_TEXTREL:
        yield Gap(check=Check.HOST_RELOCATIONS, message="has text relocations; none are allowed")
    if any(kind == "DT_RELR" for kind, _ in elf.tags):
        yield Gap(
            check=Check.HOST_RELOCATIONS,
            message="has packed relative relocations, which loaders before glibc 2.36 ignore; link "
            "with -z nopack-relative-relocs",
        )
    for kind, address, index in elf.relocations:
        problem = None
        if kind not in _RELOCATIONS:
            problem = f"is of type {kind}, allowed are {sorted(_RELOCATIONS)}"
        elif index >= len(elf.symbols):
            problem = f"names symbol {index}, there are {len(elf.symbols)}"
        elif not any(part.flags & _PF_W and part.holds(address) for part in elf.segments):
            problem = "is not in a writable segment"
        if problem:
            yield Gap(
                check=Check.HOST_RELOCATIONS,
                message=f"the relocation at address {address:#x} {problem}",
            )
