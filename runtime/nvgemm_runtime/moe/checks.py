"""What the experts' function refuses before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

_Named = TypeVar("_Named")


def named(argument: str, known: Mapping[str, _Named], value: str) -> _Named:
    """What a value stands for; the tracer of torch 2.11 does not look into classes of enums.

    Raises:
        ValueError: If it stands for nothing.
    """
    if value in known:
        return known[value]
    raise ValueError(f"experts: {argument} is {value!r}, must be one of {', '.join(known)}")


def check_kinds(
    floating: dict[str, torch.Tensor | None], others: dict[str, torch.Tensor | None]
) -> None:
    """Check that all are plain tensors on one device, and integers where they must be.

    Raises:
        ValueError: If devices differ.
        TypeError: If one is a DTensor, or of a wrong kind of type.
    """
    device = None
    for name, one in (*floating.items(), *others.items()):
        if one is None:
            continue
        if hasattr(one, "to_local"):
            raise TypeError(f"experts: {name} is a DTensor; pass {name}.to_local()")
        if device is None:
            device = one.device
        elif one.device != device:
            raise ValueError(f"experts: {name} is on {one.device}, x on {device}; move it there")
        is_floating = name in floating or name == "routing_weights"
        if one.dtype.is_floating_point != is_floating or one.dtype is torch.bool:
            wanted = "floating" if is_floating else "int32 or int64"
            raise TypeError(f"experts: {name} is {one.dtype}, must be {wanted}")


def check_dtypes(floating: dict[str, torch.Tensor | None]) -> None:
    """Check that all operands have x's type.

    Raises:
        TypeError: If one has another.
    """
    x = floating["x"]
    assert x is not None
    for name, one in floating.items():
        if one is not None and one.dtype is not x.dtype:
            raise TypeError(
                f"experts: {name} is {one.dtype}, x is {x.dtype}; convert one of them, or use "
                "torch.autocast"
            )


def check_shapes(
    floating: dict[str, torch.Tensor | None],
    ends: torch.Tensor,
    indices: torch.Tensor | None,
    scores: torch.Tensor | None,
    combine: bool,
) -> None:
    """Check that all shapes fit together.

    Raises:
        ValueError: If one does not.
    """
    x, w_up, w_down = floating["x"], floating["w_up"], floating["w_down"]
    assert x is not None
    assert w_up is not None
    assert w_down is not None
    for name, one, rank in (("x", x, 2), ("w_up", w_up, 3), ("w_down", w_down, 3)):
        if one.dim() != rank:
            raise ValueError(f"experts: {name} has {one.dim()} dimensions, must have {rank}")
    count, dim, hidden = w_down.shape
    if count == 0 or dim == 0 or hidden == 0:
        raise ValueError(f"experts: w_down is {tuple(w_down.shape)}; no size may be 0")
    is_pair = floating["w_up[1]"] is not None
    wide = hidden if is_pair else 2 * hidden
    rows = x.shape[0] if indices is None else indices.shape[0]
    wanted: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
        "x": (x, (x.shape[0], dim)),
        "w_up": (w_up, (count, wide, dim)),
        "w_up[1]": (floating["w_up[1]"], (count, wide, dim)),
        "up_bias": (floating["up_bias"], (count, wide)),
        "up_bias[1]": (floating["up_bias[1]"], (count, wide)),
        "down_bias": (floating["down_bias"], (count, dim)),
        "offsets or counts": (ends, (count,)),
        "indices": (indices, (rows,)),
        "routing_weights": (scores, (rows,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"experts: {name} is {tuple(tensor.shape)}, must be {shape} beside w_down "
                f"{tuple(w_down.shape)}"
            )
    if combine and indices is None:
        raise ValueError("experts: combine needs indices, the token of each row")
