"""Bundled kernels among the choices of torch.compile's max-autotune.

The only package that imports ``torch._inductor``. It may import every other room; none imports it.
Start at `autoload`, which torch calls at its import and which waits for Inductor. `hook` joins its
choices, asking `offers` which kernels to offer for a GEMM, and `nodes` writes the calls of those
that won. `epilogue_fusion` and `scaled` have Inductor ask for choices where it does not. Generated
Python imports `nvgemm_runtime.launch.compiled`, `cpp` is what generated C++ contains, and
`cache_key` ties torch's compile caches to what is installed.
"""
