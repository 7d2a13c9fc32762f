"""Mixture of experts: differentiable functions from tokens to the experts' results.

`experts` does the up projection, the gated activation and the down projection of sorted rows with
prebuilt grouped kernels, and with torch's operators where no kernel serves; `sort_by_expert` sorts
them, and `routed_experts` does both. Importing it imports torch.
"""

from .block import experts
from .routed import routed_experts
from .tokens import Routing, sort_by_expert

__all__ = ["Routing", "experts", "routed_experts", "sort_by_expert"]
