"""GEMM kernels for the CPU, written as C in the calling convention of compiled kernels.

They let everything behind the compiler run for real where no GPU is. Slow, and right for any
strides: what a kernel may be called with is for the launcher to check. Compiler processes import
this module, so nothing at its top imports torch, which takes two seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_runtime.bundle.calling_convention import (
    CLUSTERS,
    MNKL,
    STREAM,
    parse_calling_convention,
)
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.epilogues import Addend, Epilogue, GateForm, WeightOrder, addend_dtype
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.roles import SUMMED_COLUMNS, Role, extra_roles
from nvgemm_runtime.gemm.support import unsupported
from nvgemm_runtime.gemm.types import ScaleRecipe

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
Register = Callable[..., tuple[str, int]]
"""What the fixture ``register`` gives: see conftest.py."""

_SOURCE = Path(__file__).with_name("cpu_gemm.c")

NOTHING = "return 0;"
"""A behaviour that computes nothing: what is left is the cost of the call."""

RAISES = 'TVMFFIErrorSetRaisedFromCStr("RuntimeError", "out of patience"); return -1;'
RAISES_LATER = f"{{ static int calls; if (calls++) {{ {RAISES} }} }}"
RETURNS_SILENTLY = "return -1;"

REPORTS_STRIDES = """{
  for (int i = 0; i < RANK; ++i) store_fp32(out->data, i, (float)a->strides[i]);
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


def computes(served: Signature) -> bool:
    """Whether these kernels compute such a thing; they do most of the support table, and fp32."""
    if served.a is DType.FP32 and served.op is not Op.GATHERED_MM:
        return served.a is served.b and served.scales is None and served.out is DType.FP32
    return unsupported(served) is None and (not served.a.is_integer or served.out.is_integer)


def convention(served: Signature, has_workspace: bool = False, takes_clusters: bool = False) -> str:
    """How a kernel is called: as the compiled kernels of its kind are."""
    extras = [role.value for role in extra_roles(served)]
    if served.scales is not None and served.scales.is_swizzled:
        parameters = ["a*", "b*", *(f"{name}*" for name in extras), "out*", "mnkl"]
    elif served.scales is not None or Role.ADDEND.value in extras:
        parameters = ["a", "b", "stream", *extras, "out"]
    else:
        parameters = ["a", "b", "out", *extras]
    if has_workspace:
        parameters.append("workspace")
    if takes_clusters:
        parameters.append("clusters")
    if "stream" not in parameters:
        parameters.append("stream")
    return f"tvm_ffi:gemm({','.join(parameters)})"


def signature(
    layout: str = "tt",
    *,
    op: Op = Op.MM,
    operand: DType = DType.FP32,
    b: DType | None = None,
    out: DType | None = None,
    scales: ScaleRecipe | None = None,
    epilogue: Epilogue | None = None,
) -> Signature:
    """A signature that these kernels can serve, if `computes` says so; B's type is usually A's.

    Of gathered rows, A's type is fp32, and ``operand`` B's.
    """
    if op is Op.GATHERED_MM:
        operand, b, out = DType.FP32, b or operand, out or b or operand
    whole = operand.is_integer
    usual = DType.INT32 if whole else operand if operand.bits > 8 else DType.BF16
    return Signature(
        op=op,
        layout=Layout(layout),
        a=operand,
        b=b or operand,
        accumulator=DType.INT32 if whole else DType.FP32,
        out=out or usual,
        scales=scales,
        epilogue=epilogue,
    )


def source(
    served: Signature,
    behaviour: str = "",
    tile: tuple[int, int] = (1, 1),
    workspace_bytes: int = 0,
    workspace: TileWorkspace | None = None,
    takes_clusters: bool = False,
) -> str:
    """C source of a kernel; ``behaviour`` is run first and may return."""
    has_workspace = workspace_bytes > 0 or workspace is not None
    called = parse_calling_convention(convention(served, has_workspace, takes_clusters))
    assert called is not None
    definitions: dict[str, object] = {
        "RANK": 3 if served.op in (Op.BMM, Op.K_GROUPED_MM) else 2,
        "LOAD": f"load_{served.a.value}",
        "LOAD_B": f"load_{served.b.value}",
        "STORE": f"store_{served.out.value}",
        "SUM": {DType.FP32: "float", DType.INT32: "int32_t"}[served.accumulator],
        "TILE_M": tile[0],
        "TILE_N": tile[1],
        "KINDS": ", ".join(_kind(parameter) for parameter in called.parameters),
        "POINTERS": int(called.needs_compact),
        "A_ROW_MAJOR": int(served.layout.a_row_major),
        "B_ROW_MAJOR": int(served.layout.b_row_major),
    }
    for place, parameter in enumerate(called.parameters):
        definitions[f"AT_{parameter.removesuffix('*').upper()}"] = place
    if served.op is Op.K_GROUPED_MM:
        definitions["GROUPS_ALONG_K"] = 1
    if served.scales is not None:
        definitions["LOAD_SCALE"] = f"load_{served.scales.dtype.value}"
        definitions[f"SCALES_{_SCALES[served.scales]}"] = 1
        definitions["BLOCK"] = served.scales.block or 0
    if served.epilogue is not None:
        gate, order = served.epilogue.gate, served.epilogue.order
        activation = served.epilogue.activation if gate is None else None
        if gate is not None:
            form = served.epilogue.form
            if served.is_gradient:
                definitions["GRADIENT"] = f"{gate.value}_gradient"
                definitions["SUMMED_COLUMNS"] = SUMMED_COLUMNS
            else:
                definitions["UPS" if form is GateForm.UPS else "PAIRED"] = gate.value
            definitions["HALVES"] = int(order is WeightOrder.HALVES)
            if form is not None and form is not GateForm.JOINED:
                definitions["PARTS"] = form.row.parts
            if form is GateForm.KEPT:
                definitions["KEPT"] = 1
        definitions["ADDEND_IS_ROW"] = int(served.epilogue.addend is Addend.ROW)
        definitions["LOAD_ADDEND"] = f"load_{addend_dtype(served.out).value}"
        definitions["ACTIVATION"] = "identity" if activation is None else activation.value
    if workspace_bytes:
        definitions["WORKSPACE_BYTES"] = workspace_bytes
    if workspace is not None:
        definitions |= {
            "WORKSPACE_BYTES": "size",
            "WORKSPACE_TILE": ", ".join(map(str, workspace.tile)),
            "WORKSPACE_MULTIPLE": ", ".join(map(str, workspace.tiles_multiple)),
            "ZEROED": f"{workspace.zeroed_once}, {workspace.zeroed_per_tile}",
            "SCRATCH": workspace.scratch_per_tile,
        }
    lines = [f"#define {name} {value}" for name, value in definitions.items()]
    head = "#define _POSIX_C_SOURCE 199309L\n#include <time.h>\n" + "\n".join(lines) + "\n"
    return head + _SOURCE.read_text().replace("\n  BEHAVIOUR\n", f"\n  {behaviour}\n")


_SCALES = {
    ScaleRecipe.E8M0_1X32: "BLOCK",
    ScaleRecipe.E4M3_1X16: "BLOCK",
    ScaleRecipe.E8M0_1X16: "BLOCK",
    ScaleRecipe.FP32_TENSOR: "TENSOR",
    ScaleRecipe.FP32_ROW: "ROW",
}


def _kind(parameter: str) -> str:
    """What TVM-FFI makes of an argument."""
    if parameter.endswith("*") or parameter == STREAM:
        return "POINTER"
    if parameter == CLUSTERS:
        return "INT"
    return "ARRAY" if parameter == MNKL else "TENSOR"


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel of this process: its id, the address of its function, and how that is called."""

    id: str
    address: int
    library: ctypes.CDLL
    convention: str


def load(
    served: Signature,
    directory: Path,
    behaviour: str = "",
    *,
    workspace_bytes: int = 0,
    workspace: TileWorkspace | None = None,
    takes_clusters: bool = False,
    number: int = 0,
) -> LoadedKernel:
    """Compile a kernel and load it, as it must be: with TVM-FFI already in the process.

    Processes may share the directory. Kernels of one source that differ in their number are
    compiled once, and have variables and an id of their own.
    """
    text = source(
        served,
        behaviour,
        workspace_bytes=workspace_bytes,
        workspace=workspace,
        takes_clusters=takes_clusters,
    )
    path = directory / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            written = Path(scratch) / "kernel.c"
            written.write_text(text)
            command = [*c_compiler(), "-std=c99", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
            command += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
            command += ["-Wno-unused-variable", "-o", "kernel.so", "kernel.c"]
            subprocess.run(command, check=True, cwd=scratch)
            written.with_suffix(".so").replace(path)
    if number:
        path = Path(shutil.copy(path, directory / f"{path.stem}-{os.getpid()}-{number}.so"))
    import tvm_ffi
    from tvm_ffi.libinfo import find_libtvm_ffi

    assert tvm_ffi
    ctypes.CDLL(find_libtvm_ffi(), ctypes.RTLD_GLOBAL)  # where the kernel finds TVMFFIError*
    library = ctypes.CDLL(str(path))
    address = ctypes.cast(getattr(library, "__tvm_ffi_gemm"), ctypes.c_void_p).value
    assert address is not None
    return LoadedKernel(
        id=hashlib.sha256(f"{number} {text}".encode()).hexdigest(),
        address=address,
        library=library,
        convention=convention(served, workspace_bytes > 0 or workspace is not None, takes_clusters),
    )


def operands(m: int = 8, n: int = 8, k: int = 8, batch: int | None = None) -> Tensors:
    """Row-major A and B with random values, and an output full of NaN."""
    import torch

    lead = () if batch is None else (batch,)
    a, b = torch.randn(*lead, m, k), torch.randn(*lead, k, n)
    return a, b, torch.full((*lead, m, n), float("nan"))


def foreign(tensor: torch.Tensor, shape: Any, strides: Any) -> Any:
    """A tensor of TVM-FFI over memory of torch, with strides that torch refuses."""
    import tvm_ffi

    import fake_driver

    wrapped = fake_driver.OnDevice(tensor)
    sizes = ctypes.c_int64 * len(shape)
    wrapped._shape, wrapped._strides = sizes(*shape), sizes(*strides)
    managed = wrapped._managed
    managed.rank, managed.device[0] = len(shape), 1
    managed.shape = ctypes.addressof(wrapped._shape)
    managed.strides = ctypes.addressof(wrapped._strides)
    return tvm_ffi.from_dlpack(wrapped)
