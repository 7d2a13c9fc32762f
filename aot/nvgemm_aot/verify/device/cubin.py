"""Reads and checks a kernel's device code: the cubin inside its shared object.

Field meanings come from kernels compiled for sm_90, sm_90a, sm_100, sm_100a, sm_100f, sm_103,
sm_103a and sm_103f with cutlass-dsl 4.8.1 (ptxas 13.4; 12.9 for sm_90a, sm_100f and sm_103a), whose
bytes were compared with ``cuobjdump -elf`` 13.5. Attribute names are that tool's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.gemm.target import Target

from ...targets.profile import DeviceProfile
from ..findings import Check, Finding
from ..host.elf import HEADER, MAGIC, MalformedElfError, cubin_bytes, open_elf, reading

EM_CUDA = 190
"""e_machine for device code (LLVM, BinaryFormat/ELF.h)."""


@dataclass(frozen=True)
class _FlagLayout:
    """e_flags layout: bit positions of the architecture and its accelerator suffix.

    ``has_arguments`` is True if the compiler also records its arguments in such objects.
    """

    shift: int
    accelerators: int
    has_arguments: bool


_FLAGS = {
    7: _FlagLayout(shift=0, accelerators=0x800, has_arguments=False),
    8: _FlagLayout(shift=8, accelerators=0x8, has_arguments=True),
}
"""Layouts by EI_ABIVERSION (LLVM, BinaryFormat/ELF.h: EF_CUDA_SM and EF_CUDA_ACCELERATORS). 90a is
0x5a0d5a from ptxas 12.9, which writes ABI 7 for it, and 0x06005a04 from 13.4; 100 is 0x06006402
from both.

