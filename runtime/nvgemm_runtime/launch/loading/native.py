"""Native launcher: registers and launches kernels, and defines the torch operators.

Importing this module loads nothing. `load` imports torch and TVM-FFI, then the library, which binds
to both. It defines the operators ``torch.ops.nvgemm_aot.mm``, ``bmm``, ``addmm``, ``baddbmm``,
``scaled_mm``, ``grouped_mm``, ``scaled_grouped_mm``, ``k_grouped_mm``, ``gathered_mm``,
``gated_mm``, ``grouped_gated_mm``, ``gathered_grouped_mm`` and ``gathered_grouped_gated_mm`` (each
with an ``out`` form) and ``abi``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...bundle.calling_convention import PLAIN, CallingConvention
from ...bundle.workspace import TileWorkspace
from ...errors import DriverError, NoKernelError, ToolchainError, install_command
from ...gemm.epilogues import Addend, GateForm, addend_dtype
from ...gemm.problem import Op, Signature
from ...gemm.target import Target
from ...gemm.types import DType
from ...matching.shared_library import missing_part
from ..autograd import register_refusals
from ..fakes import register_fakes

ABI = 8
"""Operator schema version, from ``torch.ops.nvgemm_aot.abi()``: kAbi in
runtime/csrc/torch/torch_ops.h."""

CALLED_ABI = 3
"""Version of ``prepare`` and ``try_gemm``, which generated C++ calls: kCalledAbi in
runtime/csrc/torch/torch_ops.h. AOTInductor packages require the version they were built with."""

ATEN_HANDLE = -1
"""Marks ATen in a dispatch table: kAten in runtime/csrc/core/dispatch_table.h."""

DEVICE_TYPE_CPU = 1
DEVICE_TYPE_CUDA = 2
"""DLPack device types (``kDLCPU``, ``kDLCUDA`` in dlpack.h)."""

_LIBRARY = "_native.so"
_lock = threading.Lock()
_loaded: Native | None = None


def _renew_lock() -> None:
    """Replaces the lock: in a forked child, a thread that no longer exists may hold it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, kw_only=True)
