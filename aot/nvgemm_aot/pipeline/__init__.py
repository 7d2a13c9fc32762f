"""Builds bundles from a manifest, without a GPU.

May import `verify`, `bundle` and lower layers, not `jit`, `tuning`, `workload` or `cli`. Start at
`pipeline`: it turns a manifest into a plan (`target_plan`), worker processes compile and link the
kernels (`compiler`), and `assemble` collects the input for the bundle writer.
"""
