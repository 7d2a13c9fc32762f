"""Loading kernels into the process: what is checked, and that nothing is mixed up."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.imported_symbols import (
    DEVICE_SYMBOLS,
    EARLIER_SYMBOLS,
    RELEASES_ITS_LOCK,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, DriverError, NoKernelError
from nvgemm_runtime.gemm.target import CPU, Target
from nvgemm_runtime.launch.loading import loader as loader_module
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.loader import KernelLoader
from nvgemm_runtime.matching.device import (
    UNKNOWN_VERSION,
    RuntimeLibrary,
    find_runtime_library,
    inspect_library,
)
from nvgemm_runtime.reporting.counters import COUNTERS
from repository import TESTS
from synthetic_content import synthetic_content
from synthetic_payload import shared_object


@pytest.fixture
def bundle(cpu_bundle: BuiltBundle) -> Iterator[Bundle]:
    with Bundle(cpu_bundle.path) as opened:
        yield opened


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By kernel: the address that the loader registered, in place of registering it."""
    seen: dict[str, int] = {}

    class Recorder:
        open_kernel = staticmethod(native.load().open_kernel)
        set_library_keeps_lock = staticmethod(native.load().set_library_keeps_lock)

        def register_kernel(self, *, id: str, function_address: int, **other: Any) -> int:
            seen[id] = function_address
            return len(seen)

        def launch(self, *_: Any) -> None:
            raise AssertionError("nothing is launched here")

    monkeypatch.setattr(native, "load", Recorder)
    return seen


def kernel_of(bundle: Bundle, signature: str = "mm/tt/fp32xfp32/fp32/fp32") -> Kernel:
    return next(k for k in bundle.header.kernels if k.signature.key == signature)


def bundle_with(
    path: Path, payload: bytes, *, arch: str = CPU, signature: str | None = None
) -> Bundle:
    """A bundle whose one payload has the right digest, whatever it is."""
    content = synthetic_content(kernels=1, problems=0)
    kernel: BuiltKernel = replace(content.kernels[0], payload=payload)
    rankings: tuple[ProblemRanking, ...] = ()
    changed: BundleContent = replace(
        content, target=Target(arch=arch), kernels=(kernel,), rankings=rankings
    )
    write_bundle(path, changed)
    return Bundle(path)


def test_a_loaded_kernel_computes(bundle: Bundle, lib: native.Native) -> None:
    loaded = KernelLoader().load(bundle, kernel_of(bundle))
    a, b, out = torch.randn(16, 64), torch.randn(64, 32), torch.full((16, 32), float("nan"))
    lib.launch(loaded.handle, a, b, out)
    torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)


def test_the_same_kernel_is_loaded_once(bundle: Bundle) -> None:
    library, kernel = KernelLoader(), kernel_of(bundle)
    assert library.get(kernel.id) is None
    loaded = library.load(bundle, kernel)
    assert library.load(bundle, kernel) is loaded
    assert library.get(kernel.id) is loaded


def test_the_time_that_loading_takes_is_counted_once(bundle: Bundle) -> None:
    library = KernelLoader()
    before = COUNTERS.stats()
    library.load(bundle, bundle.header.kernels[0])
    loaded = COUNTERS.stats()
    assert loaded.since(before).milliseconds["loading"] > 0
    library.load(bundle, bundle.header.kernels[0])
    assert COUNTERS.stats().milliseconds["loading"] == loaded.milliseconds["loading"]


def test_every_kernel_has_a_function_of_its_own(bundle: Bundle, addresses: dict[str, int]) -> None:
    library = KernelLoader()
    for kernel in bundle.header.kernels:
        library.load(bundle, kernel)
    assert len(set(addresses.values())) == len(bundle.header.kernels) > 50


def test_no_descriptor_is_left_open(bundle: Bundle, addresses: dict[str, int]) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    library = KernelLoader()
    before = descriptors()
    for kernel in bundle.header.kernels[:10]:
        library.load(bundle, kernel)
    assert descriptors() == before


