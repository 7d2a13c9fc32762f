"""Loads and stores of a warp's lanes, all lanes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np

from ..errors import EmulationError, MemoryAccessError
from .addresses import (
    OFFSET_MASK,
    PARAMETER_WINDOW,
    RANK_SHIFT,
    SHARED_BASE,
    SHARED_WINDOW,
    WINDOW_SHIFT,
)
from .hierarchy import Block, Warp

Values = Any
"""Unsigned integers of shape (lanes, elements)."""


class Space(Enum):
    """State space that an address lies in."""

    GENERIC = "generic"
    GLOBAL = "global"
    SHARED = "shared"
    PARAMETER = "param"
    LOCAL = "local"


_CELLS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def load(warp: Warp, space: Space, addresses: Any, width: int, count: int) -> Values:
    """Returns what active lanes read: ``count`` elements of ``width`` bytes each.

    Args:
        addresses: One address for each active lane, as uint32 or uint64.

    Raises:
        MemoryAccessError: If an address is not aligned, or its bytes are not within memory.
    """
    size = width * count
    _check_alignment(addresses, size)
    out = None
    for cells, index, lanes in _places(warp, space, addresses, size, writes=False):
        if isinstance(index, tuple):
            (base,) = index
            found = cells[base[:, None] + np.arange(size)].view(_CELLS[width])
        else:
            found = cells.view(_CELLS[width]).reshape(-1, count)[index]
        if lanes is None:
            return found
        if out is None:
            out = np.empty((len(addresses), count), _CELLS[width])
        out[lanes] = found
    assert out is not None
    return out


def store(warp: Warp, space: Space, addresses: Any, values: Values) -> None:
    """Writes the elements of active lanes; of lanes that write one place, the last one wins.

    Raises:
        MemoryAccessError: If an address is not aligned, or its bytes are not within memory that
            may be written.
    """
    count, width = values.shape[1], values.itemsize
    size = width * count
    _check_alignment(addresses, size)
    for cells, index, lanes in _places(warp, space, addresses, size, writes=True):
        chosen = values if lanes is None else values[lanes]
        if isinstance(index, tuple):
            (base,) = index
            cells[base[:, None] + np.arange(size)] = np.ascontiguousarray(chosen).view(np.uint8)
        else:
            cells.view(_CELLS[width]).reshape(-1, count)[index] = chosen
    warp.block.cluster.grid.progress += 1


def _check_alignment(addresses: Any, size: int) -> None:
    if size & (size - 1):
        raise EmulationError(f"accesses {size} bytes, must be a power of two")
    if size > 1:
        low = addresses & addresses.dtype.type(size - 1)
        if np.count_nonzero(low):
            first = int(addresses[np.flatnonzero(low)[0]])
            raise MemoryAccessError(f"address {first:#x} must be a multiple of {size}")


def _places(
    warp: Warp, space: Space, addresses: Any, size: int, *, writes: bool
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields bytes, indices in units of the access, and lanes (None: all) of each memory.

    Where a memory's begin is not aligned, the index is a tuple of one array of byte offsets.
    """
    if space is Space.GENERIC:
        windows = addresses >> np.uint64(WINDOW_SHIFT)
        yield from _by_key(windows, _generic_places, warp, addresses, size, writes)
    elif space is Space.SHARED:
        ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
        yield from _by_key(ranks, _shared_places, warp, addresses, size, writes)
    elif space is Space.PARAMETER:
        yield from _parameter_places(0, warp, addresses, size, writes)
    elif space is Space.GLOBAL:
        yield from _global_places(warp, addresses, size, writes)
    else:
        raise EmulationError("accesses local memory, which is not emulated")


_Placer = Callable[[int, Warp, Any, int, bool], "Iterator[tuple[Any, Any, Any]]"]


def _by_key(
    keys: Any, places: _Placer, warp: Warp, addresses: Any, size: int, writes: bool
) -> Iterator[tuple[Any, Any, Any]]:
    """Splits lanes by a key that most often is the same for all."""
    first = int(keys[0])
    if np.count_nonzero(keys != keys.dtype.type(first)) == 0:
        yield from places(first, warp, addresses, size, writes)
        return
    for key in np.unique(keys).tolist():
        (lanes,) = np.nonzero(keys == keys.dtype.type(key))
        for cells, index, within in places(key, warp, addresses[lanes], size, writes):
            yield cells, index, lanes if within is None else lanes[within]


