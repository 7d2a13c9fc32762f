"""Measuring the kernels of bundles on a GPU, and writing what was measured into their rankings.

May import `build` and what is below it; not `jit`, `workload` or `cli`. Start at `tune`.

`tune` is the whole of it, and `session` goes through the problems in one run; `operands` and
`correctness` see to it that only kernels which are right are timed; `contenders` are what is timed;
`race` times them in turn until `separation` tells them apart; `timer` and `gpu_state` know the GPU;
`output` sees to it that no measurement is overwritten; `state` keeps them, as `outcome_json`, in a
`journal`; `tuned_bundle` and `pruning` make the new bundle.
"""
