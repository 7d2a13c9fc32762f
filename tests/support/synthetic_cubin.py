"""Device code that no GPU ever ran: an ELF image with the parts that a cubin is judged by."""

from __future__ import annotations

import struct

KERNEL = "kernel_gemm"

TCGEN05_1CTA_USED, TCGEN05_2CTA_USED, CLUSTER_LAUNCH_CONTROL_USED = 0x51, 0x52, 0x62


def attribute(form: int, kind: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return struct.pack("<BBH", form, kind, len(value)) + value
    return struct.pack("<BBH", form, kind, value)


def synthetic_cubin(
    *,
    sm: int = 100,
    accelerator: int = 0,
    compiled_for: str = "sm_100f",
    abi: int = 8,
    flags: int | None = None,
    registers: int = 40,
    stack_bytes: int = 0,
    local_bytes: int = 0,
    shared_bytes: int = 1024,
    threads: tuple[int, int, int] = (192, 1, 1),
    uses: tuple[int, ...] = (TCGEN05_1CTA_USED, CLUSTER_LAUNCH_CONTROL_USED),
    cuda_version: int = 134,
    left_out: str = "",
) -> bytes:
    """A cubin with one kernel; ``left_out`` names a section that is not written.

    ``flags`` are its e_flags, by default those of CUDA 13 for ``sm``.
    """
    names = ["", ".shstrtab", ".strtab", ".symtab", ".note.nv.tkinfo", ".nv.info", ".nv.compat"]
    names += [f"{prefix}.{KERNEL}" for prefix in (".nv.info", ".nv.shared", ".nv.local", ".text")]
    strings = b"\0" + KERNEL.encode() + b"\0"
    # Symbols 0 and 1: none, and the kernel as a global function.
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0x10, len(names) - 1, 0, 16)
    info = attribute(4, 0x2F, struct.pack("<II", 1, registers))
    info += attribute(4, 0x11, struct.pack("<II", 1, 0))
    info += attribute(4, 0x12, struct.pack("<II", 1, stack_bytes))
    section_names = b"\0".join(name.encode() for name in names) + b"\0"
    contents: dict[str, tuple[int, bytes, int]] = {
        ".shstrtab": (3, section_names, 0),
        ".strtab": (3, strings, 0),
        ".symtab": (2, symbols, 24),
        ".note.nv.tkinfo": (7, b"ptxas\0-O 3 -arch " + compiled_for.encode() + b" \0", 0),
        ".nv.info": (0x70000000, info, 0),
        ".nv.compat": (0x70000086, attribute(2, 9, accelerator) + attribute(3, 0x0D, 257), 0),
        f".nv.info.{KERNEL}": (
            0x70000000,
            attribute(1, 0x4C, 0)
            + attribute(4, 0x10, struct.pack("<III", *threads))
            + attribute(4, 0x37, struct.pack("<I", cuda_version))
            + b"".join(attribute(1, kind, 0) for kind in uses),
            0,
        ),
        f".nv.shared.{KERNEL}": (8, bytes(shared_bytes), 0),
        f".nv.local.{KERNEL}": (8, bytes(local_bytes), 0),
        f".text.{KERNEL}": (1, bytes(16), 0),
    }
    body = b""
    headers = bytes(64)
    offset = 64
    for name in names[1:]:
        kind, content, entry_bytes = contents[name]
        stored = b"" if kind == 8 else content
        headers += struct.pack(
            "<IIQQQQIIQQ",
            section_names.find(b"\0" + name.encode() + b"\0") + 1 if name != left_out else 0,
            kind,
            0,
            0,
            offset + len(body),
            len(content),
            2 if name == ".symtab" else 0,
            0,
            1,
            entry_bytes,
        )
        body += stored
    program = struct.pack("<IIQQQQQQ", 1, 5, offset, 0, 0, len(body), len(body), 8)
    section_offset = offset + len(body)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01\x41" + bytes([abi]) + bytes(7),
        2,
        190,
        1,
        0,
        section_offset + len(headers),
        section_offset,
        0x06000002 | sm << 8 if flags is None else flags,
        64,
        56,
        1,
        64,
        len(names),
        1,
    )
    return header + body + headers + program
