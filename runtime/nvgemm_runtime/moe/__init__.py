"""Mixture of experts: differentiable functions from tokens to the experts' results.

`experts` runs the up projection, gated activation and down projection on sorted rows with prebuilt
grouped kernels, or with torch's operators if no kernel serves. `sort_by_expert` sorts the rows, and
`routed_experts` does both. Importing this package imports torch.

A call passes `block`, `gates` for the up projection, `products` or `gated_products`, and `kernels`,
which finds and launches one. `backward` takes gradients; `routing` sorts rows and adds those of a
token. `integrations` has experts for other libraries.
"""

from .block import experts, routed_experts
from .routing import Routing, sort_by_expert

__all__ = ["Routing", "experts", "routed_experts", "sort_by_expert"]
