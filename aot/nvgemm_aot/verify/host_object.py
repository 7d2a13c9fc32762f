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
from nvgemm_runtime.gemm.target import PLATFORMS
from nvgemm_runtime.matching.device import FFI_LIBRARY, RUNTIME_LIBRARY

from .elf import MalformedElfError, open_elf, reading
from .findings import Check, Finding
from .launch_code import LAUNCH_CODE

ALLOWED_SYMBOLS = FFI_SYMBOLS | DEVICE_SYMBOLS
"""Symbols a kernel may leave undefined: the runtime says where they come from."""

NEEDED_LIBRARIES = frozenset({RUNTIME_LIBRARY, FFI_LIBRARY})
"""Libraries a kernel names as needed: the SONAMEs of the two that export `ALLOWED_SYMBOLS`. A
kernel for the CPU calls, and may name, but the one of TVM-FFI."""

MACHINES = {"linux_x86_64": "EM_X86_64", "linux_aarch64": "EM_AARCH64"}
"""By host platform: the machine that an ELF header must name."""

PAGE_BYTES = {"linux_x86_64": 4096, "linux_aarch64": 65536}
"""By platform: the largest memory page, to which parts of a file are aligned. Grace machines have
pages of 64 KiB, and load nothing that is aligned to less."""

_DF_TEXTREL = 0x4
_PF_X, _PF_W = 0x1, 0x2


@dataclass(frozen=True, kw_only=True)
class HostObject:
    """A shared object as a loader sees it.

    Attributes:
        machine: From its header, e.g. ``EM_X86_64``.
        tags: By kind, such as ``DT_NEEDED``, the texts or numbers in its dynamic segment.
        exports: Names that it defines for others, sorted.
        imports: Names that it leaves for other libraries to define, sorted.
        has_plain_stack: Whether it states that its stack need not be executable.
        page_bytes: The largest memory page for which all of its parts are aligned.
        code: Its executable part in memory.
        read_only: Its part in memory that cannot be written, ``code`` included.
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
    """Read a shared object by its program headers and dynamic segment.

    Raises:
        MalformedElfError: If it cannot be read.
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
        symbols = [dynamic.get_symbol(index) for index in range(1, dynamic.num_symbols())]
        defined = [symbol for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"]
        stacks = [int(part["p_flags"]) for part in segments.get("PT_GNU_STACK", [])]
        loaded = [
            (int(part["p_flags"]), payload[part["p_offset"] : part["p_offset"] + part["p_filesz"]])
            for part in segments.get("PT_LOAD", [])
        ]
        return HostObject(
            machine=str(elf["e_machine"]),
            tags=_tags(dynamic),
            exports=tuple(
                sorted(str(one.name) for one in defined if one["st_info"]["bind"] != "STB_LOCAL")
            ),
            imports=tuple(
                sorted({str(one.name) for one in symbols if one["st_shndx"] == "SHN_UNDEF"})
            ),
            has_plain_stack=bool(stacks) and not any(flags & _PF_X for flags in stacks),
            page_bytes=min((int(one["p_align"]) for one in segments.get("PT_LOAD", [])), default=0),
            code=b"".join(content for flags, content in loaded if flags & _PF_X),
            read_only=b"".join(content for flags, content in loaded if not flags & _PF_W),
        )


def _tags(dynamic: Any) -> dict[str, list[Any]]:
    texts = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    found: dict[str, list[Any]] = {}
    for tag in dynamic.iter_tags():
        kind = str(tag.entry.d_tag)
        value = getattr(tag, texts[kind]) if kind in texts else tag.entry.d_val
        found.setdefault(kind, []).append(value)
    return found


def object_machine(content: bytes) -> str:
    """The machine that the header of an object names, e.g. ``EM_X86_64``.

    Raises:
        MalformedElfError: If it is no object.
    """
    elf = open_elf(content)
    with reading("the header"):
        return str(elf["e_machine"])


def require_host_object(
    payload: bytes, exported: str, *, platform: str = PLATFORMS[0], on_cpu: bool = False
) -> None:
    """Refuse a payload that is not what the toolchain is known to make.

    Raises:
        LinkError: With every rule of `check_host_object` that it breaks.
    """
    try:
        host = read_host_object(payload)
        found = check_host_object(host, exported, platform=platform, on_cpu=on_cpu)
        broken = [one.message for one in found]
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
    """Check a shared object against what the toolchain is known to make.

    ``exported`` names the one function that it must export, e.g. ``__tvm_ffi_gemm``, if that is
    known; ``platform`` is the target's.
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
