"""Which kernels serve a problem, and every reason why others do not.

May import `bundle` and what is below it; not `installed` or what is above it. Start at `index`;
what it must know of this machine comes from `device`, so that tests need no GPU.
"""
