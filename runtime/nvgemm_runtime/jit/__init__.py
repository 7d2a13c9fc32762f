"""Has kernels compiled at run time, by a process of the builder.

May import `launch` and what is below it; not `inductor` or `recording`, and never the builder.
Start at `client`.
"""