OTHER_FILES = """
import sys, tempfile
import torch
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.launch.loading.loader import KernelLoader
bundle = Bundle(sys.argv[1])
kernels = [KernelLoader().load(bundle, kernel) for kernel in bundle.header.kernels[:3]]
files = [tempfile.TemporaryFile() for _ in range(20)]  # empty, under descriptors that were free
try:
    kernels[0].launch(*(torch.zeros(3, columns) for columns in (3, 5, 3)))
except (TypeError, ValueError) as error:  # with a stack: files of libraries are opened
    print(error)
"""


@pytest.mark.slow
def test_a_file_that_gets_a_descriptor_of_loading_is_not_taken_for_a_kernel(
    cpu_bundle: BuiltBundle,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_FILES, cpu_bundle.path],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.startswith("kernel ")
    assert not done.stderr


def test_a_corrupted_entry_is_refused_and_the_others_load(
    cpu_bundle: BuiltBundle, tmp_path: Path, addresses: dict[str, int]
) -> None:
    path = tmp_path / "damaged.nvgemm"
    shutil.copy(cpu_bundle.path, path)
    bad, good = cpu_bundle.header.kernels[:2]
    with path.open("r+b") as file:
        # One changed bit may well decompress to the same content: change the whole second half.
        middle = bad.span.offset + bad.span.stored_bytes // 2
        file.seek(middle)
        half = file.read(bad.span.end - middle)
        file.seek(middle)
        file.write(bytes(byte ^ 0xFF for byte in half))
    library = KernelLoader()
    with Bundle(path) as bundle:
        for _ in range(2):
            with pytest.raises(BundleFormatError, match=r"\[(payload-digest|frame|frame-size)\]"):
                library.load(bundle, bad)
        library.load(bundle, good)
    assert set(addresses) == {good.id}


def test_a_missing_symbol_is_named(bundle: Bundle) -> None:
    kernel = replace(kernel_of(bundle), calling_convention="tvm_ffi:other(a,b,out,stream)")
    with pytest.raises(NoKernelError, match=rf"{kernel.id[:12]} .* not export __tvm_ffi_other"):
        KernelLoader().load(bundle, kernel)


def test_an_unknown_calling_convention_is_refused(bundle: Bundle) -> None:
    kernel = replace(kernel_of(bundle), calling_convention="cuda:gemm(a)")
    message = r"'cuda:gemm\(a\)', this release calls tvm_ffi:NAME\(PARAMETERS\)"
    with pytest.raises(NoKernelError, match=message):
        KernelLoader().load(bundle, kernel)


def test_a_calling_convention_that_does_not_fit_the_kernel_is_refused(bundle: Bundle) -> None:
    kernel = replace(kernel_of(bundle), workspace_bytes=1024)
    with pytest.raises(NoKernelError, match="parameter workspace is passed never, must be once"):
        KernelLoader().load(bundle, kernel)


def test_of_a_kernel_that_takes_no_clusters_the_cluster_may_be_any(bundle: Bundle) -> None:
    kernel = kernel_of(bundle)
    huge = replace(kernel, design=replace(kernel.design, cluster=(2**40, 2**40)))
    assert KernelLoader().load(bundle, huge).kernel is huge


def test_a_cluster_that_no_device_has_cannot_be_counted(bundle: Bundle) -> None:
    kernel = kernel_of(bundle)
    huge = replace(
        kernel,
        design=replace(kernel.design, cluster=(2**40, 2**40)),
        calling_convention="tvm_ffi:gemm(a,b,out,clusters,stream)",
    )
    with pytest.raises(NoKernelError, match=f"its cluster has {2**80} thread blocks"):
        KernelLoader().load(bundle, huge)


def test_a_payload_without_its_function_is_closed_again(lib: native.Native, bundle: Bundle) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("nvgemm-kernel")

    image, before = bundle.payload(kernel_of(bundle)), mapped()
    for _ in range(3):
        with pytest.raises(NoKernelError, match="it does not export absent"):
            lib.open_kernel(image, "absent", "it")
    assert mapped() == before
    assert lib.open_kernel(image, "__tvm_ffi_gemm", "it")
    assert mapped() > before


def test_an_image_must_be_bytes(lib: native.Native) -> None:
    with pytest.raises(TypeError, match="image must be bytes"):
        lib.open_kernel("text", "__tvm_ffi_gemm", "it")  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["text", "machine", "type", "tables"])
