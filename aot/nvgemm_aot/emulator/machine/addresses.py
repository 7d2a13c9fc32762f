"""Address windows of the emulated GPU.

Global addresses are addresses of the host, which end below 2**47. The other windows lie above.
"""

SHARED_BASE = 1024
"""Begin of a block's shared memory in the shared window; CUDA keeps the first KiB."""

RANK_SHIFT = 24
"""Bit at which an address in the shared window holds the block's rank in its cluster."""

OFFSET_MASK = (1 << RANK_SHIFT) - 1

PARAMETER_WINDOW = 0x7F00_0000_0000_0000
"""Generic address at which kernel parameters begin."""

SHARED_WINDOW = 0x7E00_0000_0000_0000
"""Generic address at which the shared window begins."""

WINDOW_SHIFT = 56
"""Bit from which on generic addresses name a window."""
