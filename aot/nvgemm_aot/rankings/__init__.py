"""Measured rankings as files: writes, merges and compares them without a GPU.

May import `bundle` and lower layers. Start at `entries.Rankings`.

`entries` holds measurements with their origin; `file` reads and writes them; `export` takes them
from bundles. `agreement` compares two measurements, `assess` combines all measurements for a
problem, `usable` selects those that a build can use, `table_kernels` finds the kernels that
dispatch tables need, `pruning` the kernels to keep, and `counting` the problems that use measured
kernels. `shipped_rankings` finds the rankings that come with this package, in ``data``.
"""
