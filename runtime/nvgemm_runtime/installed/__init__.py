"""The bundles that this process can use: found, opened and indexed once.

May import `matching` and what is below it; not `launch` or what is above it. Start at `registry`;
`discover` finds bundles of wheels, and `jit_cache` those that were compiled at run time.
"""
