"""Offers bundled kernels to torch.compile.

The only package that imports ``torch._inductor``. It may import every other room; no room imports
it.

- `autoload` is the start: torch calls it at import, and it waits for Inductor.
- `entry_point` is called by Inductor for each GEMM. It calls `hook` if there is work to do.
- `hook` handles max-autotune: it reads the choices (`reading`), gets kernels from `offers` and adds
  them as choices.
- `autotuning` has these choices, which write their own calls if they win, and times them.
- `default_mode` chooses by measured rankings, without max-autotune.
- `fusion` makes Inductor ask for choices where stock Inductor does not.
- `codegen` is the part of generated C++ that calls kernels. Generated Python imports
  `nvgemm_runtime.launch.compiled`.
- `configuration` holds modes and options, and ties torch's compile caches to the installed bundles.
- `report` records the outcome for each GEMM.
- `compiled` serves torch caches that earlier releases wrote.
"""
