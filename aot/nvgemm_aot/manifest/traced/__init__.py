"""GEMMs of any model that transformers has, found by running it under fake tensors.

May import `targets`, `storage` and the rest of `manifest`, and is the only part of it that imports
torch and transformers. Start at `model`.
"""
