"""Loads and stores of a warp's lanes, all lanes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from ..emulation_errors import EmulationError, MemoryAccessError
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
    SHARED = "shared::cta"
    CLUSTER = "shared::cluster"
    PARAMETER = "param"
    LOCAL = "local"


_CELLS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def load(warp: Warp, space: Space, addresses: Any, width: int, count: int) -> Values:
    """Returns what active lanes read: ``count`` elements of ``width`` bytes each.

    Args:
        warp: The warp.
        space: State space of the addresses.
        addresses: One address for each active lane, as uint32 or uint64.
        width: Bytes of an element.
        count: Elements of a lane.

    Raises:
        MemoryAccessError: If an address is not aligned, or its bytes are not within memory.
    """
    size = width * count
    _check_alignment(addresses, size)
    places = _places(warp, space, addresses, size, False)
    cells, index, lanes = places[0]
    if lanes is None:
        return _read(cells, index, width, count)
    out = np.empty((len(addresses), count), _CELLS[width])
    for cells, index, lanes in places:
        out[lanes] = _read(cells, index, width, count)
    return out


def _read(cells: Any, index: Any, width: int, count: int) -> Values:
    if isinstance(index, _Bytes):
        return cells[index.offsets[:, None] + np.arange(width * count)].view(_CELLS[width])
    return cells.view(_CELLS[width]).reshape(-1, count)[index]


def store(warp: Warp, space: Space, addresses: Any, values: Values) -> None:
    """Writes the elements of active lanes; of lanes that write one place, the last one wins.

    Raises:
        MemoryAccessError: If an address is not aligned, or its bytes are not within memory that
            may be written.
    """
    count, width = values.shape[1], values.itemsize
    size = width * count
    _check_alignment(addresses, size)
    for cells, index, lanes in _places(warp, space, addresses, size, True):
        chosen = values if lanes is None else values[lanes]
        if isinstance(index, _Bytes):
            chosen = np.ascontiguousarray(chosen).view(np.uint8)
            cells[index.offsets[:, None] + np.arange(size)] = chosen
        else:
            cells.view(_CELLS[width]).reshape(-1, count)[index] = chosen
    warp.block.cluster.grid.progress += 1


def _check_alignment(addresses: Any, size: int) -> None:
    if size & (size - 1):
        raise EmulationError(f"accesses {size} bytes, must be a power of two")
    if size > 1:
        wrong = addresses & addresses.dtype.type(size - 1)
        if wrong.tobytes().strip(b"\0"):
            first = int(addresses[wrong.nonzero()[0][0]])
            raise MemoryAccessError(f"address {first:#x} must be a multiple of {size}")


@dataclass(frozen=True)
class _Bytes:
    """Byte offsets into a memory whose begin is not aligned as the access is."""

    offsets: Any


_Place: TypeAlias = tuple[Any, Any, Any]
"""Bytes of a memory, indices there in units of the access (or `_Bytes`), and lanes; None: all."""


def _places(warp: Warp, space: Space, addresses: Any, size: int, writes: bool) -> Sequence[_Place]:
    """Returns where lanes access memory; most often all lanes access the same one."""
    if space is Space.SHARED:
        _check_own(warp, addresses)
        return _shared_places(warp.block.rank, warp, addresses, size, writes)
    if space is Space.CLUSTER:
        ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
        return _by_key(ranks, _shared_places, warp, addresses, size, writes)
    if space is Space.GLOBAL:
        return _global_places(0, warp, addresses, size, writes)
    if space is Space.PARAMETER:
        return _parameter_places(0, warp, addresses, size, writes)
    if space is Space.GENERIC:
        windows = addresses >> np.uint64(WINDOW_SHIFT)
        return _by_key(windows, _generic_places, warp, addresses, size, writes)
    raise EmulationError("accesses local memory, which is not emulated")


def _check_own(warp: Warp, addresses: Any) -> None:
    """Checks that addresses are of the warp's own block."""
    ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
    wrong = ranks != warp.block.rank
    if wrong.any():
        first = wrong.argmax()
        raise MemoryAccessError(
            f"shared address {int(addresses[first]):#x} is of block {int(ranks[first])} of the "
            f"cluster, must be of the warp's own block {warp.block.rank}; other blocks' addresses "
            "need .shared::cluster"
        )


def _reach(addresses: Any, size: int) -> tuple[int, int]:
    """Returns the first address of an access, and the end of its last element."""
    numbers = addresses.tolist()  # Python finds extremes of so few numbers faster than numpy
    return min(numbers), max(numbers) + size


_Placer: TypeAlias = Callable[[int, Warp, Any, int, bool], Sequence[_Place]]


