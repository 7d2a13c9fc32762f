"""Measures bundled kernels on a GPU and writes bundles with measured rankings.

May import `pipeline` and lower rooms, but not `jit`, `workload` or `cli`. Start at
`tune_bundles.tune`.

For each problem, `contenders` lists the callables to time. `correctness` creates operands and
rejects wrong kernels. `measuring` times the rest in turn, in a process that `watchdog` can end.
The result is an `outcome`. `state` saves outcomes in a file, and `rewrite` builds the new bundle
content. `confirming` times a few kernels with another torch, and writes no bundle.
"""
