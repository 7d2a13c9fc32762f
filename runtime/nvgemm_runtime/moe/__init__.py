"""Mixture of experts: one differentiable function from tokens to the experts' results.

`experts` does the up projection, the gated activation and the down projection with prebuilt grouped
kernels, and with torch's operators where no kernel serves. Importing it imports torch.
"""

from .block import experts

__all__ = ["experts"]
