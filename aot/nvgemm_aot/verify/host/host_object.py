"""A kernel's host part: a small shared object that a process loads and calls.

The build checks its linked kernels and ``verify`` checks a bundle's by the same rules, which
describe the known toolchain's output. They detect another compiler, linker or setting, not malice:
loading a kernel runs its code anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS, EARLIER_SYMBOLS, FFI_SYMBOLS
from nvgemm_runtime.errors import LinkError
from nvgemm_runtime.gemm.target import PLATFORMS
from nvgemm_runtime.matching.device import FFI_LIBRARY, RUNTIME_LIBRARY

from ..findings import Check, Finding
from .elf import MalformedElfError, open_elf, reading
from .launch_code import LAUNCH_CODE

ALLOWED_SYMBOLS = FFI_SYMBOLS | DEVICE_SYMBOLS | EARLIER_SYMBOLS
"""Symbols that a kernel may leave undefined; the runtime says which library defines them."""

NEEDED_LIBRARIES = frozenset({RUNTIME_LIBRARY, FFI_LIBRARY})
"""Libraries that a kernel needs: SONAMEs that export `ALLOWED_SYMBOLS`. A CPU kernel needs only
TVM-FFI's."""

MACHINES = {"linux_x86_64": "EM_X86_64", "linux_aarch64": "EM_AARCH64"}
"""ELF header machine by host platform."""

PAGE_BYTES = {"linux_x86_64": 4096, "linux_aarch64": 65536}
"""Largest memory page by platform, to which file parts are aligned. Grace machines have 64 KiB
pages and load nothing with a smaller alignment."""

_SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym in the System V ABI, little-endian."""

_SHN_UNDEF, _STB_LOCAL = 0, 0
_DF_TEXTREL = 0x4
_PF_X, _PF_W = 0x1, 0x2


@dataclass(frozen=True, kw_only=True)
class HostObject:
    """Shared object as a loader sees it.

    Attributes:
        machine: Machine in its header, e.g. ``EM_X86_64``.
        tags: Texts or numbers in its dynamic segment, by kind such as ``DT_NEEDED``.
        exports: Names that it defines for others, sorted.
        imports: Names that other libraries must define, sorted.
        has_plain_stack: True if it states that its stack need not be executable.
        page_bytes: Largest memory page for which all parts are aligned.
        code: Executable part in memory.
        read_only: Read-only part in memory, ``code`` included.
    """

    machine: str
    tags: dict[str, list[Any]]
    exports: tuple[str, ...]
    imports: tuple[str, ...]
    has_plain_stack: bool
    page_bytes: int
    code: bytes
    read_only: bytes


def read_host_object(payload: bytes) -> HostObject:
    """Reads a shared object by its program headers and dynamic segment.

    Raises:
        MalformedElfError: If it is unreadable.
    """
    elf = open_elf(payload)
    with reading("the shared object"):
        segments: dict[str, list[Any]] = {}
        for segment in elf.iter_segments():
            segments.setdefault(str(segment["p_type"]), []).append(segment)
        dynamics = segments.get("PT_DYNAMIC", [])
        if len(dynamics) != 1:
            raise MalformedElfError(f"{len(dynamics)} dynamic segments, a shared object has 1")
        [dynamic] = dynamics
        symbols = list(_symbols(payload, dynamic))
        stacks = [int(part["p_flags"]) for part in segments.get("PT_GNU_STACK", [])]
        loaded = [
            (int(part["p_flags"]), payload[part["p_offset"] : part["p_offset"] + part["p_filesz"]])
            for part in segments.get("PT_LOAD", [])
        ]
        return HostObject(
            machine=str(elf["e_machine"]),
            tags=_tags(dynamic),
            exports=tuple(
                sorted(
                    symbol.name for symbol in symbols if symbol.is_defined and not symbol.is_local
                )
            ),
            imports=tuple(sorted({symbol.name for symbol in symbols if not symbol.is_defined})),
            has_plain_stack=bool(stacks) and not any(flags & _PF_X for flags in stacks),
            page_bytes=min(
                (int(part["p_align"]) for part in segments.get("PT_LOAD", [])), default=0
            ),
            code=b"".join(content for flags, content in loaded if flags & _PF_X),
            read_only=b"".join(content for flags, content in loaded if not flags & _PF_W),
        )


class _Symbol(NamedTuple):
    name: str
    is_defined: bool
    is_local: bool


def _symbols(payload: bytes, dynamic: Any) -> Iterator[_Symbol]:
    """Reads the dynamic symbols, without the first, which is null.

    pyelftools looks up both tables anew for each symbol, which takes most of a kernel's check.
    """
    [start, names] = [dynamic.get_table_offset(tag)[1] for tag in ("DT_SYMTAB", "DT_STRTAB")]
    if start is None or names is None:
        raise MalformedElfError("it has no dynamic symbols, or no names for them")
    end = start + dynamic.num_symbols() * _SYMBOL.size
    if end > len(payload):
        raise MalformedElfError(f"its symbols end at {end}, the file at {len(payload)}")
    for name, info, _, section, _, _ in _SYMBOL.iter_unpack(payload[start + _SYMBOL.size : end]):
        begin = names + name
        text = payload[begin : payload.index(b"\0", begin)].decode()
        yield _Symbol(text, is_defined=section != _SHN_UNDEF, is_local=info >> 4 == _STB_LOCAL)


def _tags(dynamic: Any) -> dict[str, list[Any]]:
    texts = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    tags: dict[str, list[Any]] = {}
    for tag in dynamic.iter_tags():
        kind = str(tag.entry.d_tag)
        value = getattr(tag, texts[kind]) if kind in texts else tag.entry.d_val
        tags.setdefault(kind, []).append(value)
    return tags


def object_machine(content: bytes) -> str:
    """Returns the machine in an object's header, e.g. ``EM_X86_64``.

    Raises:
        MalformedElfError: If it is no object.
    """
    elf = open_elf(content)
    with reading("the header"):
        return str(elf["e_machine"])


def require_host_object(
    payload: bytes, exported: str, *, platform: str = PLATFORMS[0], on_cpu: bool = False
) -> None:
    """Raises unless a payload looks like the known toolchain's output.

    Raises:
        LinkError: With every rule in `check_host_object` that it breaks.
    """
    try:
        host = read_host_object(payload)
        findings = check_host_object(host, exported, platform=platform, on_cpu=on_cpu)
        broken = [finding.message for finding in findings]
    except MalformedElfError as error:
        broken = [str(error)]
    if broken:
        raise LinkError(f"the linked kernel is not as it must be: {'; '.join(broken)}")


def check_host_object(
    host: HostObject,
    exported: str | None,
    *,
    platform: str = PLATFORMS[0],
    on_cpu: bool = False,
) -> Iterator[Finding]:
    """Checks a shared object against the known toolchain's output.

    ``exported`` names the single function that it must export, e.g. ``__tvm_ffi_gemm``, if known;
    ``platform`` is the target's.
    """
    machine = MACHINES.get(platform)
    if machine is None:
        yield Check.HOST_FORMAT.finding(
            f"no rules for platform {platform!r} (known: {', '.join(MACHINES)})"
        )
    elif host.machine != machine:
        yield Check.HOST_FORMAT.finding(
            f"machine is {host.machine}, must be {machine} for {platform}"
        )
    page_bytes = PAGE_BYTES.get(platform, 0)
    if host.page_bytes < page_bytes:
        yield Check.HOST_FORMAT.finding(
            f"is aligned for memory pages of {host.page_bytes} bytes, machines of {platform} have "
            f"pages of up to {page_bytes}"
        )
    if len(host.exports) != 1 or exported not in (None, *host.exports):
        yield Check.HOST_EXPORTS.finding(
            f"exports {', '.join(host.exports) or 'nothing'}; must export exactly "
            f"{exported or 'one function'}"
        )
    yield from _check_imports(host, on_cpu)
    if not host.has_plain_stack:
        # Without the header, an object asks for an executable stack too, and glibc 2.41 refuses it.
        yield Check.HOST_STACK.finding(
            "asks for an executable stack; a GNU_STACK header without X is needed"
        )
    if "DT_TEXTREL" in host.tags or host.tags.get("DT_FLAGS", [0])[0] & _DF_TEXTREL:
        yield Check.HOST_RELOCATIONS.finding("has text relocations; none are allowed")
    if "DT_RELR" in host.tags:
        yield Check.HOST_RELOCATIONS.finding(
            "has packed relative relocations, which loaders before glibc 2.36 ignore; link with "
            "-z nopack-relative-relocs"
        )
    reader = LAUNCH_CODE.get(platform)
    extension = reader.extension(host.code) if reader is not None else None
    if extension is not None:
        yield Check.HOST_PROCESSOR.finding(
            f"host code uses {extension}; not every processor of {platform} has it"
        )


def _check_imports(host: HostObject, on_cpu: bool) -> Iterator[Finding]:
    allowed = FFI_SYMBOLS if on_cpu else ALLOWED_SYMBOLS
    libraries = {FFI_LIBRARY} if on_cpu else NEEDED_LIBRARIES
    for name in sorted({*host.imports} - allowed):
        yield Check.HOST_SYMBOLS.finding(
            f"needs the symbol {name}, which is not among the {len(allowed)} that "
            "the runtime libraries are known to export"
        )
    needed = sorted(map(str, host.tags.get("DT_NEEDED", [])))
    if needed != sorted(libraries):
        yield Check.HOST_LIBRARIES.finding(
            f"needs the libraries {', '.join(needed) or '(none)'}; must need exactly "
            f"{', '.join(sorted(libraries))}"
        )
    for kind in ("DT_RPATH", "DT_RUNPATH"):
        for value in host.tags.get(kind, []):
            yield Check.HOST_LIBRARIES.finding(
                f"{kind[3:]} makes the loader search {value!r}; none is allowed"
            )
