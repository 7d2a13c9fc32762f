"""Bundled kernels among the choices of torch.compile's max-autotune.

`autoload` is what torch calls at its import: it waits for Inductor. `hook` is the only module that
knows torch's internals; it asks `offers` which kernels to offer for a GEMM. `compiled` is what
generated code imports, and `cache_key` ties torch's compile caches to what is installed.
"""
