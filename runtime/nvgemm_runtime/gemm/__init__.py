"""GEMM vocabulary: element types, scales, epilogues, sizes and operands.

May import only `reporting`, `settings` and `errors`. Start at `problem`. `types`, `epilogues`,
`aten` and `target` are tables with one row per element type, epilogue, ATen operator and
architecture; `support` says which combinations can be computed.
"""