def _by_key(
    keys: Any, places: _Placer, warp: Warp, addresses: Any, size: int, writes: bool
) -> Sequence[_Place]:
    """Splits lanes by a key that most often is the same for all."""
    first = int(keys[0])
    if keys.tobytes() == keys[:1].tobytes() * len(keys):
        return places(first, warp, addresses, size, writes)
    found: list[_Place] = []
    for key in dict.fromkeys(keys.tolist()):
        lanes = (keys == key).nonzero()[0]
        found += _of_lanes(places(key, warp, addresses[lanes], size, writes), lanes)
    return found


def _of_lanes(places: Sequence[_Place], lanes: Any) -> Iterator[_Place]:
    for cells, index, within in places:
        yield cells, index, lanes if within is None else lanes[within]


def _generic_places(
    window: int, warp: Warp, addresses: Any, size: int, writes: bool
) -> Sequence[_Place]:
    if window == SHARED_WINDOW >> WINDOW_SHIFT:
        within = (addresses - np.uint64(SHARED_WINDOW)).astype(np.uint32)
        return _places(warp, Space.CLUSTER, within, size, writes)
    if window == PARAMETER_WINDOW >> WINDOW_SHIFT:
        return _parameter_places(window, warp, addresses, size, writes)
    return _global_places(window, warp, addresses, size, writes)


def _shared_places(
    rank: int, warp: Warp, addresses: Any, size: int, writes: bool
) -> Sequence[_Place]:
    blocks = warp.block.cluster.blocks
    if rank >= len(blocks):
        raise MemoryAccessError(
            f"shared address {int(addresses[0]):#x} is of block {rank} of a cluster of "
            f"{len(blocks)}"
        )
    block = blocks[rank]
    check_running(warp, block)
    offsets = (addresses & addresses.dtype.type(OFFSET_MASK)).astype(np.int64) - SHARED_BASE
    first, end = _reach(offsets, size)
    if first < 0 or end > len(block.shared):
        raise MemoryAccessError(
            f"{'writes' if writes else 'reads'} bytes {first} to {end - 1} of the shared memory of "
            f"block {block.index}, which has {len(block.shared)} bytes"
        )
    ordering = warp.block.cluster.grid.ordering
    (ordering.write if writes else ordering.read)(warp, block, offsets, size)
    return ((block.shared_cells, offsets // size, None),)


def check_running(warp: Warp, block: Block) -> None:
    """Checks that a block whose shared memory a warp uses has not ended.

    Raises:
        EmulationError: If it has.
    """
    if block is not warp.block and block.ended:
        raise EmulationError(
            f"uses shared memory of block {block.index}, which has ended; blocks of a cluster "
            "must wait for each other first"
        )


def _parameter_places(
    _: int, warp: Warp, addresses: Any, size: int, writes: bool
) -> Sequence[_Place]:
    if writes:
        raise MemoryAccessError("writes parameters, which must only be read")
    grid = warp.block.cluster.grid
    offsets = (addresses - np.uint64(PARAMETER_WINDOW)).view(np.int64)
    first, end = _reach(offsets, size)
    if first < 0 or end > grid.program.parameter_bytes:
        raise MemoryAccessError(
            f"reads bytes {first} to {end - 1} of the parameters, which have "
            f"{grid.program.parameter_bytes} bytes"
        )
    return ((grid.parameter_cells, offsets // size, None),)


def _global_places(_: int, warp: Warp, addresses: Any, size: int, writes: bool) -> Sequence[_Place]:
    memory = warp.block.cluster.grid.memory
    first, end = _reach(addresses, size)
    region = memory.holding(first, end - 1)
    if region is None:
        # Lanes access several tensors, or none.
        groups: dict[int, list[int]] = {}
        for lane, address in enumerate(addresses.tolist()):
            holder = memory.find(address, address + size - 1, writes=writes)
            groups.setdefault(holder.address, []).append(lane)
        found: list[_Place] = []
        for lanes in map(np.array, groups.values()):
            found += _of_lanes(_global_places(0, warp, addresses[lanes], size, writes), lanes)
        return found
    if writes:
        memory.find(first, end - 1, writes=True)
    offsets = (addresses - np.uint64(region.address)).view(np.int64)
    ordering = warp.block.cluster.grid.ordering
    if not region.is_early:
        ordering.use_global(warp)
    if region.is_workspace:
        (ordering.global_write if writes else ordering.global_read)(warp, region, offsets, size)
    if region.address % size:
        return ((region.data, _Bytes(offsets), None),)
    return ((region.data[: len(region.data) // size * size], offsets // size, None),)
