"""The meaning of PTX instructions, a module for each family.

Imports `machine` and `ptx`. Each module gives functions to `decoders.decodes`, which turn a parsed
instruction into what it does to a warp; `decoding` imports them all.
"""
