"""Bundled kernels in what torch.compile compiles.

The only package that imports ``torch._inductor``. It may import every other room; none imports it.
Start at `autoload`, which torch calls at its import and which waits for Inductor. Inductor calls
`entry` for each GEMM, which calls `hook` where there is anything to do. Under max-autotune, `hook`
reads the choices (`reading`), asks `offers` which kernels to offer, and adds them as `choices`,
which write the calls of those that win. Without it, `default_mode` makes one of
`dispatched_choices`. `epilogue_fusion`, `gated_fusion` and `scaled`
have Inductor ask for choices where stock Inductor does not. Generated Python imports
`nvgemm_runtime.launch.compiled`, `cpp` is what generated C++ contains, and `cache_key` ties torch's
compile caches to what is installed. `choice_timing` times choices without their launches, with the
stopwatches of `gpu_times`, `modes` and `options` say in which mode a GEMM is compiled, `report`
tells what became of it, `operators` and `archives` register operators for loaded packages, and
`torch_nvgemm` deals with torch's own NVGEMM backend. `compiled` stands in caches of torch that
earlier releases wrote.
"""
