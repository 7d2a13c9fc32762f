"""One process of `cuda12.py`: launches a bundle's kernels by ctypes, with memory of CUDA's driver.

    without_torch.py BUNDLE cuda|cpu

Prints one JSON object a line: what it runs on, then each kernel and whether its result was exact.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm_ffi
from tvm_ffi.libinfo import find_libtvm_ffi

from nvgemm_runtime.bundle.calling_convention import PLAIN
from nvgemm_runtime.bundle.format import Header, Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import DType, Op, Problem
from nvgemm_runtime.matching.device import find_ffi_exports, find_runtime_library
from nvgemm_runtime.matching.refusals import library_refusal

DL_CPU, DL_CUDA = 1, 2
FFI_POINTER, FFI_TENSOR = 4, 7  # of TVMFFITypeIndex: an opaque pointer, a DLTensor*
ERROR_TEXT_AT = 24  # bytes of a TVMFFIObject; kind and message follow, each an address and a size

_ONE = {
    DType.FP32: ("<f4", 1.0, -1.0),
    DType.FP16: ("<f2", 1.0, -1.0),
    DType.BF16: ("<u2", 0x3F80, 0xBF80),
    DType.INT8: ("i1", 1, -1),
    DType.FP8_E4M3: ("u1", 0x38, 0xB8),
    DType.FP8_E5M2: ("u1", 0x3C, 0xBC),
}
"""By type: how numpy holds it, and 1 and -1 in it; 0 is 0 in all."""

_EXACT_TO = {DType.FP32: 2**24, DType.FP16: 2048, DType.BF16: 256, DType.INT32: 2**31}
"""By result type that is read here: whole numbers up to here have an exact value."""


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    """TVMFFIAny of TVM-FFI's c_api.h."""

    _fields_ = (("type", ctypes.c_int32), ("zero", ctypes.c_uint32), ("value", ctypes.c_uint64))


class Memory(Protocol):
    """Where operands lie."""

    device_type: int
    name: str
    driver: str

    def put(self, content: np.ndarray[Any, Any]) -> int: ...
    def get(self, address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...


class HostMemory:
    """Memory of this process, for kernels for the CPU."""

    device_type, name, driver = DL_CPU, "cpu", "none"

    def __init__(self) -> None:
        self._kept: list[np.ndarray[Any, Any]] = []

    def put(self, content: np.ndarray[Any, Any]) -> int:
        self._kept.append(content.copy())
        return int(self._kept[-1].ctypes.data)

    def get(self, address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return next(one for one in self._kept if one.ctypes.data == address)


class DriverMemory:
    """Memory of the first GPU, in its primary context; never freed."""

    device_type = DL_CUDA

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        name = ctypes.create_string_buffer(256)
        self._call("cuInit", 0)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetName", name, len(name), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.name = name.value.decode()
        self.driver = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def put(self, content: np.ndarray[Any, Any]) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(content.nbytes))
        source = ctypes.c_void_p(content.ctypes.data)
        self._call("cuMemcpyHtoD_v2", address, source, ctypes.c_size_t(content.nbytes))
        return int(address.value)

    def get(self, address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._call("cuCtxSynchronize")
        read = np.empty_like(like)
        into = ctypes.c_void_p(read.ctypes.data)
        self._call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(address), ctypes.c_size_t(read.nbytes))
        return read

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._driver, function)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown"
            raise RuntimeError(f"{function}: CUDA error {result}, {said}")


def unreadable(kernel: Kernel) -> str | None:
    """Why this process cannot call a kernel or read its result, or None."""
    signature = kernel.signature
    if kernel.calling_convention != PLAIN.text:
        return f"it is called as {kernel.calling_convention}"
    if signature.a not in _ONE or signature.b is not signature.a or signature.out not in _EXACT_TO:
        return f"types of {signature.key}"
    return None


