"""The host part of a payload, with shared objects that the system compiler makes."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.verify.findings import Check, Finding
from nvgemm_aot.verify.host.elf import MalformedElfError, open_elf
from nvgemm_aot.verify.host.host_object import (
    ALLOWED_SYMBOLS,
    NEEDED_LIBRARIES,
    check_host_object,
    read_host_object,
    require_host_object,
)
from nvgemm_aot.verify.host.launch_code import launch_clusters, launch_shared_bytes
from nvgemm_runtime.errors import LinkError
from nvgemm_runtime.gemm.target import Target
from synthetic_payload import host_payload, shared_object

_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_DEBUG = 4, 5, 6, 21

ENTRY = "__tvm_ffi_gemm"
SOURCE = """
int TVMFFIEnvGetStream(void);
__attribute__((visibility("hidden"))) int (*table)(void) = TVMFFIEnvGetStream;
int __tvm_ffi_gemm(void) { return table(); }
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return shared_object(tmp_path_factory.mktemp("host"), SOURCE)


def findings_of(
    payload: bytes, exported: str = ENTRY, platform: str = "linux_x86_64"
) -> list[Finding]:
    return list(check_host_object(read_host_object(payload), exported, platform=platform))


def code_of(payload: bytes) -> bytes:
    return read_host_object(payload).code


def assert_only(findings: list[Finding], check: Check, message: str) -> None:
    assert [finding.check for finding in findings] == [check], findings
    assert message in findings[0].message


def test_accepts_loadable_kernel(good: bytes) -> None:
    assert not findings_of(good)
    require_host_object(good, ENTRY)


def dynamic_entries(payload: bytes) -> dict[int, tuple[int, int]]:
    """Offset and value of each entry in the dynamic segment, by tag."""
    [segment] = [one for one in open_elf(payload).iter_segments() if one["p_type"] == "PT_DYNAMIC"]
    end = segment["p_offset"] + segment["p_filesz"]
    entries = (
        (offset, *struct.unpack_from("<qQ", payload, offset))
        for offset in range(segment["p_offset"], end, 16)
    )
    return {tag: (offset, value) for offset, tag, value in entries}


def changed(payload: bytes, offset: int, *values: int, form: str = "<Q") -> bytes:
    data = struct.pack(form, *values)
    return payload[:offset] + data + payload[offset + len(data) :]


def test_symbols_that_a_shared_object_lacks_are_named(tmp_path: Path) -> None:
    good = shared_object(tmp_path, SOURCE, "-Wl,--hash-style=sysv")
    entries = dynamic_entries(good)
    symbols, names = entries[_DT_SYMTAB], entries[_DT_STRTAB]
    first = symbols[1] + 24  # addresses of the first segment are offsets
    damaged = [
        ("it has no dynamic symbols, or no names", changed(good, symbols[0], _DT_DEBUG)),
        ("it has no dynamic symbols, or no names", changed(good, names[0], _DT_DEBUG)),
        ("its symbols end at", changed(good, entries[_DT_HASH][1] + 4, len(good) // 16, form="<I")),
        ("subsection not found", changed(good, first, len(good), form="<I")),
    ]
    for reason, payload in damaged:
        with pytest.raises(MalformedElfError, match=reason):
            read_host_object(payload)


def test_finds_code_for_another_machine(good: bytes) -> None:
    payload = good[:18] + struct.pack("<H", 183) + good[20:]
    assert_only(findings_of(payload), Check.HOST_FORMAT, "EM_AARCH64, must be EM_X86_64")


def test_finds_a_platform_that_has_no_rules(good: bytes) -> None:
    findings = findings_of(good, platform="linux_riscv64")
    assert_only(findings, Check.HOST_FORMAT, "no rules for platform 'linux_riscv64'")


def test_finds_parts_that_large_pages_would_tear_apart(good: bytes) -> None:
    """A loader maps whole pages: on a Grace machine of 64 KiB."""
    host = read_host_object(good)
    assert host.page_bytes >= 4096
    of_arm = replace(host, machine="EM_AARCH64", page_bytes=4096)
    messages = [one.message for one in check_host_object(of_arm, ENTRY, platform="linux_aarch64")]
    assert any("pages of 4096 bytes" in one and "up to 65536" in one for one in messages)
    assert not [*check_host_object(replace(host, page_bytes=65536), ENTRY)]
    small = replace(host, page_bytes=2048)
    assert_only([*check_host_object(small, ENTRY)], Check.HOST_FORMAT, "pages of 2048 bytes")


def test_finds_code_for_another_processor(good: bytes) -> None:
    findings = findings_of(good, platform="linux_aarch64")
    said = "machine is EM_X86_64, must be EM_AARCH64 for linux_aarch64"
    assert said in [finding.message for finding in findings]


def test_refusal_names_everything_that_is_wrong(tmp_path: Path) -> None:
    source = SOURCE + "int malloc(void); int other(void) { return malloc(); }"
    with pytest.raises(LinkError, match=r"exports __tvm_ffi_gemm, other;.*needs the symbol malloc"):
        require_host_object(shared_object(tmp_path, source), ENTRY)


def test_finds_other_entry_point(good: bytes) -> None:
    findings = findings_of(good, exported="__tvm_ffi_other")
    assert_only(findings, Check.HOST_EXPORTS, "exports __tvm_ffi_gemm; must export exactly")


def test_finds_undefined_symbol_that_no_runtime_library_exports(tmp_path: Path) -> None:
    payload = shared_object(tmp_path, SOURCE.replace("TVMFFIEnvGetStream", "getenv"))
    assert_only(findings_of(payload), Check.HOST_SYMBOLS, "needs the symbol getenv")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ((), "(none)"),
        (("libtvm_ffi.so",), "libtvm_ffi.so"),
        ((*NEEDED_LIBRARIES, "libother.so"), "libcute_dsl_runtime.so, libother.so, libtvm_ffi.so"),
    ],
)
def test_finds_other_libraries(tmp_path: Path, names: tuple[str, ...], shown: str) -> None:
    payload = shared_object(tmp_path, SOURCE, libraries=frozenset(names))
    message = f"needs the libraries {shown}; must need exactly"
    assert_only(findings_of(payload), Check.HOST_LIBRARIES, message)


