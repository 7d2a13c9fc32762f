"""Times kernels on a GPU, in turn."""
