"""What a GEMM is: element types, scales, epilogues, sizes and operands.

May import `counters`, `settings` and `errors` alone. Start at `problem`. `types`, `epilogues`,
`aten` and `target` are the tables of element types, epilogues, ATen's operators and architectures,
a row for each; `support` says what can be computed at all.
"""
