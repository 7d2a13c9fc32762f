"""Lanes of a warp, masks of them, and the types of their registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LANES = 32
Mask = npt.NDArray[np.bool_]
FULL: Mask = np.ones(LANES, bool)
"""All lanes; compared by identity where that is quicker."""
FULL.flags.writeable = False

LANE = np.arange(LANES, dtype=np.uint32)

NO_BYTES, ALL_BYTES = bytes(LANES), bytes([1]) * LANES
"""Masks of no lanes and of all, as bytes, by which masks are compared quickly."""


def chosen(mask: Any, first: Any, second: Any) -> Any:
    """Returns the lanes of the first value in a mask, and of the second one elsewhere."""
    _ = first.nbytes, second.nbytes  # registers that a multiplication uses refuse to be read
    key = mask.tobytes()
    if key == ALL_BYTES:
        return first
    return second if key == NO_BYTES else np.where(mask, first, second)


def same(value: Any) -> Any:
    """Returns the value; moves between registers are this."""
    return value


_DTYPES: dict[str, Any] = {"pred": np.bool_} | {
    f"{kind}{bits}": {8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    for kind in "busf"
    for bits in (8, 16, 32, 64)
}
_DTYPES |= {"bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32}


def register_dtype(kind: str) -> Any:
    """Returns the numpy type that holds a register type; all are unsigned or predicates."""
    return _DTYPES[kind]
