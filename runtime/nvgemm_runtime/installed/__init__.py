"""Bundles that this process can use: found, opened and indexed once.

May import `matching` and the rooms below it, but not `launch` or the rooms above it. Start at
`registry`; `discover` finds bundles in wheels, `jit_cache` bundles compiled at run time, and
`confirmed_files` their times with this torch, and `policy` has the keys whose signatures count.
"""
