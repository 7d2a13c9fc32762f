"""Executes kernels' PTX on a CPU, functionally, where no GPU is.

May import every room but `cli`. Start at `run.execute`, which runs one launch of a program. `ptx`
parses, `machine` holds warps, blocks, memories and barriers, and `instructions` gives each
instruction its meaning.
"""
