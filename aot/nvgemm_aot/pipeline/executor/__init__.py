"""Work on other machines, dealt by a Dask scheduler.

`scheduler_connection` checks an address and connects. `dask_workers` deals a build's kernels to the
workers; `fleet_worker` runs there. The package distributed is imported only where a scheduler is
used.
"""