def test_a_damaged_image_is_refused(bundle: Bundle, tmp_path: Path, damage: str) -> None:
    image = bytearray(bundle.payload(kernel_of(bundle)))
    if damage == "text":
        image[:] = b"not a kernel".ljust(4096)
    elif damage == "machine":
        image[18] = 0xBE
    elif damage == "type":
        image[16] = 1
    else:
        image[54] = 7
    with (
        bundle_with(tmp_path / "damaged.nvgemm", bytes(image)) as other,
        pytest.raises(NoKernelError, match="cannot be loaded from memory"),
    ):
        KernelLoader().load(other, other.header.kernels[0])


def test_threads_that_race_load_a_kernel_once(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    payload = Bundle.payload

    def counted(self: Bundle, kernel: Kernel) -> bytes:
        reads.append(kernel.id)
        return payload(self, kernel)

    monkeypatch.setattr(Bundle, "payload", counted)
    library, kernels = KernelLoader(), bundle.header.kernels[:5]
    barrier = threading.Barrier(8)
    handles: list[list[int]] = [[] for _ in range(8)]

    def load(place: int) -> None:
        barrier.wait()
        handles[place] = [library.load(bundle, kernel).handle for kernel in kernels]

    threads = [threading.Thread(target=load, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reads) == sorted(kernel.id for kernel in kernels)
    assert all(row == handles[0] for row in handles)
    assert len(set(handles[0])) == len(kernels)


def test_a_missing_runtime_library_is_one_clear_message(
    real_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "find_runtime_library", lambda cuda: None)
    with (
        Bundle(real_bundles["sm_90a"]) as bundle,
        pytest.raises(
            DriverError,
            match=r"libcute_dsl_runtime.so for cu13.* pip install 'nvidia-cutlass-dsl-libs-cu13>=",
        ),
    ):
        KernelLoader().load(bundle, bundle.header.kernels[0])


def test_a_runtime_library_without_a_symbol_is_refused_before_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (lacking,) = EARLIER_SYMBOLS  # kernels that were built before import it
    old = RuntimeLibrary(
        path=Path("/nowhere.so"), cuda="cu13", version="4.6.3", exports=DEVICE_SYMBOLS
    )
    monkeypatch.setattr(loader_module, "find_runtime_library", lambda cuda: old)
    with (
        Bundle(TESTS / "data/format-1/sm_90a.nvgemm") as bundle,
        pytest.raises(DriverError, match=rf"import {lacking}, which the installed .* 4\.6\.3"),
    ):
        KernelLoader().load(bundle, bundle.header.kernels[0])


def test_a_kernel_that_imports_what_is_not_there_is_refused_before_it_is_opened() -> None:
    with Bundle(TESTS / "data/format-1/sm_90a.nvgemm") as bundle:
        first, second = bundle.header.kernels
        later = replace(first, imports=("_cudaNew",))
        with pytest.raises(DriverError, match=rf"kernel {first.id[:12]} of .*: .* import _cudaNew"):
            KernelLoader().load(bundle, later)
        assert KernelLoader().load(bundle, second).kernel is second


@pytest.mark.parametrize(
    ("version", "warnings"),
    [("4.5.2", 0), ("4.8.9", 0), (UNKNOWN_VERSION, 0), ("4.9.0", 1), ("5.0", 1)],
)
def test_any_runtime_library_that_exports_enough_is_used_a_newer_one_with_one_warning(
    real_bundles: dict[str, Path],
    addresses: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    warnings: int,
) -> None:
    real = find_runtime_library("cu13")
    assert real is not None
    other = replace(real, version=version)
    monkeypatch.setattr(loader_module, "find_runtime_library", lambda cuda: other)
    monkeypatch.setattr(loader_module, "_warned", set())
    with caplog.at_level(logging.WARNING, "nvgemm"):
        for arch in ("sm_90a", "sm_100f"):
            with Bundle(real_bundles[arch]) as bundle:
                KernelLoader().load(bundle, bundle.header.kernels[0])
    assert len(addresses) == 2
    assert len(caplog.records) == warnings
    for record in caplog.records:
        assert f"{real.path} is version {version}" in record.getMessage()
        assert "newer than 4.8, the newest that kernels were run with" in record.getMessage()


@pytest.mark.parametrize("keeps", [True, False])
def test_the_launcher_hears_of_a_library_that_keeps_its_lock(
    real_bundles: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    real = find_runtime_library("cu13")
    assert real is not None
    assert real.exports is not None
    lacking = {RELEASES_ITS_LOCK, *EARLIER_SYMBOLS}
    of_4_5 = replace(real, version="4.5.2", exports=real.exports - lacking)
    monkeypatch.setattr(
        loader_module, "find_runtime_library", lambda cuda: of_4_5 if keeps else real
    )
    told: list[bool] = []
    launcher = replace(native.load(), set_library_keeps_lock=told.append)
    monkeypatch.setattr(native, "load", lambda: launcher)
    with Bundle(real_bundles["sm_90a"]) as bundle:
        KernelLoader().load(bundle, bundle.header.kernels[0])
    assert told == [keeps]


def test_a_payload_that_imports_what_no_library_exports_is_refused(
    bundle: Bundle, tmp_path: Path
) -> None:
    source = "int foreign(void); int __tvm_ffi_gemm(void) { return foreign(); }"
    payload = shared_object(tmp_path, source, libraries=frozenset())
    with (
        bundle_with(tmp_path / "foreign.nvgemm", payload) as other,
        pytest.raises(NoKernelError, match="undefined symbol: foreign"),
    ):
        KernelLoader().load(other, other.header.kernels[0])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("broken", "not a 64-bit little-endian ELF file"), ("cut off", "it is truncated")],
)
def test_a_runtime_library_that_does_not_load_is_named(
    real_bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
    reason: str,
) -> None:
    installed = find_runtime_library("cu13")
    assert installed is not None
    broken = tmp_path / "libcute_dsl_runtime.so"
    broken.write_bytes(b"broken" if damage == "broken" else installed.path.read_bytes()[: 1 << 20])
    with Bundle(real_bundles["sm_90a"]) as bundle:
        found = inspect_library(broken, "cu13")
        monkeypatch.setattr(loader_module, "find_runtime_library", lambda cuda: found)
        with pytest.raises(
            DriverError, match=rf"{broken}, which kernels call, cannot be loaded: {reason}"
        ):
            KernelLoader().load(bundle, bundle.header.kernels[0])


OTHER_FIRST = """
import ctypes, sys
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.launch.loading.loader import LOADER
from nvgemm_runtime.matching.device import find_runtime_library

import tvm_ffi
other = find_runtime_library("cu12").path
ctypes.CDLL(str(other))
bundle = Bundle(sys.argv[1])
for _ in range(2):
    try:
        LOADER.load(bundle, bundle.header.kernels[0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_library_of_the_same_name_that_was_loaded_before_is_refused(
    real_bundles: dict[str, Path],
) -> None:
    """Payloads would be bound to it, whatever CUDA version it is for."""
    ours, other = find_runtime_library("cu13"), find_runtime_library("cu12")
    assert ours is not None
    assert other is not None
    done = subprocess.run(
        [sys.executable, "-c", OTHER_FIRST, str(real_bundles["sm_90a"])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = f"{ours.path} cannot be used: this process loaded another {ours.path.name} before"
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"DriverError: {said} ({other.path}), which kernels would call")


FORK = """
import os, sys, threading
from nvgemm_runtime.bundle import reader as bundle_module
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.installed.registry import INSTALLATION
from nvgemm_runtime.launch.loading.loader import LOADER

bundle = Bundle(sys.argv[1])
first, second = bundle.header.kernels[:2]
loaded = LOADER.load(bundle, first)
unread = Bundle(sys.argv[1])
held, done = threading.Event(), threading.Event()

def hold():
    with LOADER._lock, INSTALLATION._lock, bundle_module._dictionary_lock:
        held.set()
        done.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    assert LOADER.load(bundle, first) is loaded
    assert bundle.header.dictionary is not None and unread._dictionary is None
    unread.payload(first)
    assert LOADER.load(bundle, second).handle != loaded.handle
    INSTALLATION.bundles()
    os._exit(7)
done.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.slow
def test_a_forked_child_loads_though_a_thread_of_its_parent_held_the_locks(
    cpu_bundle: BuiltBundle,
) -> None:
    subprocess.run([sys.executable, "-c", FORK, cpu_bundle.path], check=True, timeout=600)
