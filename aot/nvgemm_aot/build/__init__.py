"""Builds bundles from a manifest, without a GPU.

May import `verify`, `bundle` and what is below them; not `jit`, `tuning`, `workload` or `cli`.
Start at `pipeline`: a manifest becomes a `plan`, its kernels are compiled and linked in worker
processes (`compiler`), and `assemble` makes what the writer writes.
"""