class Launcher:
    """Launches kernels on one kind of memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ffi = ctypes.CDLL(find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
        self._kept: list[object] = []
        self._random = np.random.default_rng(0)

    def compute(self, payload: bytes, problem: Problem) -> str:
        """Load a kernel and launch it once: ``exact``, or what was wrong."""
        signature = problem.signature
        lead = (problem.batch,) if signature.op is Op.BMM else ()
        density = min(0.5, math.sqrt(_EXACT_TO[signature.out] / (4 * problem.k)))
        a, plain_a = self._operand((*lead, problem.m, problem.k), signature.a, density)
        b, plain_b = self._operand((*lead, problem.k, problem.n), signature.b, density)
        expected = plain_a @ plain_b
        held = {DType.BF16: "<u2", DType.FP16: "<f2", DType.FP32: "<f4", DType.INT32: "<i4"}
        out = np.full(expected.shape, 77, held[signature.out])
        address = self._memory.put(out)
        tensors = (
            self._tensor(a, signature.a, row_major=signature.layout.a_row_major),
            self._tensor(b, signature.b, row_major=signature.layout.b_row_major),
            self._described(address, out, signature.out, row_major=True),
        )
        self._call(payload, tensors)
        got = self._memory.get(address, out)
        if signature.out is DType.BF16:
            got = (got.astype("<u4") << 16).view("<f4")
        wrong = int((got.astype("<f8") != expected).sum())
        return "exact" if wrong == 0 else f"FAILED: {wrong} of {expected.size} values differ"

    def _operand(
        self, shape: tuple[int, ...], dtype: DType, density: float
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Values of -1, 0 and 1 as the type holds them, and as numbers."""
        held, one, minus_one = _ONE[dtype]
        signs = self._random.integers(0, 2, shape) * 2 - 1
        signs[self._random.random(shape) >= density] = 0
        encoded = np.zeros(shape, held)
        encoded[signs == 1] = one
        encoded[signs == -1] = minus_one
        return encoded, signs.astype("<f8")

    def _tensor(self, values: np.ndarray[Any, Any], dtype: DType, *, row_major: bool) -> _Tensor:
        stored = values if row_major else values.swapaxes(-1, -2)
        address = self._memory.put(np.ascontiguousarray(stored))
        return self._described(address, values, dtype, row_major=row_major)

    def _described(
        self, address: int, values: np.ndarray[Any, Any], dtype: DType, *, row_major: bool
    ) -> _Tensor:
        rows, columns = values.shape[-2:]
        strides = (rows * columns, *((columns, 1) if row_major else (1, rows)))[-values.ndim :]
        sizes = ctypes.c_int64 * values.ndim
        shape_, strides_ = sizes(*values.shape), sizes(*strides)
        self._kept += (shape_, strides_)
        named = tvm_ffi.dtype(dtype.torch_name)
        return _Tensor(
            data=address,
            device=(ctypes.c_int32 * 2)(self._memory.device_type, 0),
            rank=values.ndim,
            dtype=(ctypes.c_uint8 * 4)(named.type_code, named.bits, named.lanes, 0),
            shape=ctypes.addressof(shape_),
            strides=ctypes.addressof(strides_),
        )

    def _call(self, payload: bytes, tensors: tuple[_Tensor, ...]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(payload)
            file.flush()
            library = ctypes.CDLL(file.name)
        self._kept.append(library)
        arguments = (_Any * (len(tensors) + 1))(
            *((FFI_TENSOR, 0, ctypes.addressof(tensor)) for tensor in tensors), (FFI_POINTER, 0, 0)
        )
        result = _Any()
        code = library[PLAIN.symbol](
            None, ctypes.byref(arguments), len(arguments), ctypes.byref(result)
        )
        if code:
            raise RuntimeError(f"the launcher returned {code}: {self._raised()}")

    def _raised(self) -> str:
        error = ctypes.c_void_p()
        self._ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(error))
        if not error.value:
            return "no error"
        cells = (ctypes.c_uint64 * 4).from_address(error.value + ERROR_TEXT_AT)
        kind, text = (
            ctypes.string_at(cells[at], cells[at + 1]).decode(errors="replace") for at in (0, 2)
        )
        return f"{kind}: {text}"


def load_library(header: Header, memory: Memory) -> str:
    """Load the library that kernels call, after the checks of the product; its file."""
    if memory.device_type == DL_CPU:
        return "none"
    found = find_runtime_library(header.target.cuda)
    reason = library_refusal(header, found, find_ffi_exports())
    if found is None or reason is not None:
        raise RuntimeError(reason)
    ctypes.CDLL(str(found.path))
    return str(found.path)


def main(path: Path, kind: str) -> int:
    memory: Memory = DriverMemory() if kind == "cuda" else HostMemory()
    launcher = Launcher(memory)
    failed = 0
    with Bundle(path) as bundle:
        header = bundle.header
        library = load_library(header, memory)
        print(json.dumps({"library": library, "device": memory.name, "driver": memory.driver}))
        for ranking in header.rankings:
            for entry in ranking.kernels:
                kernel = header.kernels[entry.kernel]
                if unreadable(kernel) is not None:
                    continue
                try:
                    said = launcher.compute(bundle.payload(kernel), ranking.problem)
                except RuntimeError as error:
                    said = f"FAILED: {' '.join(str(error).split())[:200]}"
                failed += said != "exact"
                line = {"kernel": kernel.id[:12], "problem": ranking.problem.key, "result": said}
                print(json.dumps(line), flush=True)
    if "torch" in sys.modules:
        raise AssertionError("this process has imported torch")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
