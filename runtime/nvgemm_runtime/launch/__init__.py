"""Calls kernels: from tensors to a result.

May import `installed` and what is below it; not `inductor`, `recording` or `jit`. Start at `api`
and `gates_and_groups`, the public functions; `native` is the launcher in C++, and `compiled` what
generated code calls.
"""
