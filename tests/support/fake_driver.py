"""A stand-in for the CUDA driver, so that the launcher's CUDA path runs where no GPU is.

"Device" memory is host memory, and a kernel for the CPU can be registered as one for CUDA. Only
what the launcher asks the driver for exists; nothing of NVIDIA's compiler or runtime is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tvm_ffi

from forked_scripts import ForkedScripts, forked_scripts
from nvgemm_aot.pipeline.linker import c_compiler

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
static __thread void *current;
EXPORT int memsets; EXPORT void *last_stream; EXPORT int context_sets;
EXPORT int cuInit(unsigned flags) {
  const char *result = getenv("FAKE_INIT");
  return result ? atoi(result) : flags;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal; return ordinal < 2 ? 0 : 101;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int capability = atoi(getenv("FAKE_CAPABILITY"));
  switch (attribute) {
    case 16: *value = 132 - 20 * device; break;  /* multiprocessors: those of device 1 are fewer */
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 97: *value = 232448; break;  /* shared memory of a block, in bytes */
    default: return 1;
  }
  return device < 0;
}
/* Modules: one function, whose occupancy is asked. GPCs of 16 or 18 multiprocessors, as Hopper. */
EXPORT int modules, modules_loaded, occupancy_questions;
static __thread int capture_mode, shared_bytes, allows_big;
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode; capture_mode = *mode; *mode = before; return 0;
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
  if (getenv("FAKE_NO_PTX") || capture_mode != 2 || !current) return 218;
  if (!strstr(image, ".entry nothing()")) return 218;
  ++modules; ++modules_loaded; *module = &modules; return 0;
}
EXPORT int cuModuleUnload(void *module) { modules -= module == &modules; return 0; }
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = module; return strcmp(name, "nothing") != 0;
}
EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute == 8) shared_bytes = value;
  if (attribute == 14) allows_big = value;
  return !function || (attribute != 8 && attribute != 14);
}
typedef struct { int id; char padding[4]; unsigned value[16]; } attribute_t;
typedef struct {
  unsigned grid[3], block[3], shared_bytes; void *stream; attribute_t *attributes; unsigned count;
} config_t;
EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *function, const config_t *config) {
  unsigned *cluster = config->attributes->value, size = cluster[0] * cluster[1] * cluster[2];
  ++occupancy_questions;
  if (!function || config->count != 1 || config->attributes->id != 4) return 1;
  if (config->shared_bytes != (unsigned)shared_bytes || config->grid[0] % size) return 1;
  if (size > 8 && !allows_big) return 912;
  *clusters = current == (void *)0x1000L ? 6 * (16 / size) + 2 * (18 / size) : 7 * (16 / size);
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(0x1000L + device); return 0;
}
EXPORT int cuCtxGetCurrent(void **context) { *context = current; return 0; }
EXPORT int cuCtxSetCurrent(void *context) { ++context_sets; current = context; return 0; }
EXPORT int cuGetErrorName(int error, const char **name) {
  *name = error == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_OTHER"; return 0;
}
EXPORT int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t n, void *stream) {
  ++memsets; last_stream = stream; memset((void *)to, value, n); return 0;
}
EXPORT int cuMemsetD2D8Async(unsigned long long to, size_t pitch, unsigned char value, size_t width,
                             size_t height, void *stream) {
  if (pitch < width) return 1;
  ++memsets; last_stream = stream;
  for (size_t row = 0; row < height; ++row) memset((char *)to + row * pitch, value, width);
  return 0;
}
"""

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
        environment = _environment(self._directory) | {"FAKE_CAPABILITY": str(capability)}
        result = self._scripts.run(script, *arguments, environment=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout


@contextlib.contextmanager
def fake_driver(directory: Path) -> Iterator[FakeDriver]:
    """Compile the driver into a directory, and run scripts with it."""
    (directory / "driver.c").write_text(_SOURCE)
    command = [*c_compiler(), "-shared", "-fPIC", "-o", directory / "libcuda.so.1"]
    subprocess.run([*command, directory / "driver.c"], check=True)
    with forked_scripts(_IMPORTS, environment=_environment(directory)) as scripts:
        yield FakeDriver(directory, scripts)


def _environment(directory: Path) -> dict[str, str]:
    return dict(os.environ, LD_LIBRARY_PATH=str(directory), PYTHONPATH=os.pathsep.join(sys.path))


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
