"""What a GEMM is: element types, scales, epilogues, sizes and operands.

May import `counters`, `settings` and `errors` alone. Start at `problem`; `support` says what can be
computed at all, and `aten` is the table of ATen's operators.
"""