@pytest.mark.parametrize(("flag", "tag"), [("--enable", "RUNPATH"), ("--disable", "RPATH")])
def test_finds_library_search_path(tmp_path: Path, flag: str, tag: str) -> None:
    payload = shared_object(tmp_path, SOURCE, "-Wl,-rpath,/opt/lib", f"-Wl,{flag}-new-dtags")
    assert_only(
        findings_of(payload), Check.HOST_LIBRARIES, f"{tag} makes the loader search '/opt/lib'"
    )


def test_finds_executable_stack(tmp_path: Path) -> None:
    payload = shared_object(tmp_path, SOURCE, "-Wl,-z,execstack")
    assert_only(findings_of(payload), Check.HOST_STACK, "executable stack")


def test_finds_text_relocations(tmp_path: Path) -> None:
    source = """
        int TVMFFIEnvGetStream(void);
        asm(".text; .globl __tvm_ffi_gemm; .type __tvm_ffi_gemm, @function;"
            "__tvm_ffi_gemm: movabs $TVMFFIEnvGetStream, %rax; jmp *%rax");
    """
    payload = shared_object(tmp_path, source, "-Wl,-z,notext")
    assert_only(findings_of(payload), Check.HOST_RELOCATIONS, "has text relocations")


def test_finds_packed_relocations(tmp_path: Path) -> None:
    source = SOURCE + "static int cells[9]; int *volatile places[] = {cells, cells + 1, cells + 2};"
    source = source.replace("int *volatile", '__attribute__((visibility("hidden"))) int *volatile')
    try:
        payload = shared_object(tmp_path, source, "-Wl,-z,pack-relative-relocs")
    except subprocess.CalledProcessError:
        pytest.skip("this linker knows no packed relocations")
    assert_only(findings_of(payload), Check.HOST_RELOCATIONS, "before glibc 2.36")


@pytest.mark.parametrize(
    "payload", [b"", b"PK", b"\x7fELF", bytes(64), b"\x7fELF\x02\x01\x01" + bytes(57)]
)
def test_refuses_what_is_no_elf_file(payload: bytes) -> None:
    with pytest.raises(LinkError, match="the linked kernel is not as it must be: "):
        require_host_object(payload, ENTRY)


@pytest.mark.parametrize(("other", "shared_bytes"), [(6, 231936), (65536, None)])
def test_reads_shared_memory_of_the_launch_and_does_not_guess(
    tmp_path: Path, other: int, shared_bytes: int | None
) -> None:
    source = f"void __tvm_ffi_gemm(long *fields) {{ fields[3] = 231936; fields[5] = {other}; }}"
    assert launch_shared_bytes(code_of(shared_object(tmp_path, source))) == shared_bytes


def test_reads_clusters_of_the_launch(tmp_path: Path) -> None:
    clusters = ((2, 1), (16, 1), (4, 4))
    payload = host_payload(tmp_path, clusters=clusters)
    assert launch_clusters(code_of(payload)) == {*clusters}


@pytest.mark.parametrize("constant", [(0, 1), (1, 0), (17, 1), (1, 17)])
def test_takes_no_other_constant_for_a_cluster(tmp_path: Path, constant: tuple[int, int]) -> None:
    payload = host_payload(tmp_path, clusters=((2, 1), constant))
    assert launch_clusters(code_of(payload)) == {(2, 1)}


def test_allowed_symbols_are_exported_by_the_installed_runtime_libraries() -> None:
    pytest.importorskip("nvidia_cutlass_dsl")
    from elftools.elf.elffile import ELFFile

    from nvgemm_aot.pipeline.linker import library_directories

    exported: set[str] = set()
    names = ("libcute_dsl_runtime.so", "libtvm_ffi.so")
    for place, name in zip(library_directories(Target(arch="sm_90a")), names):
        with (place / name).open("rb") as file:
            table = ELFFile(file).get_section_by_name(".dynsym")
            exported |= {s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF"}
    assert exported >= ALLOWED_SYMBOLS