Only 12.9 sets the accelerator bit. From 13.4, sm_100, sm_100a and sm_100f have equal e_flags, and
`_ACCELERATOR_TARGET`, which 12.9 does not write, marks architecture-specific code."""

_ACCELERATOR_TARGET = 0x09
"""EICOMPAT_ATTR_CUDA_ACCELERATOR_TARGET in .nv.compat: 1 for sm_90a, sm_100a and sm_103a; 0 for
sm_100f and plain sm_100, which only the compiler's arguments in .note.nv.tkinfo tell apart (both
run on the same GPUs)."""

_TCGEN05_1CTA_USED, _TCGEN05_2CTA_USED, _CLUSTER_LAUNCH_CONTROL_USED = 0x51, 0x52, 0x62
"""EIATTR_TCGEN05_1CTA_USED, EIATTR_TCGEN05_2CTA_USED and EIATTR_CLUSTER_LAUNCH_CONTROL_USED (in
.nv.info.<kernel>, without a value): ptxas writes them for code with such instructions. CUDA 12.9's
ptxas knows only the first two."""

_CUDA_API_VERSION = 0x37
"""EIATTR_CUDA_API_VERSION (in .nv.info.<kernel>): 134 from CUDA 13.4's ptxas, 129 from 12.9's."""

_REQNTID, _FRAME_SIZE, _MIN_STACK_SIZE, _REGCOUNT = 0x10, 0x11, 0x12, 0x2F
"""EIATTR_REQNTID (in .nv.info.<kernel>: threads along x, y, z) and, in .nv.info, EIATTR_FRAME_SIZE,
EIATTR_MIN_STACK_SIZE and EIATTR_REGCOUNT (symbol index, value)."""

RESERVED_SHARED_BYTES = 1024
"""Shared memory that CUDA reserves in every thread block (CUDA C++ Programming Guide, compute
capabilities 8.x to 10.x). .nv.shared.<kernel> includes it: 1024 bytes in all 96 inspected kernels,
none of which has static shared memory."""

MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_BLOCK = 65536
"""CUDA C++ Programming Guide, technical specifications per compute capability: the same from 5.3
on, except 6.2, which is no target."""


@dataclass(frozen=True, kw_only=True)
class DeviceKernel:
    """Kernel function in a cubin.

    Attributes:
        registers: Registers per thread at launch.
        threads: Threads per block that it was compiled for; None for any number.
        shared_bytes: Static shared memory per thread block, including CUDA's reserved part.
        local_bytes: Local memory per thread: its own, and the stack with all calls.
        ctas_per_tile: Thread blocks that issue a tcgen05 instruction together: 1 or 2; None if it
            has none, or both kinds.
        cluster_launch_control: True if it requests work through cluster launch control (CLC); None
            for code from CUDA 12, which does not record it.
        cuda_version: Compiling CUDA version times ten: 134 is 13.4.
    """

    name: str
    registers: int
    threads: int | None
    shared_bytes: int
    local_bytes: int
    ctas_per_tile: int | None
    cluster_launch_control: bool | None
    cuda_version: int


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """Device code for one architecture.

    Attributes:
        sm: Architecture number, e.g. 100.
        architecture_specific: True if it runs only on that compute capability (suffix ``a``).
        compiled_for: Architecture in the compiler's recorded arguments, e.g. ``sm_100f``; None for
            sm_90a code from CUDA 12.9, which records none.
    """

    content: bytes
    sm: int
    architecture_specific: bool
    compiled_for: str | None
    kernels: tuple[DeviceKernel, ...]

    @property
    def architecture(self) -> str:
        """Architecture by flags and attributes, e.g. ``sm_90a``; ``sm_100`` also for a family."""
        return f"sm_{self.sm}{'a' if self.architecture_specific else ''}"


def read_cubins(payload: bytes) -> tuple[Cubin, ...]:
    """Finds and reads all device code inside a host shared object.

    Raises:
        MalformedElfError: If it has none, or some is unreadable.
    """
    cubins = tuple(_read_cubin(content) for content in _find_images(payload))
    if not cubins:
        raise MalformedElfError(f"no device code: no ELF image of machine {EM_CUDA} inside")
    return cubins


def spilled_bytes(payload: bytes) -> int:
    """Returns the largest local memory per thread, in bytes; 0 without readable device code."""
    return max((kernel.local_bytes for kernel in _readable_kernels(payload)), default=0)


def foreign_cuda_versions(payload: bytes, cuda: str) -> list[str]:
    """Returns CUDA versions such as 13.4 that compiled device code but differ from ``cuda``.

    ``cuda`` is a CUDA major such as ``cu12``. Unreadable device code counts for no version.
    """
    versions = {kernel.cuda_version for kernel in _readable_kernels(payload)}
    return [str(version / 10) for version in sorted(versions) if f"cu{version // 10}" != cuda]


def _readable_kernels(payload: bytes) -> list[DeviceKernel]:
    try:
        return [kernel for cubin in read_cubins(payload) for kernel in cubin.kernels]
    except MalformedElfError:
        return []


def check_cubin(
    cubin: Cubin, *, target: Target, profiles: Sequence[DeviceProfile], launch_bytes: int | None
) -> Iterator[Finding]:
    """Checks device code against its target and its GPUs' limits.

    ``launch_bytes`` is the launch's dynamic shared memory per thread block. None, if the launcher
    does not show it, is a finding unless the code has no shared memory at all.
    """
    architecture = target.arch.removesuffix("f")
    if cubin.architecture != architecture:
        yield Check.ARCHITECTURE.finding(
            f"device code is for {cubin.architecture} by its flags, target {target.arch} "
            f"needs {architecture}"
        )
    if cubin.compiled_for not in (None, target.arch):
        yield Check.ARCHITECTURE.finding(
            f"device code was compiled for {cubin.compiled_for}, must be {target.arch}"
        )
    if launch_bytes is None and any(kernel.shared_bytes for kernel in cubin.kernels):
        yield Check.SHARED_MEMORY.unseen("the launcher does not show its dynamic shared memory")
    for kernel in cubin.kernels:
        if f"cu{kernel.cuda_version // 10}" != target.cuda:
            yield Check.CUDA_VERSION.finding(
                f"device code was compiled with CUDA {kernel.cuda_version / 10}, target "
                f"{target.key} needs {target.cuda}"
            )
        if kernel.local_bytes:
            # 96 inspected kernels have none; local memory means spilled registers.
            yield Check.LOCAL_MEMORY.finding(
                f"{kernel.local_bytes} bytes of local memory a thread, must be 0"
            )
        for profile in profiles:
            yield from _check_limits(kernel, profile, launch_bytes or 0)


def _check_limits(
    kernel: DeviceKernel, profile: DeviceProfile, launch_bytes: int
) -> Iterator[Finding]:
    shared = kernel.shared_bytes + launch_bytes
    shared_limit = profile.shared_memory_per_block_bytes.value + RESERVED_SHARED_BYTES
    thread_limit = profile.registers_per_thread.value
    limits = [
        (Check.REGISTERS, kernel.registers, thread_limit, "registers a thread"),
        (Check.SHARED_MEMORY, shared, shared_limit, "bytes of shared memory a block"),
    ]
    if kernel.threads is not None:
        registers = kernel.threads * kernel.registers
        limits += [
            (Check.THREADS, kernel.threads, MAX_THREADS_PER_BLOCK, "threads a block"),
            (Check.REGISTERS, registers, MAX_REGISTERS_PER_BLOCK, "registers a block"),
        ]
    for check, observed, most, unit in limits:
        if observed > most:
            yield check.finding(f"{observed} {unit}, {profile.name} has {most}")


def _find_images(payload: bytes) -> Iterator[bytes]:
    start = payload.find(MAGIC, 1)
    while start >= 0:
        with reading(f"the image at byte {start}"):
            header = HEADER.unpack_from(payload, start)
        size = len(MAGIC)
        if header[2] == EM_CUDA:
            size = cubin_bytes(header)
            yield payload[start : start + size]
        start = payload.find(MAGIC, start + size)


def _read_cubin(content: bytes) -> Cubin:
    elf = open_elf(content)
    with reading("device code"):
        abi = elf["e_ident"]["EI_ABIVERSION"]
        layout = _FLAGS.get(abi)
        if layout is None:
            known = " or ".join(map(str, _FLAGS))
            raise MalformedElfError(f"device code has ABI {abi}, must be {known}")
        sections = {str(part.name): part for part in elf.iter_sections()}
        symbols = sections[".symtab"]
        names = [str(symbol.name) for symbol in symbols.iter_symbols()]
        flags = int(elf["e_flags"])
        kernels = tuple(_kernels(sections, names))
        compiled_for, accelerator = (
            _recorded_architecture(sections),
            _accelerator_attribute(sections),
        )
        is_new = any(kernel.cuda_version >= 130 for kernel in kernels)
        needs_arguments = is_new or layout.has_arguments
        if (
            not kernels
            or (needs_arguments and compiled_for is None)
            or (is_new and accelerator is None)
        ):
            raise MalformedElfError(
                "device code lacks the compiler's arguments, the accelerator attribute or kernels"
            )
        return Cubin(
            content=content,
            sm=flags >> layout.shift & 0xFF,
            architecture_specific=bool(flags & layout.accelerators or accelerator),
            compiled_for=compiled_for,
            kernels=kernels,
        )


def _accelerator_attribute(sections: dict[str, Any]) -> int | None:
    """Returns the attribute that is nonzero for architecture-specific code, or None if missing."""
    if ".nv.compat" not in sections:
        return None
    value = dict(_split_attributes(sections[".nv.compat"].data())).get(_ACCELERATOR_TARGET)
    return None if value is None else value[0]


def _recorded_architecture(sections: dict[str, Any]) -> str | None:
    """Returns the architecture in the compiler's recorded arguments, or None."""
    if ".note.nv.tkinfo" not in sections:
        return None
    match = re.search(rb"-arch (sm_[0-9]+[af]?)\b", sections[".note.nv.tkinfo"].data())
    return None if match is None else match[1].decode("ascii")


