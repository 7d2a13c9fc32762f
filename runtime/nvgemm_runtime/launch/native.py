"""The native launcher: registers kernels, launches them, and gives torch the operators.

Importing this module loads nothing. `load` imports torch and TVM-FFI and then the library, which
binds to both; the operators ``torch.ops.nvgemm_aot.mm``, ``bmm``, ``addmm``, ``baddbmm``,
``scaled_mm``, ``grouped_mm``, ``scaled_grouped_mm``, ``k_grouped_mm``, ``gathered_mm``,
``gated_mm``, ``grouped_gated_mm``, ``gathered_grouped_mm`` and ``gathered_grouped_gated_mm`` (each
with an ``out`` form) and ``abi`` exist from then on.
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

from ..bundle.calling_convention import PLAIN, CallingConvention
from ..bundle.workspace import TileWorkspace
from ..errors import DriverError, NoKernelError, ToolchainError
from ..gemm.epilogues import Addend, GateForm, addend_dtype
from ..gemm.problem import Op, Signature
from ..gemm.target import Target
from ..gemm.types import DType
from ..installing import install_command
from ..matching.shared_library import missing_part
from .autograd import register_refusals
from .fakes import register_fakes

ABI = 8
"""Version of the operators' schemas, which ``torch.ops.nvgemm_aot.abi()`` returns: kAbi of
runtime/csrc/torch_ops.h."""

CALLED_ABI = 3
"""Version of ``prepare`` and ``try_gemm``, the operators that generated C++ calls: kCalledAbi
there. Packages of AOTInductor ask for the one that they were made with."""

ATEN_HANDLE = -1
"""Stands for ATen in a dispatch table: kAten of runtime/csrc/dispatch_table.h."""

DEVICE_TYPE_CPU = 1
DEVICE_TYPE_CUDA = 2
"""Device types as DLPack numbers them (``kDLCPU``, ``kDLCUDA`` of dlpack.h)."""

_LIBRARY = "_native.so"
_lock = threading.Lock()
_loaded: Native | None = None


def _renew_lock() -> None:
    """Replace the lock: in a forked child, a thread that it does not have may hold it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, kw_only=True)
