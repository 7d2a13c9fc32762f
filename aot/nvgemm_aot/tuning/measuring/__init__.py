"""Times kernels on a GPU, in a process that a watchdog can end."""
