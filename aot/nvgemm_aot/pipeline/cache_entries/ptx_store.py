"""Stores kernels' PTX in the build cache, beside their objects."""

from __future__ import annotations

from collections.abc import Sequence

import zstandard

from nvgemm_runtime.errors import StorageError

from ...storage.build_cache import Cache, cache_key
from ...verify.device.ptx_agreement import ptx_faults

_LEVEL = 3
"""zstd compression level. 45 to 150 KB text becomes 5 to 12 KB in a millisecond."""

MAX_PTX_BYTES = 64 << 20
"""Largest PTX that another machine may have kept."""


def ptx_key(kernel_key: str) -> str:
    """Returns the cache key for the PTX of the kernel with a cache key."""
    return cache_key("ptx", kernel_key)


def read_ptx(kernel_key: str, cache: Cache) -> str | None:
    """Returns the PTX that is stored beside a kernel, or None.

    Raises:
        StorageError: If the entry is not what `store_ptx` writes.
    """
    stored = cache.get(ptx_key(kernel_key))
    if stored is None:
        return None
    try:
        return zstandard.ZstdDecompressor().decompress(stored).decode()
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{cache.path(ptx_key(kernel_key))}: kept PTX cannot be read: {error}; delete the file"
        ) from error


def store_ptx(
    kernel_key: str, collected: Sequence[str], payload: bytes, cache: Cache
) -> str | None:
    """Stores PTX that was collected while a kernel compiled; returns the reason if it cannot.

    ``payload`` is the kernel that was compiled with it. It must be equal to the cached kernel, if
    there is one: only then is the PTX that kernel's too.
    """
    if len(collected) != 1:
        return (
            f"its compilation handed over {len(collected)} PTX texts, must be 1; a provider that "
            "compiles without the CuTe DSL calls interface.keep_ptx(text) in compile(), others "
            "import the DSL in prepare()"
        )
    cached = cache.get(kernel_key)
    if cached is not None and cached != payload:
        return (
            f"compiled again to keep its PTX, its object has {len(payload)} bytes that differ from "
            f"the cached object's {len(cached)}: the PTX would not be that kernel's; build into an "
            "empty cache, and if the objects differ there too, the provider's recipe must change "
            "whenever its code does"
        )
    if faults := list(ptx_faults(collected[0], payload)):
        return f"its PTX is not what its object was assembled from: {'; '.join(faults)}"
    compressed = zstandard.ZstdCompressor(level=_LEVEL).compress(collected[0].encode())
    cache.put(ptx_key(kernel_key), compressed)
    return None
