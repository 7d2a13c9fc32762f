"""Boxes of tensors: views of global memory, which numpy does not bound."""

from __future__ import annotations

import random

import numpy as np

from nvgemm_aot.emulator.emulation_errors import EmulationError, MemoryAccessError
from nvgemm_aot.emulator.instructions.asynchronous.tensor_boxes import Box
from nvgemm_aot.emulator.instructions.asynchronous.tensor_map import (
    ElementType,
    Swizzle,
    TensorMap,
)
from nvgemm_aot.emulator.machine.global_memory import GlobalMemory, Region

KINDS = [
    ElementType(name=f"b{bits}", memory_bits=bits, shared_bits=bits) for bits in (4, 8, 16, 64)
]


def test_no_box_reaches_outside_its_tensor() -> None:
    """Maps may have any strides and sizes, as changed kernels make them."""
    draw = random.Random(1)
    memory = np.zeros(1 << 18, np.uint8)
    inside = outside = 0
    for _ in range(4000):
        first = 65536 + draw.randrange(4096)
        region = Region(
            address=memory.ctypes.data + first,
            data=memory[first : first + draw.randrange(1, 65536)],
            name="c",
        )
        rank = draw.randint(1, 4)
        tensor = TensorMap(
            address=region.address + draw.choice((0, 16, -16, 4096)),
            type=draw.choice(KINDS),
            sizes=tuple(draw.choice((1, 3, 16, 257)) for _ in range(rank)),
            strides=tuple(draw.choice((0, 16, 128, 1024)) for _ in range(rank - 1)),
            box=tuple(draw.choice((2, 4, 16)) for _ in range(rank)),
            swizzle=Swizzle.NONE,
            fills_nan=False,
        )
        memory[:] = 0
        places = [2 * draw.choice((-2, -1, 0, 1, 8, 100, 1 << 29)) for _ in range(rank)]
        try:
            box = Box(tensor, places)
            box.write(GlobalMemory([region]), np.ones(box.shared_bytes, np.uint8))
        except MemoryAccessError:
            outside += 1
        except EmulationError:
            continue
        else:
            inside += bool(region.data.any())
        end = first + len(region.data)
        around = (memory[:first], memory[end:])
        assert not any(each.any() for each in around), (tensor, places)
    assert inside > 100
    assert outside > 100
