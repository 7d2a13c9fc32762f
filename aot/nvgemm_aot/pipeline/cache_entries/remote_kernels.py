"""Fetches and checks kernels that other machines compiled, and sends this machine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import zstandard

from nvgemm_runtime.gemm.target import Target

from ...storage.build_cache import Cache
from ...storage.remote.remote_cache import RemoteCache
from ...verify.device.ptx_agreement import ptx_faults
from ...verify.foreign_payload import payload_fault
from .ptx_store import MAX_PTX_BYTES, ptx_key


@dataclass(frozen=True, kw_only=True)
class ExpectedKernel:
    """Requirements for a fetched kernel.

    Attributes:
        calling_convention: Its candidate's.
        provider: Its candidate's.
        target: Target to run on.
        keeps_ptx: True if its PTX is needed too.
    """

    calling_convention: str
    provider: str
    target: Target
    keeps_ptx: bool


def fetch_kernels(
    kernels: Mapping[str, ExpectedKernel], cache: Cache, remote: RemoteCache
) -> frozenset[str]:
    """Fetches kernels, or their PTX, that the local cache lacks.

    Returns:
        The keys of kernels that the local cache now has, with PTX if it is needed.
    """

    def kernel_fault(key: str, payload: bytes) -> str | None:
        expected = kernels[key]
        return payload_fault(
            payload, expected.calling_convention, expected.target, provider=expected.provider
        )

    lacking = (
        key for key, expected in kernels.items() if not expected.keeps_ptx or cache.get(key) is None
    )
    fetched = remote.fetch(lacking, cache, kernel_fault)
    by_ptx = {ptx_key(key): key for key, expected in kernels.items() if expected.keeps_ptx}
    if not by_ptx:
        return fetched

    def ptx_fault(key: str, payload: bytes) -> str | None:
        kernel = cache.get(by_ptx[key])
        return "its kernel is missing" if kernel is None else _ptx_fault(payload, kernel)

    texts = remote.fetch(by_ptx, cache, ptx_fault)
    with_ptx = {by_ptx[key] for key in texts}
    return frozenset(
        key
        for key, expected in kernels.items()
        if (key in fetched and not expected.keeps_ptx) or key in with_ptx
    )


def push_kernel(key: str, cache: Cache, remote: RemoteCache, *, keeps_ptx: bool) -> None:
    """Begins to send a kernel that was compiled here."""
    remote.push([key, ptx_key(key)] if keeps_ptx else [key], cache)


def _ptx_fault(compressed: bytes, kernel: bytes) -> str | None:
    try:
        size_bytes = zstandard.get_frame_parameters(compressed).content_size
        if size_bytes > MAX_PTX_BYTES:
            return f"its PTX has {size_bytes} bytes, at most {MAX_PTX_BYTES}"
        text = zstandard.ZstdDecompressor().decompress(compressed).decode()
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        return f"its PTX cannot be read: {error}"
    return "; ".join(ptx_faults(text, kernel)) or None
