"""Compiles kernels at run time in a separate builder process.

May import `launch` and lower rooms, but not `inductor`, `recording` or the builder. Start at
`client`.
"""
