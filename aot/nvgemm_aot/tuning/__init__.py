"""Measures bundled kernels on a GPU and writes bundles with measured rankings.

May import `pipeline` and lower rooms, but not `jit`, `workload` or `cli`. Start at `tune.tune`.

`watchdog` runs a tuning in its own process and kills that process if a kernel hangs. For each
problem, `contenders` lists the callables to time. `random_operands`, `exact_operands` and
`correctness` reject wrong kernels before timing. `race` times the rest in turn on a `gpu`, for
`measuring`. The result is an `outcome`. `state` saves outcomes in a file, and `rewrite` builds the
new bundle content.
"""
