"""Finds GEMMs in any transformers model by running it under fake tensors.

May import `targets`, `storage` and the rest of `manifest`; the only part that imports torch and
transformers. Start at `traced_model`.
"""