class Native:
    """Functions from the loaded library.

    Attributes:
        launch: ``launch(handle, a, b, out, *extras)`` checks everything, then enqueues the kernel
            on the current stream for the tensors' device. Extras are the kernel signature's further
            tensors in `roles.extra_roles` order: scale_a, scale_b, offsets, rows, addend, sums.
            Raises ValueError or TypeError for unsuitable operands, NoKernelError for an unknown
            handle, DriverError for a driver failure, torch.OutOfMemoryError if a workspace cannot
            be allocated, and any error from the kernel itself. Group ends are on the device and not
            checked; see `nvgemm_runtime.gemm.extra_operands.check_offset_values`. Torch does not
            see the call, so the caller must check derivatives, negative bits
            (``torch.Tensor.is_neg``), versions and tracing; see `nvgemm_runtime.launch.fast_path`.
        try_launch: ``try_launch(handle, a, b, out, *extras)`` works like ``launch``, but returns
            False without a launch instead of raising ValueError or TypeError, and True otherwise.
        try_dispatch: ``try_dispatch(table, a, b, out, *extras)`` works like ``try_launch`` with the
            table's kernel for A's rows: True if it computed; False, without a launch, if the kernel
            rejects the operands or ATen is to compute. If that kernel is not set yet, it launches
            nothing and returns its slot as an int.
        set_in_table: ``set_in_table(table, slot, handle)`` sets the kernel in a table slot;
            `ATEN_HANDLE` selects ATen. Thread-safe.
        open_kernel: ``open_kernel(image, symbol, name)`` loads a payload for the life of the
            process and returns the address of its exported function ``symbol``. The image must be
            complete. Raises NoKernelError, with the payload's ``name``, if it cannot be loaded or
            lacks the function.
        find_kernel: ``find_kernel(id)`` returns a registered kernel's handle, or None.
        out_dtype: ``out_dtype(id)`` returns a kernel's result dtype (TVM-FFI's); calls the loader
            for an unregistered kernel.
        clusters_at_once: ``clusters_at_once(device, cluster_size)`` returns the number of clusters
            that a CUDA device runs at once, if each thread block fills a multiprocessor. Kernels
            whose calling convention has ``clusters`` receive it. Raises ValueError for an
            impossible size and DriverError for a driver failure.
        set_loader: ``set_loader(function)`` sets the callback for an unregistered kernel id that an
            operator names; it must register the kernel. Compiled code also passes the kernel's
            origin, and runs on ATen without the kernel. None removes the callback. Thread-safe.
        set_reporter: ``set_reporter(function)`` sets the callback for ``try_gemm`` falling back to
            ATen because memory is short, or the kernel fails before its first run in this process.
            It receives the kernel id, and the error's class name and text. Otherwise like
            ``set_loader``.
        set_library_keeps_lock: ``set_library_keeps_lock(keeps)`` tells if the library that kernels
            call keeps its lock after failing to load a kernel; see
            `nvgemm_runtime.bundle.imported_symbols.RELEASES_ITS_LOCK`. If so, after a failure, a
            kernel that was never launched raises DriverError instead of waiting forever.
    """

    launch: Callable[..., None]
    try_launch: Callable[..., bool]
    try_dispatch: Callable[..., bool | int]
    set_in_table: Callable[[int, int, int], None]
    open_kernel: Callable[[bytes, str, str], int]
    find_kernel: Callable[[str], int | None]
    out_dtype: Callable[[str], Any]
    clusters_at_once: Callable[[int, int], int]
    set_loader: Callable[[Callable[..., object] | None], None]
    set_reporter: Callable[[Callable[..., object] | None], None]
    set_library_keeps_lock: Callable[[bool], None]
    _register_kernel: Callable[..., int]
    _register_table: Callable[..., int]

    def register_table(self, bounds: Sequence[int], slots: Sequence[int]) -> int:
        """Creates a dispatch table from A's rows to kernels.

        Args:
            bounds: Ascending first row count for each segment after the first.
            slots: Slot per segment, one more than bounds, from 0, or `ATEN_HANDLE`. No slot has
                a kernel yet.

        Returns:
            Handle for `try_dispatch`, valid in this process. A table is never freed.

        Raises:
            ValueError: If bounds do not ascend, or their number is not one less than slots.
        """
        if len(slots) != len(bounds) + 1:
            raise ValueError(f"{len(bounds)} bounds need {len(bounds) + 1} slots (got {slots})")
        segments = (value for segment in zip(bounds, slots[1:]) for value in segment)
        return self._register_table(max(slots) + 1, slots[0], *segments)

    def register_kernel(
        self,
        *,
        id: str,
        function_address: int,
        signature: Signature,
        alignment_bytes: int,
        target: Target | None,
        workspace_bytes: int = 0,
        workspace: TileWorkspace | None = None,
        cluster_size: int = 1,
        convention: CallingConvention = PLAIN,
    ) -> int:
        """Makes a loaded kernel launchable; the same id again returns the same handle.

        Args:
            id: Kernel id, the content's sha256 in hex, as operators name it.
            function_address: Address of its TVM-FFI function. Its library must stay loaded for the
                life of the process.
            signature: Kernel signature.
            alignment_bytes: Alignment for pointers, contiguous extents and strides other than 1.
            target: Target; None for a CPU kernel.
            workspace_bytes: Device memory needed in addition to operands; each launch allocates it
                from torch.
            workspace: Workspace formula, if the size depends on the problem; a launch zeroes the
                required part on its stream.
            cluster_size: Thread blocks per cluster, if the convention has ``clusters``.
            convention: Function parameters, in order.

        Returns:
            Handle for `launch`, valid in this process.

        Raises:
            ValueError: If the library does not know a convention parameter.
        """
        return self._register_kernel(
            id,
            function_address,
            alignment_bytes,
            workspace_bytes,
            *_formula(workspace),
            cluster_size,
            *_built_for(signature, target),
            *convention.parameters,
        )


def _formula(workspace: TileWorkspace | None) -> tuple[int, ...]:
    """Returns a workspace formula as the library takes it; tile 0 means none."""
    if workspace is None:
        return (0,) * 7
    return (
        *workspace.tile,
        *workspace.tiles_multiple,
        workspace.zeroed_once,
        workspace.zeroed_per_tile,
        workspace.scratch_per_tile,
    )


_OPS = (
    Op.MM, Op.BMM, Op.GROUPED_MM, Op.K_GROUPED_MM, Op.GATHERED_MM, Op.GATHERED_GROUPED_MM,
)  # fmt: skip
_ADDENDS = {None: 0, Addend.ROW: 1, Addend.MATRIX: 2, Addend.PRODUCT: 2, Addend.GATES: 3}
_FORMS = (None, *GateForm)
"""Numbers for ``Op``, ``AddendKind`` and ``GateForm`` in csrc/core/gemm.h. A product that is read
has the result's shape, like an added matrix; gates have the product's shape."""


