"""Work on other machines, dealt by a Dask scheduler.

`scheduler_connection` checks an address and connects. May import what `pipeline` may; the package
distributed is imported only where a scheduler is used.
"""
