"""Users' functions on an emulated GPU: CPU tensors, kernels' own launchers, interpreted PTX."""
