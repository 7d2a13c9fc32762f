"""Kernels' entries in the caches: PTX beside objects, and kernels from the remote cache."""
