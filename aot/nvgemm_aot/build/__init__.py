"""Builds bundles from a manifest, without a GPU.

May import `verify`, `bundle` and what is below them; not `jit`, `tuning`, `workload` or `cli`.
Start at `pipeline`: a manifest becomes a `plan`, worker processes compile and link its kernels
(`compiler`), and `assemble` puts together what the bundle writer takes.
"""
