"""GEMM kernels for the CPU, written as C in the calling convention of compiled kernels.

They let everything behind the compiler run for real where no GPU is. Slow, and right for any
strides: what a kernel may be called with is for the launcher to check.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fake_driver
from nvgemm_aot.linker import compiler
from nvgemm_runtime.problem import DType, Layout, Op, Signature

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Register = Callable[..., tuple[str, int]]
"""What the fixture ``register`` gives: see conftest.py."""

_SOURCE = r"""
#include <stdint.h>
#include <string.h>

/* As TVM-FFI and DLPack lay them out. */
typedef struct { uint8_t code, bits; uint16_t lanes; } dtype_t;
typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  dtype_t dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} tensor_t;
typedef struct {
  int32_t type_index;
  uint32_t padding;
  union { int64_t i; tensor_t *tensor; } v;
} any_t;

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

static float load_fp32(const void *p) { float x; memcpy(&x, p, 4); return x; }
static void store_fp32(void *p, float x) { memcpy(p, &x, 4); }
static float load_bf16(const void *p) {
  uint16_t h; uint32_t bits; float x;
  memcpy(&h, p, 2); bits = (uint32_t)h << 16; memcpy(&x, &bits, 4); return x;
}
static void store_bf16(void *p, float x) { /* rounds to nearest even; no NaN in, none out */
  uint32_t bits; uint16_t h;
  memcpy(&bits, &x, 4); bits += 0x7fff + ((bits >> 16) & 1); h = (uint16_t)(bits >> 16);
  memcpy(p, &h, 2);
}
static float load_fp16(const void *p) {
  uint16_t h; uint32_t bits, exponent; float x;
  memcpy(&h, p, 2);
  exponent = (h >> 10) & 31;
  if (exponent == 0) x = (float)(h & 0x3ff) / 16777216.0f;
  else {
    bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (uint32_t)(h & 0x3ff) << 13;
    memcpy(&x, &bits, 4);
  }
  return h & 0x8000 ? -x : x;
}
static void store_fp16(void *p, float x) { /* rounds to nearest even; no NaN in, none out */
  uint32_t bits, sign; uint16_t h; float tiny;
  memcpy(&bits, &x, 4); sign = bits >> 16 & 0x8000; bits &= 0x7fffffff;
  if (bits >= 0x47800000) h = 0x7c00;
  else if (bits >= 0x38800000) h = (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
  else {  /* a sum of that size has its last bit where a subnormal result has its own */
    memcpy(&tiny, &bits, 4); tiny += 0.5f; memcpy(&bits, &tiny, 4); h = (uint16_t)bits;
  }
  h |= (uint16_t)sign; memcpy(p, &h, 2);
}
static int32_t load_int8(const void *p) { int8_t x; memcpy(&x, p, 1); return x; }
static void store_int32(void *p, int32_t x) { memcpy(p, &x, 4); }
static int calls;
static char *at(const tensor_t *t, int64_t batch, int64_t i, int64_t j, int64_t bytes) {
  int r = RANK - 2;
  int64_t offset = i * t->strides[r] + j * t->strides[r + 1];
  if (RANK == 3) offset += batch * t->strides[0];
  return (char *)t->data + t->byte_offset + offset * bytes;
}

__attribute__((visibility("default"))) int __tvm_ffi_gemm(
    void *self, const any_t *arguments, int32_t count, any_t *result) {
  const tensor_t *a = arguments[0].v.tensor, *b = arguments[1].v.tensor;
  const tensor_t *out = arguments[2].v.tensor;
  int64_t batches = RANK == 3 ? out->shape[0] : 1;
  (void)self; (void)result; (void)calls;
  if (count != 4) { TVMFFIErrorSetRaisedFromCStr("TypeError", "expects 4 arguments"); return -1; }
  BEHAVIOUR
  for (int64_t batch = 0; batch < batches; ++batch)
   for (int64_t i0 = 0; i0 < out->shape[RANK - 2]; i0 += TILE_M)
   for (int64_t j0 = 0; j0 < out->shape[RANK - 1]; j0 += TILE_N)
    for (int64_t i = i0; i < i0 + TILE_M && i < out->shape[RANK - 2]; ++i)
      for (int64_t j = j0; j < j0 + TILE_N && j < out->shape[RANK - 1]; ++j) {
        SUM sum = 0;
        for (int64_t k = 0; k < a->shape[RANK - 1]; ++k)
          sum += LOAD(at(a, batch, i, k, IN_BYTES)) * LOAD(at(b, batch, k, j, IN_BYTES));
        STORE(at(out, batch, i, j, OUT_BYTES), sum);
      }
  return 0;
}
"""

NOTHING = "return 0;"
"""A behaviour that computes nothing: what is left is the cost of the call."""

RAISES = 'TVMFFIErrorSetRaisedFromCStr("RuntimeError", "out of patience"); return -1;'
RETURNS_SILENTLY = "return -1;"

REPORTS_STRIDES = """{
  for (int i = 0; i < RANK; ++i) store_fp32((char *)out->data + 4 * i, (float)a->strides[i]);
  return 0;
}"""
"""Writes the strides of A that it was given to the beginning of the output."""

RACES_ON_FIRST_CALL = """
  if (calls == 0) {  /* as a kernel that loads its module: wrong if two threads get here */
    struct timespec pause = {0, 20000000};
    nanosleep(&pause, 0);
    if (calls != 0) { TVMFFIErrorSetRaisedFromCStr("RuntimeError", "two first calls"); return -1; }
    calls = 1;
  }
"""


def signature(
    layout: str = "tt", *, op: Op = Op.MM, operand: DType = DType.FP32, out: DType | None = None
) -> Signature:
    """A signature that these kernels can serve: operands of fp32, fp16, bf16 or int8."""
    whole = operand.is_integer
    return Signature(
        op=op,
        layout=Layout(layout),
        a=operand,
        b=operand,
        accumulator=DType.INT32 if whole else DType.FP32,
        out=out or (DType.INT32 if whole else operand),
    )


def source(served: Signature, behaviour: str = "", tile: tuple[int, int] = (1, 1)) -> str:
    """C source of a kernel; ``behaviour`` is run first and may return."""
    operand, out = served.a.value, served.out.value
    definitions = {
        "RANK": {Op.MM: 2, Op.BMM: 3}[served.op],
        "LOAD": f"load_{operand}",
        "STORE": f"store_{out}",
        "IN_BYTES": served.a.bits // 8,
        "OUT_BYTES": served.out.bits // 8,
        "SUM": {DType.FP32: "float", DType.INT32: "int32_t"}[served.accumulator],
        "TILE_M": tile[0],
        "TILE_N": tile[1],
    }
    lines = [f"#define {name} {value}" for name, value in definitions.items()]
    head = "#define _POSIX_C_SOURCE 199309L\n#include <time.h>\n" + "\n".join(lines)
    return head + _SOURCE.replace("BEHAVIOUR", behaviour)


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel of this process: its id and the address of its function."""

    id: str
    address: int
    library: ctypes.CDLL


def load(served: Signature, directory: Path, behaviour: str = "") -> LoadedKernel:
    """Compile a kernel and load it, as it must be: with TVM-FFI already in the process."""
    text = source(served, behaviour)
    name = hashlib.sha256(text.encode()).hexdigest()
    path = directory / f"{name}.so"
    (directory / f"{name}.c").write_text(text)
    command = [*compiler(), "-std=c99", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unused-variable"]
    subprocess.run([*command, "-o", path, path.with_suffix(".c")], check=True)
    import tvm_ffi
    from tvm_ffi.libinfo import find_libtvm_ffi

    assert tvm_ffi
    ctypes.CDLL(find_libtvm_ffi(), ctypes.RTLD_GLOBAL)  # where the kernel finds TVMFFIError*
    library = ctypes.CDLL(str(path))
    address = ctypes.cast(getattr(library, "__tvm_ffi_gemm"), ctypes.c_void_p).value
    assert address is not None
    return LoadedKernel(id=name, address=address, library=library)


def operands(m: int = 8, n: int = 8, k: int = 8, batch: int | None = None) -> Tensors:
    """Row-major A and B with random values, and an output full of NaN."""
    lead = () if batch is None else (batch,)
    a, b = torch.randn(*lead, m, k), torch.randn(*lead, k, n)
    return a, b, torch.full((*lead, m, n), float("nan"))


def foreign(tensor: torch.Tensor, shape: Any, strides: Any) -> Any:
    """A tensor of TVM-FFI over memory of torch, with strides that torch refuses."""
    import tvm_ffi

    wrapped = fake_driver.OnDevice(tensor)
    sizes = ctypes.c_int64 * len(shape)
    wrapped._shape, wrapped._strides = sizes(*shape), sizes(*strides)
    managed = wrapped._managed
    managed.rank, managed.device[0] = len(shape), 1
    managed.shape = ctypes.addressof(wrapped._shape)
    managed.strides = ctypes.addressof(wrapped._strides)
    return tvm_ffi.from_dlpack(wrapped)
