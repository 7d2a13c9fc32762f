"""Stand-in for the CUDA driver and runtime below kernels' own launchers.

Launchers call NVIDIA's ``_cudaLaunchKernelEx`` and others in libcute_dsl_runtime.so, which contains
a CUDA runtime that accepts NVIDIA's driver alone. NVIDIA also ships these functions as an archive
over the public CUDA runtime API, ``libcuda_dialect_runtime_static.a``. `runtime_archive` links it,
unchanged, with the stand-in, so that launches reach Python. Nothing of it is ever distributed.
"""
