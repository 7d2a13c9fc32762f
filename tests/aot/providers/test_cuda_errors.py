"""CUDA errors that compiled launchers report, without what libraries before 4.7 lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS, EARLIER_SYMBOLS, FFI_SYMBOLS
from nvgemm_runtime.bundle.reader import Bundle
from repository import TESTS

SCRIPT = """
import ctypes, os, sys
from pathlib import Path

import torch
from elftools.elf.elffile import ELFFile

from direct_call import raised_on
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.launch.loading.loader import require_libraries

with Bundle(Path(sys.argv[1])) as bundle:
    require_libraries(bundle.header)
    kernel = next(one for one in bundle.header.kernels if one.signature.key.startswith(sys.argv[2]))
    path = Path(sys.argv[3])
    path.write_bytes(bundle.payload(kernel))
elf = ELFFile(path.open("rb"))
[entry] = elf.get_section_by_name(".dynsym").get_symbol_by_name("__tvm_ffi_gemm")
[data] = [part for part in elf.iter_segments("PT_LOAD") if part["p_flags"] & 2]
payload = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
address = ctypes.cast(payload.__tvm_ffi_gemm, ctypes.c_void_p).value
a = torch.zeros(64, 64, dtype=torch.bfloat16)
# A library handle that is set is not loaded again: the launcher's own calls fail, at any device.
begin = address - entry["st_value"] + data["p_vaddr"] + data["p_filesz"]
size = data["p_memsz"] - data["p_filesz"]
ctypes.memset(begin, 1, size)
print(raised_on(99, address, a, a.t(), a))
ctypes.memset(begin, 0, size)  # nothing to unload
"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_kernels_import_what_every_library_release_exports(
    real_bundles: dict[str, Path], arch: str
) -> None:
    with Bundle(real_bundles[arch]) as bundle:
        assert bundle.header.imports == tuple(sorted(DEVICE_SYMBOLS | FFI_SYMBOLS))
        assert all(kernel.imports is None for kernel in bundle.header.kernels)
    assert not EARLIER_SYMBOLS & DEVICE_SYMBOLS


def test_an_error_in_a_launch_is_named(real_bundles: dict[str, Path], tmp_path: Path) -> None:
    arguments = [real_bundles["sm_90a"], "mm/tn/bf16xbf16/fp32/bf16", tmp_path / "kernel.so"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        env={"PYTHONPATH": f"{TESTS / 'gpu'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kind, _, name = done.stdout.strip().rpartition(": cudaError")
    assert kind == "RuntimeError: CUDA Error"
    assert name in ("InvalidDevice", "InsufficientDriver", "NoDevice")
