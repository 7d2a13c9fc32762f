"""Finds and loads a kernel: the best-ranked one for some tensors, or one by id."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bundle.reader import Bundle
from ..errors import BundleFormatError, NoKernelError, StorageError
from ..gemm.extra_operands import NO_EXTRAS, TENSORS, ExtraOperands
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
from ..matching.index import match_first_reading
from ..matching.matches import Match, Miss
from ..matching.refusals import process_refusal
from ..settings import default_mode
from .loading.loader import LOADER, LoadedKernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class UnservedOperands:
    """Operands that no bundled kernel serves.

    Attributes:
        message: Explanation for people, with every reason.
        reasons: Reason for each bundle or kernel considered.
        generation: `Installation.generation` that was searched.
    """

    message: str
    reasons: tuple[str, ...]
    generation: int


_cache: dict[tuple[object, ...], LoadedKernel | UnservedOperands] = {}
"""Search results by all deciding facts. A kernel stays the best one: installed bundles do not
change. A miss counts until the usable bundles change."""

_MAX_CACHED = 4096

_ALIGNMENTS = tuple(
    offset & -offset or MAX_ALIGNMENT_BYTES for offset in range(MAX_ALIGNMENT_BYTES)
)
"""Alignments in bytes by address modulo the largest. Other address bits decide nothing."""


def find_kernel(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel | UnservedOperands:
    """Loads the best-ranked kernel for operands, or explains why none serves them.

    Every eager call comes here. Errors are not cached, because they may be temporary, nor is a
    second-best kernel that stands in for an unreadable one.

    Raises:
        NvgemmError: If a kernel cannot be loaded; see `KernelLoader.load`.
        SettingError: If NVGEMM_AOT has an unknown value.
        ValueError: If the operands do not fit together.
    """
    # get_device() is -1 for all types without an index; the launcher refuses mixtures of these.
    key = (
        op, wants_determinism(), a.device, *extras[TENSORS:],
        *[
            None
            if tensor is None
            else (
                tensor.get_device(),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                _ALIGNMENTS[tensor.data_ptr() % MAX_ALIGNMENT_BYTES],
            )
            for tensor in (a, b, out, *extras[:TENSORS])
        ],
    )  # fmt: skip
    cached = _cache.get(key)
    if cached is not None and (
        isinstance(cached, LoadedKernel) or cached.generation == INSTALLATION.generation
    ):
        return cached
    default_mode()  # raises for an unknown mode
    result, is_final = _match_and_load(op, a, b, out, extras)
    if is_final:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        _cache[key] = result
    return result


def choose_kernel(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel:
    """Loads the best-ranked kernel for operands.

    Raises:
        NoKernelError: If no bundled kernel serves them, with every reason.
        NvgemmError, SettingError, ValueError: As `find_kernel`.
    """
    result = find_kernel(op, a, b, out, extras)
    if isinstance(result, UnservedOperands):
        raise NoKernelError(result.message, result.reasons)
    return result


def _match_and_load(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> tuple[LoadedKernel | UnservedOperands, bool]:
    """Returns the kernel or a miss, and True if it stays the answer once all bundles are read."""
    generation = INSTALLATION.generation
    facts = facts_of(a)
    try:
        readings = requests(op, a, b, out=out, extras=extras)
    except NoKernelError as error:
        return UnservedOperands(
            message=str(error), reasons=error.reasons, generation=generation
        ), True
    unread: dict[Bundle, StorageError] = {}
    while True:
        request, result = find(readings, facts, without=unread.keys())
        if isinstance(result, Miss):
            if unread:
                raise next(iter(unread.values()))
            message = "\n".join(
                [
                    f"no kernel for {request.problem.key}:",
                    *(f"  {reason}" for reason in result.reasons),
                ]
            )
            return UnservedOperands(
                message=message, reasons=result.reasons, generation=generation
            ), True
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
    request, result = match_first_reading(
        INSTALLATION.index(facts, without=without).match, readings
    )
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
    entry = INSTALLATION.kernel(kernel_id)
    if entry is None:
        raise NoKernelError(
            f"no installed bundle holds kernel {kernel_id[:12]}; install the kernel wheel it came "
            "from"
        )
    bundle, kernel = entry
    reason = process_refusal(bundle.facts.target, host_platform(), torch_cuda())
    if reason is not None:
        raise NoKernelError(f"kernel {kernel_id[:12]} of {bundle.path}: {reason}", (reason,))
    return LOADER.load(bundle, kernel)
