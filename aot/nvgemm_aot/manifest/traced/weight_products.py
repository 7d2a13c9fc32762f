"""Records a model's products of activations with weights.

Excludes products of two activations, as in attention: these depend on the attention implementation,
not on the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvgemm_runtime.gemm.problem import Layout

from .known_values import KnownValues, tensors_in

_NAME = "_nvgemm_weight"
"""Attribute for a tensor that is a weight, or computed from weights alone: the weight's name."""

_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "_grouped_mm": 0,
    "grouped_mm_fallback": 0,
}
"""Position of the first factor, by operator."""

_LOOKUPS = frozenset({"index", "index_select"})
"""Operators whose result is part of a weight, although indices are no weights."""


@dataclass(frozen=True, kw_only=True)
class WeightProduct:
    """Product of activations with a weight.

    Attributes:
        weight: Parameter name.
        rows: Activation rows; all experts' in a grouped product.
        n: Out features.
        k: In features.
        layout: ``tn`` for a weight stored as [n, k], ``tt`` for [k, n].
        batch: Matrices in a batched weight; 1 for a plain product.
        experts: Experts in a grouped product; 0 otherwise.
        biased: True if the operator adds a vector.
        dtype: Weight type.
        is_turned: True if the weight is the first factor.
    """

    weight: str
    rows: int
    n: int
    k: int
    layout: Layout
    dtype: torch.dtype
    batch: int = 1
    experts: int = 0
    biased: bool = False
    is_turned: bool = False


class WeightProducts(TorchDispatchMode):  # type: ignore[misc]
    """Runs a model's operators through `KnownValues` and lists its products with weights.

    ``names`` maps parameters to names.
    """

    def __init__(self, values: KnownValues, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__()
        self.products: list[WeightProduct] = []
        self._values = values
        for tensor, name in names.items():
            setattr(tensor, _NAME, name)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operator, and lists it if it multiplies by a weight."""
        kwargs = kwargs or {}
        result = self._values.run(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            self._list_product(name, args)
            return result
        operands = list(tensors_in(args, kwargs))
        if not operands:
            return result
        weight = getattr(operands[0], _NAME, None)
        if weight is not None and (
            name in _LOOKUPS or all(hasattr(operand, _NAME) for operand in operands)
        ):
            for tensor in tensors_in((result,), {}):
                setattr(tensor, _NAME, weight)
        return result

    def _list_product(self, name: str, args: Sequence[Any]) -> None:
        first = _PRODUCTS[name]
        a, b = args[first : first + 2]
        biased = first == 1 and args[0].dim() == 1
        if (weight := getattr(b, _NAME, None)) is not None:
            self.products.append(_read_product(name, weight, a, b, biased=biased))
        elif (weight := getattr(a, _NAME, None)) is not None:
            turned = _read_product(name, weight, b.mT, a.mT, biased=False)
            self.products.append(replace(turned, is_turned=True))


def _read_product(
    name: str, weight: str, a: torch.Tensor, b: torch.Tensor, *, biased: bool
) -> WeightProduct:
    k, n = map(int, b.shape[-2:])
    rows, batch = int(a.shape[-2]), 1
    is_grouped = "grouped" in name
    if b.dim() == 3 and not is_grouped:
        if b.stride(0) == 0:  # one weight for all matrices of a batch
            rows *= int(b.shape[0])
        else:
            batch = int(b.shape[0])
    return WeightProduct(
        weight=weight,
        rows=rows,
        n=n,
        k=k,
        layout=Layout.TN if b.stride(-2) == 1 else Layout.TT,
        dtype=b.dtype,
        batch=batch,
        experts=int(b.shape[0]) if is_grouped and b.dim() == 3 else 0,
        biased=biased,
    )
