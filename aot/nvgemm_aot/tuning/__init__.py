"""Measuring the kernels of bundles on a GPU, and writing what was measured into their rankings.

`tune` goes through the problems; `operands` and `correctness` see to it that only kernels which are
right are timed; `contenders` are what is timed; `race` times them in turn until `separation` tells
them apart; `timer` and `gpu_state` know the GPU; `state` keeps what was measured; `tuned_bundle`
and `pruning` make the new bundle.
"""
