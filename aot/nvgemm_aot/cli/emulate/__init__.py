"""``nvgemm-aot emulate``: checks kernels on a machine without their GPU."""
