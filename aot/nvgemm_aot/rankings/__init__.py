"""Measured rankings as files: written, merged, compared, and put into bundles without a GPU.

May import `bundle` and what is below it. Start at `entries.Rankings`.

`entries` are what was measured of problems, where and how; `file` reads and writes them; `export`
takes them from bundles. `agreement` tells whether two measurements agree, `assess` what all of a
problem come to, `usable` which of that a build can use, `dispatched` which kernels programs then
call, and `pruning` which of all to keep.
`shipped` finds the rankings that come with this package, in ``data``.
"""
