"""Measures the kernels of bundles on a GPU and writes bundles with measured rankings.

May import `build` and what is below it; not `jit`, `workload` or `cli`. Start at `tune.tune`.

`watchdog` runs that in a process, which it kills if a kernel hangs. `contenders` are what is timed
for a problem; `random_operands`, `exact_operands` and `correctness` make sure that only correct
kernels are timed; `race` times them in turn on a `gpu`, for `measuring`. What comes of that is an
`outcome`; `state` keeps outcomes in a file, and `rewrite` makes the new bundle's content.
"""
