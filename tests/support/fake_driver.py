"""The emulator's CUDA driver, so that the launcher's CUDA path runs where no GPU is.

"Device" memory is host memory, and a kernel for the CPU can be registered as one for CUDA. Real
kernels' launchers call NVIDIA's runtime library, which refuses this driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tvm_ffi

from forked_scripts import ForkedScripts, forked_scripts
from nvgemm_aot.emulator.driver.stand_in import LIBRARY

LEAVES_ANOTHER_DEVICE_CURRENT = """
  { extern int cuCtxSetCurrent(void *); cuCtxSetCurrent((void *)0x1001L); }
"""
"""A kernel's behaviour, as NVIDIA/cutlass#2808 has it."""


_IMPORTS = """
import torch, tvm_ffi
import cpu_kernels, fake_driver, gemm_arguments
from nvgemm_runtime.launch.loading import loader, native
torch.testing.assert_close(torch.ones(1), torch.ones(1))
"""


class FakeDriver:
    """Runs scripts in processes that find this driver, each in a fork of one; see `fake_driver`."""

    def __init__(self, directory: Path, scripts: ForkedScripts) -> None:
        self._directory = directory
        self._scripts = scripts

    def run(self, script: str, *arguments: str, capability: int = 90) -> str:
        """Run a Python script; returns what it printed."""
        script = f"import fake_driver\nfake_driver.add_devices({capability})\n{script}"
        result = self._scripts.run(script, *arguments, environment=_environment(self._directory))
        assert result.returncode == 0, result.stderr
        return result.stdout


@contextlib.contextmanager
def fake_driver(directory: Path) -> Iterator[FakeDriver]:
    """Run scripts with the driver, which they find by its name, and with a directory of theirs."""
    library = importlib.resources.files("nvgemm_aot.emulator.driver").joinpath(LIBRARY)
    (directory / "libcuda.so.1").symlink_to(str(library))
    with forked_scripts(_IMPORTS, environment=_environment(directory)) as scripts:
        yield FakeDriver(directory, scripts)


def _environment(directory: Path) -> dict[str, str]:
    return dict(os.environ, LD_LIBRARY_PATH=str(directory), PYTHONPATH=os.pathsep.join(sys.path))


_MULTIPROCESSORS = (132, 112)
"""Of the two devices."""

_GPCS = ((6, 2), (7, 0))
"""Their groups of 16 and of 18 multiprocessors, as Hopper has them; no cluster spans two."""


def add_devices(capability: int) -> None:
    """Adds the two devices to this process's driver."""
    driver = _driver()
    for device, (multiprocessors, (small, big)) in enumerate(zip(_MULTIPROCESSORS, _GPCS)):
        assert driver.nvgemm_emulated_add_device() == device
        driver.nvgemm_emulated_set_attribute(device, 16, multiprocessors)
        driver.nvgemm_emulated_set_attribute(device, 97, 232448)  # shared memory of a block, bytes
        for size in (1, 2, 4, 8, 16):
            clusters = small * (16 // size) + big * (18 // size)
            driver.nvgemm_emulated_set_clusters(device, size, clusters)
    set_capability(capability)


def set_capability(capability: int) -> None:
    """Gives both devices a compute capability, such as 90 for 9.0."""
    for device in range(len(_MULTIPROCESSORS)):
        for attribute, value in zip((75, 76), divmod(capability, 10)):
            _driver().nvgemm_emulated_set_attribute(device, attribute, value)


def set_variable(name: str, value: int) -> None:
    """Sets a variable by which tests make the driver fail."""
    ctypes.c_int.in_dll(_driver(), f"nvgemm_emulated_{name}").value = value


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OnDevice:
    """A tensor of the CPU that says it lives on a CUDA device.

    Whoever takes it by DLPack keeps pointers to it, so it lives as long as the process.
    """

    _alive: ClassVar[list[OnDevice]] = []

    def __init__(self, tensor: Any, device: int = 0) -> None:
        self._alive.append(self)
        sizes = ctypes.c_int64 * tensor.dim()
        dtype = tvm_ffi.dtype(str(tensor.dtype).removeprefix("torch."))
        self._tensor = tensor
        self._shape, self._strides = sizes(*tensor.shape), sizes(*tensor.stride())
        self._managed = _Tensor(
            data=tensor.data_ptr(),
            device=(ctypes.c_int32 * 2)(2, device),
            rank=tensor.dim(),
            dtype=(ctypes.c_uint8 * 4)(dtype.type_code, dtype.bits, dtype.lanes, 0),
            shape=ctypes.addressof(self._shape),
            strides=ctypes.addressof(self._strides),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._managed.device[1]

    def __dlpack__(self, **_: object) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(self._managed), b"dltensor", None)
