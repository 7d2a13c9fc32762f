from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.pipeline import linker
from nvgemm_aot.verify.host.elf import open_elf
from nvgemm_aot.verify.host.host_object import read_host_object
from nvgemm_runtime.errors import LinkError, ToolchainError
from nvgemm_runtime.gemm.target import CUDA_VERSIONS, Target

CONVENTION = "tvm_ffi:gemm(a,b,out,stream)"
TARGET = Target(arch="sm_90a")
ARM = Target(arch="sm_90a", platform="linux_aarch64")


@pytest.fixture(autouse=True)
def forget_the_compiler() -> Iterator[None]:
    """Have each test find the compiler anew; kept here, for tests replace some of the functions."""
    caches = (linker.c_compiler, linker.linker_version, linker.library_directories)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def compiled(directory: Path, source: str) -> bytes:
    (directory / "k.c").write_text(source)
    subprocess.run(
        [*linker.c_compiler(), "-c", "-O1", "-fPIC", "-o", "k.o", "k.c"], cwd=directory, check=True
    )
    return (directory / "k.o").read_bytes()


def test_links_to_a_library_that_loads_and_shows_only_its_entry(tmp_path: Path) -> None:
    relocatable = compiled(
        tmp_path,
        "int helper(int x) { return x + 1; } int __tvm_ffi_gemm(void) { return helper(41); }",
    )
    path = tmp_path / "k.so"
    path.write_bytes(linker.link(relocatable, CONVENTION, TARGET))
    import tvm_ffi  # noqa: F401 - its library must be there before one that needs it

    runtime = linker.library_directories(TARGET)[0] / "libcute_dsl_runtime.so"
    ctypes.CDLL(str(runtime))
    library = ctypes.CDLL(str(path))
    assert library.__getattr__("__tvm_ffi_gemm")() == 42
    with pytest.raises(AttributeError):
        library.__getattr__("helper")


def test_output_depends_on_nothing_but_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relocatable = compiled(tmp_path, "int __tvm_ffi_gemm(void) { return 1; }")
    first = linker.link(relocatable, CONVENTION, TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    for name in ("LD_RUN_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "LDFLAGS"):
        monkeypatch.setenv(name, "/somewhere")
    assert linker.link(relocatable, CONVENTION, TARGET) == first


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("int nowhere(void); int __tvm_ffi_gemm(void) { return nowhere(); }", "nowhere"),
        (  # a symbol that is there but not allowed
            "int TVMFFIFunctionCall(void);"
            "int __tvm_ffi_gemm(void) { return TVMFFIFunctionCall(); }",
            "TVMFFIFunctionCall",
        ),
        ("int other(void) { return 1; }", "__tvm_ffi_gemm"),
    ],
)
def test_refuses_an_object_that_lacks_or_needs_a_symbol(
    tmp_path: Path, source: str, named: str
) -> None:
    with pytest.raises(LinkError, match=named):
        linker.link(compiled(tmp_path, source), CONVENTION, TARGET)


def test_refuses_what_is_no_object() -> None:
    with pytest.raises(LinkError, match=r"^the linker \(\S+\) fails: .*kernel\.o: .*$") as refused:
        linker.link(b"not an object", CONVENTION, TARGET)
    assert "-Wl," not in str(refused.value)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "/usr/bin/ld: kernel.o: in function `gemm':\n"
            "kernel.c:(.text+0x5): undefined reference to `nowhere'\n"
            "collect2: error: ld returned 1 exit status\n",
            "kernel.c:(.text+0x5): undefined reference to `nowhere'",
        ),
        (
            "ld.lld: error: undefined symbol: nobody\n>>> referenced by kernel.c\n",
            "ld.lld: error: undefined symbol: nobody",
        ),
        ("collect2: fatal error: cannot find 'ld'\n", "collect2: fatal error: cannot find 'ld'"),
        ("", "it printed no error"),
        ("x" * 1000, "x" * 200),
    ],
)
def test_a_failure_shows_the_line_that_says_why(output: str, said: str) -> None:
    assert linker._failure_text(["cc", "-shared"], output) == f"the linker (cc) fails: {said}"


def test_no_space_is_not_a_link_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "full-disk"
    stub.write_text(
        "#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2; exit 1\n"
    )
    stub.chmod(0o755)
    relocatable = compiled(tmp_path, "int __tvm_ffi_gemm(void) { return 1; }")
    linker.c_compiler.cache_clear()
    monkeypatch.setenv("CC", str(stub))
    with pytest.raises(OSError, match="No space left"):
        linker.link(relocatable, CONVENTION, TARGET)


