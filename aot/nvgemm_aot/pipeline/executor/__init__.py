"""Work on other machines, dealt by a Dask scheduler.

May import the rest of `pipeline` and lower rooms. `scheduler_connection` checks an address and
connects. `fleet` knows the workers, and `dask_workers` deals a build's kernels to them; `batches`
holds what is on its way, and `fleet_worker` runs there. The package distributed is imported only
where a scheduler is used.
"""