def _kernels(sections: dict[str, Any], names: list[str]) -> Iterator[DeviceKernel]:
    registers: dict[str, int] = {}
    stack_bytes = 0
    for kind, value in _split_attributes(sections[".nv.info"].data()):
        if kind == _REGCOUNT:
            symbol, count = struct.unpack("<II", value)
            registers[names[symbol]] = count
        elif kind in (_FRAME_SIZE, _MIN_STACK_SIZE):
            stack_bytes = max(stack_bytes, struct.unpack("<II", value)[1])
    for section in sections:
        prefix, _, name = section.partition(".nv.info.")
        if prefix or not name:
            continue
        attributes = dict(_split_attributes(sections[section].data()))
        threads = attributes.get(_REQNTID)
        ctas_by_attribute = ((_TCGEN05_1CTA_USED, 1), (_TCGEN05_2CTA_USED, 2))
        ctas = [count for kind, count in ctas_by_attribute if kind in attributes]
        x, y, z = struct.unpack("<III", threads) if threads else (0, 0, 0)
        cuda_version = struct.unpack("<I", attributes[_CUDA_API_VERSION])[0]
        asks_for_work = _CLUSTER_LAUNCH_CONTROL_USED in attributes
        yield DeviceKernel(
            name=name,
            registers=registers[name],
            threads=x * y * z or None,
            shared_bytes=_section_bytes(sections, f".nv.shared.{name}"),
            local_bytes=_section_bytes(sections, f".nv.local.{name}") + stack_bytes,
            ctas_per_tile=ctas[0] if len(ctas) == 1 else None,
            cluster_launch_control=asks_for_work if cuda_version >= 130 else asks_for_work or None,
            cuda_version=cuda_version,
        )


def _section_bytes(sections: dict[str, Any], name: str) -> int:
    return int(sections[name]["sh_size"]) if name in sections else 0


def _split_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Splits .nv.info or .nv.compat: format, attribute, then two bytes or a length and content."""
    position = 0
    while position < len(data):
        form, kind, short = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == 4:  # EIFMT_SVAL
            yield kind, data[position : position + short]
            position += short
        elif form in (1, 2, 3):  # EIFMT_NVAL, EIFMT_BVAL, EIFMT_HVAL
            yield kind, struct.pack("<H", short)
        else:
            raise MalformedElfError(f"attribute {kind:#x} has the unknown format {form}")
