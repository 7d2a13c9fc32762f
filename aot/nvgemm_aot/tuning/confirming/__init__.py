"""``nvgemm-aot confirm``: times the kernels of dispatch tables beside this torch's ATen."""
