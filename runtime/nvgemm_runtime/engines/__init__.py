"""Plug-ins for serving engines, which load them by entry points.

Torch.compile's plug-in serves the Linears in an engine's compiled graph. These serve products
outside it, and say at start-up what is served.

- `vllm_plugin` and `sglang_plugin` are the entry points; nothing here imports an engine before the
  engine itself has.
- `vllm_fp8` adds a class to vLLM's list of fp8 Linears.
- `seams` checks an engine's version and functions, and keeps failures out of the engine.
- `linears` computes Linears outside compiled graphs.
- `start_up` accompanies the step in which an engine captures graphs: `rank_wheels` compares the
  ranks' bundles, and `served_products` counts the model's products that kernels serve.

May import every other room; no room imports it.
"""
