"""Computes Linears outside compiled graphs by measured tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import NvgemmError
from ..settings import is_off

if TYPE_CHECKING:
    import torch

    from .seams import Engine


def compute_linear(
    engine: Engine, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``torch.nn.functional.linear``, by a bundled kernel where one was measured faster.

    In a graph that torch.compile traces, Inductor chooses, so the traced operator stays.

    Args:
        engine: Engine that calls, for a warning after an internal error.
        x: Activations [..., k].
        weight: Weight [n, k].
        bias: Bias [n], if any.

    Raises:
        NvgemmError: If the user asked for an error, as in mode ``required``.
    """
    import torch

    if not torch.compiler.is_compiling() and not is_off():
        try:
            from .. import linear

            return linear(x, weight, bias)
        except Exception as error:
            if isinstance(error, NvgemmError) and error.stops_compilation:
                raise
            name = type(error).__name__
            engine.warn_once(
                f"a Linear stays with {engine.name}: {name}: {error}", f"Linear {name}"
            )
    return torch.nn.functional.linear(x, weight, bias)