def _generic_places(
    window: int, warp: Warp, addresses: Any, size: int, writes: bool
) -> Iterator[tuple[Any, Any, Any]]:
    if window == SHARED_WINDOW >> WINDOW_SHIFT:
        within = (addresses - np.uint64(SHARED_WINDOW)).astype(np.uint32)
        yield from _places(warp, Space.SHARED, within, size, writes=writes)
    elif window == PARAMETER_WINDOW >> WINDOW_SHIFT:
        yield from _parameter_places(window, warp, addresses, size, writes)
    else:
        yield from _global_places(warp, addresses, size, writes)


def _shared_places(
    rank: int, warp: Warp, addresses: Any, size: int, writes: bool
) -> Iterator[tuple[Any, Any, Any]]:
    block = shared_block(warp, rank, int(addresses[0]))
    offsets = (addresses & addresses.dtype.type(OFFSET_MASK)).astype(np.int64) - SHARED_BASE
    check_shared(block, int(offsets.min()), int(offsets.max()) + size, writes=writes)
    ordering = warp.block.cluster.grid.ordering
    (ordering.write if writes else ordering.read)(warp, block, offsets, size)
    yield block.shared_cells, offsets // size, None


def shared_block(warp: Warp, rank: int, address: int) -> Block:
    """Returns the block of a rank in the warp's cluster.

    Raises:
        MemoryAccessError: If there is none.
    """
    blocks = warp.block.cluster.blocks
    if rank >= len(blocks):
        raise MemoryAccessError(
            f"shared address {address:#x} is of block {rank} of a cluster of {len(blocks)}"
        )
    return blocks[rank]


def check_shared(block: Block, first: int, end: int, *, writes: bool) -> None:
    """Checks that bytes from an offset to before another lie in a block's shared memory.

    Raises:
        MemoryAccessError: If they do not.
    """
    if first < 0 or end > len(block.shared):
        raise MemoryAccessError(
            f"{'writes' if writes else 'reads'} bytes {first} to {end - 1} of the shared memory of "
            f"block {block.index}, which has {len(block.shared)} bytes"
        )


def _parameter_places(
    _: int, warp: Warp, addresses: Any, size: int, writes: bool
) -> Iterator[tuple[Any, Any, Any]]:
    if writes:
        raise MemoryAccessError("writes parameters, which must only be read")
    grid = warp.block.cluster.grid
    data = grid.parameter_cells
    offsets = (addresses - np.uint64(PARAMETER_WINDOW)).view(np.int64)
    first, end = int(offsets.min()), int(offsets.max()) + size
    if first < 0 or end > grid.program.parameter_bytes:
        raise MemoryAccessError(
            f"reads bytes {first} to {end - 1} of the parameters, which have "
            f"{grid.program.parameter_bytes} bytes"
        )
    yield data, offsets // size, None


def _global_places(
    warp: Warp, addresses: Any, size: int, writes: bool
) -> Iterator[tuple[Any, Any, Any]]:
    memory = warp.block.cluster.grid.memory
    first, last = int(addresses.min()), int(addresses.max())
    region = memory.holding(first, last + size - 1)
    if region is None:
        # Lanes access several tensors, or none.
        groups: dict[int, list[int]] = {}
        for lane, address in enumerate(addresses.tolist()):
            found = memory.find(address, address + size - 1, writes=writes)
            groups.setdefault(found.address, []).append(lane)
        for lanes in groups.values():
            chosen = np.array(lanes)
            for cells, index, _ in _global_places(warp, addresses[chosen], size, writes):
                yield cells, index, chosen
        return
    if writes:
        memory.find(first, last + size - 1, writes=True)
    offsets = (addresses - np.uint64(region.address)).view(np.int64)
    if region.address % size:
        yield region.data, (offsets,), None
    else:
        yield region.data[: len(region.data) // size * size], offsets // size, None
