"""Finds and loads a kernel: the best-ranked one for some tensors, or one by id."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..bundle.reader import Bundle
from ..errors import BundleFormatError, NoKernelError, StorageError
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operands import MAX_ALIGNMENT_BYTES, Request, requests
from ..gemm.problem import Op
from ..installed.jit_cache import mark_used
from ..installed.registry import INSTALLATION
from ..matching.device import (
    DeviceFacts,
    device_facts,
    host_platform,
    torch_cuda,
    wants_determinism,
)
from ..matching.index import Match, Miss, first_served
from ..matching.refusals import process_refusal
from ..settings import default_mode
from .loading.loader import LOADER, LoadedKernel

if TYPE_CHECKING:
    import torch

_chosen: dict[tuple[object, ...], LoadedKernel] = {}
"""Chosen kernels by all deciding facts. Installed bundles do not change."""

_MAX_CHOSEN = 4096


def choose_kernel(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel:
    """Loads the best-ranked kernel for operands.

    Raises:
        NoKernelError: If no bundled kernel serves them, with every reason.
        SettingError: If NVGEMM_AOT has an unknown value.
        ValueError: If they do not fit together.
    """
    tensors = (a, b, out, *extras.tensors())
    settings = (op, wants_determinism(), *extras.wanted())
    key = (*settings, *(fact for tensor in tensors for fact in _deciding_facts(tensor)))
    kernel = _chosen.get(key)
    if kernel is None:
        default_mode()  # raises for an unknown mode
        kernel, is_best = _match_and_load(op, a, b, out, extras)
        if is_best:
            if len(_chosen) >= _MAX_CHOSEN:
                _chosen.clear()
            _chosen[key] = kernel
    return kernel


def _deciding_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns a tensor's facts that can decide which kernel serves it."""
    offset = tensor.data_ptr() % MAX_ALIGNMENT_BYTES
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), offset


def _match_and_load(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> tuple[LoadedKernel, bool]:
    """Returns the kernel, and True if it is the best one even if all bundles can be read."""
    facts = facts_of(a)
    readings = requests(op, a, b, out=out, extras=extras)
    unread: dict[Bundle, StorageError] = {}
    while True:
        request, result = find(readings, facts, without=unread.keys())
        if isinstance(result, Miss):
            if unread:
                raise next(iter(unread.values()))
            raise NoKernelError(
                f"no kernel for {request.problem.key}:\n"
                + "\n".join(f"  {reason}" for reason in result.reasons),
                result.reasons,
            )
        best = result.kernels[0]
        bundle = best.bundle.opened
        assert bundle is not None  # installed bundles are open
        try:
            return LOADER.load(bundle, best.kernel), not unread
        except StorageError as error:
            # The error may be temporary: try another bundle now, this one again at the next call.
            unread[bundle] = error
        except BundleFormatError as error:
            # Payloads are checked only here; another bundle may have the same kernel.
            if not INSTALLATION.leave_out(bundle, str(error)):
                raise


def find(
    readings: tuple[Request, ...], facts: DeviceFacts, *, without: Collection[Bundle] = ()
) -> tuple[Request, Match | Miss]:
    """Returns the first request that a kernel serves, with its match, or all reasons for a miss."""
    request, result = first_served(INSTALLATION.index(facts, without=without).match, readings)
    if isinstance(result, Match) and result.from_jit:
        mark_used(result.ranked_as)
    return request, result


def facts_of(tensor: torch.Tensor) -> DeviceFacts:
    """Returns facts about a tensor's device."""
    return device_facts(tensor.device.type, tensor.device.index or 0)


def load_kernel(kernel_id: str) -> LoadedKernel:
    """Loads a kernel by id, from any bundle that holds it.

    Raises:
        NoKernelError: If no bundle holds it, or only one for another platform or CUDA version.
        NvgemmError: If it cannot be loaded; see `KernelLoader.load`.
    """
    loaded = LOADER.get(kernel_id)
    if loaded is not None:
        return loaded
    default_mode()
    entry = INSTALLATION.kernels().get(kernel_id)
    if entry is None:
        raise NoKernelError(
            f"no installed bundle holds kernel {kernel_id[:12]}; install the kernel wheel it came "
            "from"
        )
    bundle, kernel = entry
    reason = process_refusal(bundle.header.target, host_platform(), torch_cuda())
    if reason is not None:
        raise NoKernelError(f"kernel {kernel_id[:12]} of {bundle.path}: {reason}", (reason,))
    return LOADER.load(bundle, kernel)
