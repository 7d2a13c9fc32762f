"""Bundled kernels among the choices of torch.compile's max-autotune.

`autoload` is what torch calls at its import: it waits for Inductor. `hook` joins its choices,
asking `offers` which kernels to offer for a GEMM, and `nodes` writes the calls of those that won.
`epilogue_fusion` and `scaled` have Inductor ask for choices where it does not. `nvgemm_runtime.launch.compiled` is what generated
Python imports, `cpp` what generated C++ contains, and `cache_key` ties torch's compile caches to
what is installed.
"""
