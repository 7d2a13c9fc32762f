"""Runs torch operators on fake tensors, but computes values that no weight determines.

Masks, positions and image sizes are small and computed for real, so that a model can read them.
Routers are assumed to select all experts in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

_MOST_NUMBERS = 1 << 16
"""Most elements in a tensor with real values."""

_TWIN = "_nvgemm_fake_twin"
"""Attribute for a real tensor overwritten with fake values: its fake replacement."""

_LOOKS_AT_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


class KnownValues:
    """Runs operators for a `torch.utils._python_dispatch.TorchDispatchMode`.

    Attributes:
        mode: Mode that fake tensors belong to.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator. The result is real if it is small and all operands are real.

        Raises:
            DataDependentOutputException, DynamicOutputShapeException: If the result depends on
                unknown values.
        """
        known = all(_is_known(tensor) for tensor in tensors_in(args, kwargs))
        if known:
            return self._run_known(func, args, kwargs)
        if func._schema.is_mutable:
            self._forget_numbers(func, args)
        result = self._run_fake(func, args, kwargs)
        return _choose_in_turn(func, args, kwargs, result)

    def _run_known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func._schema.is_mutable or sum(t.numel() for t in tensors_in(args, kwargs)) == 1:
            return func(*args, **kwargs)
        try:
            result = self._run_fake(func, args, kwargs)
        except _LOOKS_AT_NUMBERS:
            return func(*args, **kwargs)
        if any(tensor.numel() > _MOST_NUMBERS for tensor in tensors_in((result,), {})):
            return result
        return func(*args, **kwargs)

    def _run_fake(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.mode:
            return func(*map(_twin, args), **{name: _twin(value) for name, value in kwargs.items()})

    def _forget_numbers(self, func: Any, args: Sequence[Any]) -> None:
        """Gives a fake twin to each real tensor that an operator overwrites with unknown values."""
        for argument, value in zip(func._schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor) and _is_known(value):
                with self.mode:
                    twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                setattr(value, _TWIN, twin)


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yields tensors in arguments or results, and in lists of them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _is_known(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not hasattr(tensor, _TWIN)


def _twin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return getattr(value, _TWIN, value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(map(_twin, value))
    return value


_CHOOSING = frozenset({"topk", "argmax", "argmin", "multinomial"})
_SORTING = frozenset({"sort", "argsort"})


def _choose_in_turn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Replaces an operator's chosen indices with real ones: all choices in turn."""
    name = func.overloadpacket.__name__
    if name not in _CHOOSING and name not in _SORTING:
        return result
    results = result if isinstance(result, (list, tuple)) else (result,)
    if results[-1].dtype is not torch.int64 or results[-1].numel() > _MOST_NUMBERS:
        return result
    shape = tuple(results[-1].shape)
    names = (argument.name for argument in func._schema.arguments)
    named = {**dict(zip(names, args)), **kwargs}
    dim = named.get("dim", -1)
    if name in _CHOOSING and (dim is None or args[0].dim() == 0):
        return result
    choices = int(args[0].shape[dim])
    if name in _SORTING:
        indices = _along(range(choices), shape, dim)
    elif len(shape) < args[0].dim():
        indices = (torch.arange(math.prod(shape)) % choices).reshape(shape)
    else:
        last = list(shape)
        last[dim], last[-1] = last[-1], last[dim]
        indices = torch.arange(math.prod(shape)) % choices
        indices = indices.reshape(last).transpose(dim, -1).contiguous()
    return (*results[:-1], indices) if len(results) > 1 else indices


def _along(numbers: Iterable[int], shape: tuple[int, ...], dim: int) -> torch.Tensor:
    lengths = [1] * len(shape)
    lengths[dim] = -1
    return torch.tensor(list(numbers)).reshape(lengths).expand(shape).contiguous()
