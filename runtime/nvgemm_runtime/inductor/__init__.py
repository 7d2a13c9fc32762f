"""Offers bundled kernels to torch.compile.

The only package that imports ``torch._inductor``. It may import every other room; no room imports
it.

- `autoload` is the start: torch calls it at import, and it waits for Inductor.
- `entry` is called by Inductor for each GEMM. It calls `hook` if there is work to do.
- `hook` handles max-autotune: it reads the choices (`reading`), gets kernels from `offers` and adds
  them as `choices`. The winners write their own calls.
- `default_mode` handles compilation without max-autotune and builds `dispatched_choices`.
- `epilogue_fusion`, `gated_fusion` and `scaled` make Inductor ask for choices where stock Inductor
  does not.
- `choice_timing` times choices without their launches, with the timers in `gpu_times`.
- `modes` and `options` hold the mode in which a GEMM is compiled.
- `report` records the outcome for each GEMM.
- `operators` and `archives` register operators for loaded packages.
- `cpp` is the part of generated C++ that calls kernels. Generated Python imports
  `nvgemm_runtime.launch.compiled`.
- `cache_key` ties torch's compile caches to the installed bundles.
- `torch_nvgemm` handles torch's own NVGEMM backend.
- `compiled` serves torch caches that earlier releases wrote.
"""
