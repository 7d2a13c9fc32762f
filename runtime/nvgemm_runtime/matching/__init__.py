"""Kernel matching: finds kernels that serve a problem, or every reason for a miss.

May import `bundle` and below; not `installed` or above. Start at `index`. Facts about this machine
come from `device`, so tests need no GPU.
"""
