"""Compiles single problems while a program runs, and stores the kernels for later processes.

May import `pipeline` and lower layers; not `tuning`, `workload` or `cli`. Start at `server`, the
process that the runtime's `nvgemm_runtime.jit.client` starts. `jit_compiler` does its work, and
`user_bundle` stores the result.
"""
