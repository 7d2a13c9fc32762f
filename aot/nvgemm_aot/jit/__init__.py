"""Compiles single problems while a program runs, and keeps the kernels for later processes.

May import `build` and what is below it; not `tuning`, `workload` or `cli`. Start at `server`, the
process that the runtime's `nvgemm_runtime.jit.client` starts; `jit_compiler` is its work, and
`user_bundle` the file that keeps it.
"""
