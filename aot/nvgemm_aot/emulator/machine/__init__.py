"""The emulated GPU: warps, blocks, clusters and their memories and barriers.

Imports `ptx` and the errors. `scheduler` runs a launch, and is given the meaning of instructions.
"""
