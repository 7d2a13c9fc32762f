"""Bundled kernels among the choices of torch.compile's max-autotune.

The only package that imports ``torch._inductor``. It may import every other room; none imports it.
Start at `autoload`, which torch calls at its import and which waits for Inductor. For each GEMM
`hook` reads the choices (`reading`), asks `offers` which kernels to offer, and adds them as
`choices`, which write the calls of those that win. `epilogue_fusion`, `gated_fusion` and `scaled`
have Inductor ask for choices where stock Inductor does not. Generated Python imports
`nvgemm_runtime.launch.compiled`, `cpp` is what generated C++ contains, and `cache_key` ties torch's
compile caches to what is installed. `choice_timing` times choices without their launches, with the
stopwatches of `gpu_times`, `modes` and `options` say in which mode a GEMM is compiled, `report`
tells what became of it, `operators` registers operators for loaded packages, and `torch_nvgemm`
deals with torch's own NVGEMM backend. `compiled` stands in caches of torch that earlier releases
wrote.
"""
