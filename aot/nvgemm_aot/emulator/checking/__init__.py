"""Checks kernels for GPUs that are not there: executes their PTX and compares the results."""