class Native:
    """The loaded library's functions.

    Attributes:
        launch: ``launch(handle, a, b, out, *extras)`` checks everything and enqueues what the
            kernel computes on the current stream of the tensors' device. The extras are the tensors
            that the kernel's signature has besides, in the order of `roles.extra_roles`: scale_a,
            scale_b, offsets, rows, addend, sums. It raises ValueError or TypeError for operands
            that the kernel cannot take, NoKernelError for an unknown handle, DriverError where the
            driver fails, torch.OutOfMemoryError where a workspace cannot be allocated, and what the
            kernel itself raises. The ends of groups are on the device and not checked, see
            `nvgemm_runtime.gemm.extra_operands.check_offset_values`. Torch does not see the call,
            so the caller must check derivatives, negative bits (``torch.Tensor.is_neg``), versions
            and tracing, see `nvgemm_runtime.launch.fast_path`.
        try_launch: ``try_launch(handle, a, b, out, *extras)`` is as ``launch``, but False, with
            nothing launched, where that raises ValueError or TypeError, and True otherwise.
        try_dispatch: ``try_dispatch(table, a, b, out, *extras)`` is as ``try_launch`` of the kernel
            that a table has for the rows of A: True where it computed, and False, with nothing
            launched, where it cannot take the operands or ATen is to compute. Where that kernel is
            not set yet, it launches nothing and returns its place as an int.
        set_in_table: ``set_in_table(table, place, handle)`` sets the kernel at a place of a table,
            or with `ATEN_HANDLE` has ATen compute there. May be called from any thread.
        open_kernel: ``open_kernel(image, symbol, name)`` loads a payload for as long as the process
            lives and gives the address of the function it exports as ``symbol``. The image must be
            whole. It raises NoKernelError, which calls the payload ``name``, for one that cannot be
            loaded or lacks the function.
        find_kernel: ``find_kernel(id)`` is the handle of a registered kernel, or None.
        out_dtype: ``out_dtype(id)`` is the dtype (of TVM-FFI) of a kernel's result; it asks the
            loader for a kernel that is not registered.
        clusters_at_once: ``clusters_at_once(device, cluster_size)`` is how many clusters of so many
            thread blocks, each of which fills a multiprocessor, a CUDA device runs at once: what
            kernels whose calling convention has ``clusters`` are told. It raises ValueError for a
            size that no device has, and DriverError where the driver fails.
        set_loader: ``set_loader(function)`` sets the function that is called with the id of a
            kernel that an operator names and that is not registered; it must register the kernel.
            Compiled code passes the kernel's origin as well, and runs on ATen without the kernel.
            None unsets it. May be called from any thread.
        set_reporter: ``set_reporter(function)`` sets the function that is called with the id of a
            kernel, and the kind and text of an error, where ``try_gemm`` leaves a GEMM to ATen
            because memory is short, or the kernel fails before it ran in this process. Otherwise
            as ``set_loader``.
        set_library_keeps_lock: ``set_library_keeps_lock(keeps)`` says whether the library that
            kernels call keeps its lock where it fails to load a kernel; see
            `nvgemm_runtime.bundle.imported_symbols.RELEASES_ITS_LOCK`. Then, after one
            has failed, a kernel that was not launched before raises DriverError
            instead of waiting for ever.
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

    def register_table(self, bounds: Sequence[int], places: Sequence[int]) -> int:
        """Make a table that says which kernel computes, by the rows of A.

        Args:
            bounds: Rising: the first number of rows of each segment but the first.
            places: Of each segment, one more than bounds: the place of its kernel, from 0, or
                `ATEN_HANDLE` where ATen computes. Nothing is set at any place yet.

        Returns:
            The handle that `try_dispatch` takes, valid in this process. A table is never freed.

        Raises:
            ValueError: If bounds do not rise, or are not one fewer than places.
        """
        if len(places) != len(bounds) + 1:
            raise ValueError(
                f"{len(bounds)} bounds need {len(bounds) + 1} places, {places} are given"
            )
        segments = (one for segment in zip(bounds, places[1:]) for one in segment)
        return self._register_table(max(places) + 1, places[0], *segments)

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
        """Make a loaded kernel launchable; the same id again gives the same handle.

        Args:
            id: sha256 of the kernel's content in hex, by which operators name it.
            function_address: Address of its TVM-FFI function. The library that holds the function
                must stay loaded as long as the process lives.
            signature: What it computes.
            alignment_bytes: Alignment of pointers, contiguous extents and strides other than 1.
            target: Which GPUs it runs on; None for a kernel that runs on the CPU.
            workspace_bytes: Device memory it needs besides its operands; each launch takes it from
                torch's allocator.
            workspace: As that, where the size depends on the problem's; a launch fills the part
                that must be zero on its stream.
            cluster_size: Thread blocks of a cluster, where the convention has ``clusters``.
            convention: What its function takes, in order.

        Returns:
            The handle that `launch` takes, valid in this process.

        Raises:
            ValueError: If the library does not know a parameter of the convention.
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
    """A workspace's formula as the library takes it; a tile of 0 stands for none."""
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
"""Numbers of ``Op``, ``AddendKind`` and ``GateForm`` in csrc/gemm.h. A product that is read has the
result's shape, as a matrix that is added has; gates have the product's."""


def _ffi_name(dtype: DType) -> str:
    """TVM-FFI's name of a type; its releases before 0.1.15 do not know torch's of packed values."""
    return dtype.torch_name.replace("_x", "x")


@functools.lru_cache(maxsize=256)  # a bundle has one target and few signatures
def _built_for(signature: Signature, target: Target | None) -> tuple[Any, ...]:
    """What a kernel is specialised on, as the library takes it."""
    import tvm_ffi

    major, minor = (0, 0) if target is None else target.capability
    scales, epilogue = signature.scales, signature.epilogue
    return (
        _OPS.index(signature.op),
        *(tvm_ffi.dtype(_ffi_name(one)) for one in (signature.a, signature.b, signature.out)),
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
    """Load the library and register its operators; later calls return the same object.

    Raises:
        ToolchainError: If the library, torch or TVM-FFI is missing or does not fit.
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
            f"run: {install_command(again=True)}"
        )
    try:
        # The library needs libtorch_cpu.so and libtvm_ffi.so by name only; these imports load them.
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
                    f"{library} cannot be loaded: {damage}; run: {install_command(again=True)}"
                )
            module = tvm_ffi.load_module(path)
        found = module["abi"]()
        if found != ABI:
            raise ToolchainError(
                f"{library} has operators of version {found}, this package needs {ABI}: files of "
                f"two versions are mixed; run: {install_command(again=True)}"
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
    """Compare the library with the digest that was installed with it: loading runs its code.

    Nothing is compared where a build for development left no digest.
    """
    try:
        installed = library.with_name(f"{library.name}.sha256").read_text("ascii").strip()
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    if digest == installed:
        return None
    return f"it is damaged, or of another version: sha256 {digest[:12]}, installed {installed[:12]}"


def abi() -> int:
    """Version of the operators' schemas, by way of the loaded library."""
    import torch

    load()
    return int(torch.ops.nvgemm_aot.abi())
