"""The GEMM that Inductor asks choices for, read off them and its graph.

With `hook`, `choice`, `nodes` and `cache_key` it knows torch's insides. The names that are used
here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import re
from typing import Any

from torch._inductor import select_algorithm as autotuning
from torch._inductor.virtualized import V

from .operand import Operand

_BASE_ALIGNMENT_BYTES = 16
"""Alignment of buffers that Inductor allocates, and of inputs that it did not find unaligned."""


_ALTERNATIVE = re.compile(r"(benchmark_)?(decompose_k|contiguous_(add)?mm)_.*")
"""Names of the graphs that Inductor's subgraph templates make: other ways to compute a GEMM that
came up already."""


def is_alternative() -> bool:
    """Whether Inductor is lowering another way to compute a GEMM that came up already."""
    name = getattr(V.graph, "name", None)
    return isinstance(name, str) and _ALTERNATIVE.fullmatch(name) is not None


def name_in_aten(choice: Any) -> str | None:
    """Inductor's name of a choice that is an ATen operator; None for any other choice."""
    is_extern = type(choice) is autotuning.ExternKernelCaller
    return str(choice.choice.name) if is_extern else None


def operand(node: Any) -> Operand:
    """An operand as Inductor knows it; sizes that are symbols count as their hints."""
    layout = node.get_layout()
    # Inductor asks for the alignment of inputs on GPUs only, and calls all others unaligned.
    known = layout.device.type == "cpu" or node.get_name() not in V.graph.unaligned_buffers
    return operand_of(layout, _BASE_ALIGNMENT_BYTES if known else layout.dtype.itemsize)


def operand_of(layout: Any, base_address: int) -> Operand:
    """A tensor of Inductor's layout, in a buffer that begins at an address."""
    hint = V.graph.sizevars.optimization_hint
    return Operand(
        dtype=layout.dtype,
        device=layout.device,
        shape=tuple(int(hint(extent)) for extent in layout.size),
        strides=tuple(int(hint(stride)) for stride in layout.stride),
        address=base_address + int(hint(layout.offset)) * layout.dtype.itemsize,
    )