def test_a_compiler_named_by_a_relative_path_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mycc").symlink_to(linker.c_compiler()[0])
    relocatable = compiled(tmp_path, "int __tvm_ffi_gemm(void) { return 1; }")
    linker.c_compiler.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./mycc")
    assert linker.link(relocatable, CONVENTION, TARGET).startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("line", "identity"),
    [
        ("GNU ld (GNU Binutils for Debian) 2.40", ("GNU ld", "2.40")),
        ("LLD 17.0.6 (compatible with GNU linkers)", ("LLD", "17.0.6")),
        ("mold 2.30.0 (compatible with GNU ld)", ("mold", "2.30.0")),
        ("some linker", ("some linker", "unknown")),
    ],
)
def test_tells_name_and_version_of_the_linker(
    line: str, identity: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker, "linker_version", lambda _: line)
    assert linker.linker_identity(TARGET.platform) == identity


def test_names_both_libraries_where_the_compiler_drops_unused_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relocatable = compiled(tmp_path, "int __tvm_ffi_gemm(void) { return 1; }")
    first = linker.link(relocatable, CONVENTION, TARGET)
    as_needed = f"{linker.c_compiler()[0]} -Wl,--as-needed"  # Ubuntu's default
    linker.c_compiler.cache_clear()
    monkeypatch.setenv("CC", as_needed)
    assert linker.link(relocatable, CONVENTION, TARGET) == first


@pytest.mark.parametrize(
    "convention",
    [
        "",
        "tvm_ffi:gemm(b,a,c)",
    ],
)
def test_refuses_unknown_calling_conventions(convention: str) -> None:
    with pytest.raises(LinkError, match="calling convention"):
        linker.link(b"", convention, TARGET)


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="install one"):
        linker.c_compiler()


def test_honours_cc_and_reports_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -m64")
    assert linker.c_compiler() == (shutil.which("gcc"), "-m64")
    linker.c_compiler.cache_clear()
    for wrong, reason in (("no-such-compiler", "no such program"), ("gcc '", "No closing quot")):
        linker.c_compiler.cache_clear()
        monkeypatch.setenv("CC", wrong)
        with pytest.raises(ToolchainError, match=f"CC={wrong}: {reason}"):
            linker.c_compiler()


def test_a_compiler_without_linker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ToolchainError, match="binutils"):
        linker.linker_version(TARGET.platform)


def test_missing_library_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ToolchainError,
        match=r"libcute_dsl_runtime.so for .* not found .*pip install '\.\[build\]'",
    ):
        linker.library_directories(TARGET)


def compiled_for_arm(directory: Path, source: str) -> bytes:
    (directory / "arm.c").write_text(source)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28"]
    options = ["-c", "-O1", "-fPIC", "-fno-sanitize=all", "-o", "arm.o", "arm.c"]
    subprocess.run([*compiler, *options], cwd=directory, check=True)
    return (directory / "arm.o").read_bytes()


def test_links_for_arm_against_stubs_of_both_libraries(tmp_path: Path) -> None:
    calls = "int TVMFFIEnvGetStream(void); int _cudaGetDevice(void);"
    body = "return TVMFFIEnvGetStream() + _cudaGetDevice();"
    relocatable = compiled_for_arm(tmp_path, f"{calls} int __tvm_ffi_gemm(void) {{ {body} }}")
    linked = linker.link(relocatable, CONVENTION, ARM)
    host = read_host_object(linked)
    assert host.machine == "EM_AARCH64"
    assert host.exports == ("__tvm_ffi_gemm",)
    assert host.imports == ("TVMFFIEnvGetStream", "_cudaGetDevice")
    assert host.tags["DT_NEEDED"] == ["libcute_dsl_runtime.so", "libtvm_ffi.so"]
    loads = [part for part in open_elf(linked).iter_segments() if part["p_type"] == "PT_LOAD"]
    assert {part["p_align"] for part in loads} == {1 << 16}
    assert linker.link(relocatable, CONVENTION, ARM) == linked


def test_a_symbol_that_neither_library_exports_is_refused_for_arm(tmp_path: Path) -> None:
    source = "int nobody(void); int __tvm_ffi_gemm(void) { return nobody(); }"
    with pytest.raises(LinkError, match="undefined symbol: nobody"):
        linker.link(compiled_for_arm(tmp_path, source), CONVENTION, ARM)


def test_an_object_for_another_processor_is_refused(tmp_path: Path) -> None:
    relocatable = compiled(tmp_path, "int __tvm_ffi_gemm(void) { return 1; }")
    said = r"for EM_X86_64, must be for EM_AARCH64 \(linux_aarch64\): its provider must compile"
    with pytest.raises(LinkError, match=said):
        linker.link(relocatable, CONVENTION, ARM)


def test_a_missing_linker_for_arm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"linux_aarch64.*pip install '\.\[cross\]'"):
        linker.linker_version(ARM.platform)


def test_each_cuda_version_has_its_own_library() -> None:
    places = {
        cuda: linker.library_directories(replace(TARGET, cuda=cuda)) for cuda in CUDA_VERSIONS
    }
    for cuda, (runtime, _) in places.items():
        assert runtime.parent.name == cuda
    with pytest.raises(
        ToolchainError,
        match=r"sm_90a-linux_x86_64-cu11 .*: pip install nvidia-cutlass-dsl-libs-cu11==4\.8",
    ):
        linker.library_directories(replace(TARGET, cuda="cu11"))
