"""Kernel launches: from tensors to a result.

May import `installed` and below; not `inductor`, `recording` or `jit`. Public functions are in
`api` and `gates_and_groups`; `native` is the C++ launcher, and `compiled` serves generated code.
"""