def _ffi_name(dtype: DType) -> str:
    """Returns a dtype's TVM-FFI name; before 0.1.15 it lacks torch's names for packed dtypes."""
    return dtype.torch_name.replace("_x", "x")


@functools.lru_cache(maxsize=256)  # a bundle has one target and few signatures
def _built_for(signature: Signature, target: Target | None) -> tuple[Any, ...]:
    """Returns the signature and target as the library takes them."""
    import tvm_ffi

    major, minor = (0, 0) if target is None else target.capability
    scales, epilogue = signature.scales, signature.epilogue
    return (
        _OPS.index(signature.op),
        *(tvm_ffi.dtype(_ffi_name(dtype)) for dtype in (signature.a, signature.b, signature.out)),
        signature.layout.a_row_major,
        signature.layout.b_row_major,
        0 if scales is None else scales.row.native_kind,
        0 if scales is None else scales.block or 0,
        tvm_ffi.dtype(_ffi_name(DType.FP32 if scales is None else scales.dtype)),
        _ADDENDS[None if epilogue is None else epilogue.addend],
        tvm_ffi.dtype(_ffi_name(addend_dtype(signature.out))),
        _FORMS.index(signature.form),
        DEVICE_TYPE_CPU if target is None else DEVICE_TYPE_CUDA,
        major,
        minor,
        "" if target is None else target.suffix,
    )


def load() -> Native:
    """Loads the library and registers its operators; later calls return the same object.

    Raises:
        ToolchainError: If the library, torch or TVM-FFI is missing or incompatible.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load()
    return _loaded


def _load() -> Native:
    library = importlib.resources.files("nvgemm_runtime").joinpath(_LIBRARY)
    if not library.is_file():
        raise ToolchainError(
            f"{library} is missing: nvgemm-aot was installed without its native part; "
            f"run: {install_command(reinstall=True)}"
        )
    try:
        # The library needs libtorch_cpu.so and libtvm_ffi.so only by name; these imports load them.
        import torch
        import tvm_ffi
    except ImportError as error:
        raise ToolchainError(
            f"the native launcher needs torch and apache-tvm-ffi: {error}; "
            "run: pip install 'torch>=2.11,<2.16' 'apache-tvm-ffi>=0.1.9,<0.2'"
        ) from error
    try:
        with importlib.resources.as_file(library) as path:
            damage = missing_part(path) or _find_damage(path)
            if damage is not None:
                raise ToolchainError(
                    f"{library} cannot be loaded: {damage}; run: {install_command(reinstall=True)}"
                )
            module = tvm_ffi.load_module(path)
        version = module["abi"]()
        if version != ABI:
            raise ToolchainError(
                f"{library} has operators of version {version}, this package needs {ABI}: files "
                f"from two versions are mixed; run: {install_command(reinstall=True)}"
            )
        module["register_torch_ops"]()
    except (AttributeError, OSError, RuntimeError) as error:
        raise ToolchainError(
            f"{library} does not load with torch {torch.__version__} and apache-tvm-ffi "
            f"{tvm_ffi.__version__} (supported: torch 2.11 to 2.15, apache-tvm-ffi 0.1 from "
            f"0.1.9): {error}"
        ) from error
    for kind in (NoKernelError, DriverError, torch.OutOfMemoryError):
        tvm_ffi.error.register_error(kind)
    native = Native(
        launch=module["launch"],
        try_launch=module["try_launch"],
        try_dispatch=module["try_dispatch"],
        set_in_table=module["set_in_table"],
        open_kernel=module["open_kernel"],
        find_kernel=module["find_kernel"],
        out_dtype=module["out_dtype"],
        clusters_at_once=module["clusters_at_once"],
        set_loader=module["set_loader"],
        set_reporter=module["set_reporter"],
        set_library_keeps_lock=module["set_library_keeps_lock"],
        _register_kernel=module["register_kernel"],
        _register_table=module["register_table"],
    )
    register_fakes(native.out_dtype)
    register_refusals()
    return native


def _find_damage(library: Path) -> str | None:
    """Compares the library with its installed digest, because loading runs its code.

    Skips the comparison if a development build left no digest.
    """
    try:
        installed = library.with_name(f"{library.name}.sha256").read_text("ascii").strip()
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    if digest == installed:
        return None
    return (
        f"it is damaged or from another version: sha256 {digest[:12]}, installed {installed[:12]}"
    )


def abi() -> int:
    """Returns the operator schema version from the loaded library."""
    import torch

    load()
    return int(torch.ops.nvgemm_aot.abi())
