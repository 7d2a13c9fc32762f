"""What the experts' function refuses before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

_Named = TypeVar("_Named")

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def named(argument: str, known: Mapping[str, _Named], value: str) -> _Named:
    """What a value stands for.

    Not by the class of an enum, which Dynamo of torch 2.11 does not trace, for torch.export.

    Raises:
        ValueError: If it stands for nothing.
    """
    if value in known:
        return known[value]
    raise ValueError(f"experts: {argument} is {value!r}, must be one of {', '.join(known)}")


def parts_of_pairs(w_up: Any, up_bias: Any) -> tuple[Any, Any, Any, Any]:
    """Weights of gates and of ups, then their biases; what is no pair stands first, before None.

    Raises:
        ValueError: If one is a pair and the other is none, or a pair has not two.
        TypeError: If a pair of weights has no second.
    """
    is_pair = isinstance(w_up, tuple)
    if up_bias is not None and isinstance(up_bias, tuple) != is_pair:
        raise ValueError("experts: up_bias must be a pair exactly where w_up is one")
    if not is_pair:
        return w_up, None, up_bias, None
    for name, pair in (("w_up", w_up), ("up_bias", up_bias)):
        if pair is not None and len(pair) != 2:
            raise ValueError(f"experts: {name} has {len(pair)} tensors, must be a pair: gate, up")
    if w_up[1] is None:
        raise TypeError("experts: w_up[1] is None, must be a tensor")
    return (*w_up, *((None, None) if up_bias is None else up_bias))


def check_kinds(floating: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Check that all are plain tensors on one device, of types that can be computed.

    Args:
        floating: By the names that the caller knows: operands, of which x is first; None is absent.
        others: Likewise: integers, and ``routing_weights``.

    Raises:
        ValueError: If devices differ.
        TypeError: If one is no tensor, is a DTensor, or has a wrong type of elements.
    """
    device = None
    for name, one in (*floating.items(), *others.items()):
        if one is None and name not in ("x", "w_up", "w_up[0]", "w_up[1]", "w_down"):
            continue
        check_tensor("experts", name, one, device)
        device = one.device if device is None else device
        is_floating = name in floating or name == "routing_weights"
        allowed = _FLOATING if is_floating else _INTEGERS
        if one.dtype not in allowed:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise TypeError(f"experts: {name} is {one.dtype}, must be one of {wanted}")


def check_tensor(where: str, name: str, one: Any, device: torch.device | None) -> None:
    """Check that one argument of ``where`` is a plain tensor, on x's device if that is known.

    Raises:
        ValueError: If it is on another.
        TypeError: If it is no tensor, or a DTensor.
    """
    if not isinstance(one, torch.Tensor):
        found = "None" if one is None else f"of type {type(one).__name__}"
        raise TypeError(f"{where}: {name} is {found}, must be a tensor")
    if hasattr(one, "to_local"):
        raise TypeError(f"{where}: {name} is a DTensor; pass {name}.to_local()")
    if device is not None and one.device != device:
        raise ValueError(f"{where}: {name} is on {one.device}, x on {device}; move it there")


def check_dtypes(floating: Mapping[str, torch.Tensor | None]) -> None:
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
    floating: Mapping[str, torch.Tensor | None],
    others: Mapping[str, torch.Tensor | None],
    combine: bool,
) -> None:
    """Check that all shapes fit together. Arguments are those of `check_kinds`.

    Raises:
        ValueError: If one does not.
    """
    tensors = {name: one for name, one in (*floating.items(), *others.items()) if one is not None}
    for name, one in tensors.items():
        axes = _axes_of(name, pair="w_up[0]" in floating)
        if one.dim() != len(axes):
            raise ValueError(
                f"experts: {name} is {tuple(one.shape)}, must have {len(axes)} dimensions: "
                f"[{', '.join(axes)}]"
            )
    x, w_down, indices = tensors["x"], tensors["w_down"], tensors.get("indices")
    token_rows = tensors.get("token_rows")
    if token_rows is not None and indices is None:
        raise ValueError("experts: token_rows needs indices, the token of each row")
    if 0 in w_down.shape:
        raise ValueError(f"experts: w_down is {tuple(w_down.shape)}; no size may be 0")
    count, dim, hidden = w_down.shape
    sizes = {"experts": count, "dim": dim, "hidden": hidden, "2 * hidden": 2 * hidden}
    sizes["tokens"] = x.shape[0]
    sizes["rows"] = x.shape[0] if indices is None else indices.shape[0]
    for name, one in tensors.items():
        axes = _axes_of(name, pair="w_up[0]" in floating)
        # Without indices, tokens are the rows. Any k will do.
        wanted = tuple(sizes.get(axis, one.shape[-1]) for axis in axes)
        if tuple(one.shape) != wanted:
            raise ValueError(
                f"experts: {name} is {tuple(one.shape)}, must be {wanted}: [{', '.join(axes)}], "
                f"with {count} experts, dim {dim} and hidden {hidden} of w_down"
            )
    if token_rows is not None and (token_rows.shape[1] == 0 or token_rows.numel() != sizes["rows"]):
        raise ValueError(
            f"experts: token_rows is {tuple(token_rows.shape)}, must be [tokens, k] with an "
            f"element for each of the {sizes['rows']} rows of indices, and k not 0"
        )
    if combine and indices is None:
        raise ValueError("experts: combine needs indices, the token of each row")


def _axes_of(name: str, *, pair: bool) -> tuple[str, ...]:
    """Names of a tensor's dimensions; those of x are tokens where it is gathered."""
    axes = _AXES[name.partition("[")[0]]
    return tuple("hidden" if axis == _WIDE else axis for axis in axes) if pair else axes


_WIDE = "2 * hidden"
_AXES = {
    "x": ("tokens", "dim"),
    "w_up": ("experts", _WIDE, "dim"),
    "w_down": ("experts", "dim", "hidden"),
    "up_bias": ("experts", _WIDE),
    "down_bias": ("experts", "dim"),
    "offsets": ("experts",),
    "counts": ("experts",),
    "indices": ("rows",),
    "token_rows": ("tokens", "k"),
    "routing_weights": ("rows",),
}


def check_values(others: Mapping[str, torch.Tensor | None], tokens: int) -> None:
    """Check ends or counts, and indices; copies them from the device. For debugging.

    Args:
        others: Those of `check_kinds`, whose shapes fit.
        tokens: Rows of x.

    Raises:
        ValueError: If one is out of its range.
    """
    indices = others["indices"]
    rows = tokens
    if indices is not None:
        rows = indices.shape[0]
        for place, index in enumerate(indices.tolist()):
            if not 0 <= index < tokens:
                raise ValueError(
                    f"experts: indices[{place}] is {index}, must be in 0..{tokens - 1}: "
                    f"x has {tokens} tokens"
                )
        _check_token_rows(others["token_rows"], indices)
    counts = others.get("counts")
    if counts is not None:
        end = 0
        for expert, count in enumerate(counts.tolist()):
            if not 0 <= count <= rows - end:
                raise ValueError(
                    f"experts: counts[{expert}] is {count}, must be in 0..{rows - end}: the "
                    f"experts before it have {end} of {rows} rows"
                )
            end += count
    offsets = others.get("offsets")
    if offsets is not None:
        end = 0
        for expert, offset in enumerate(offsets.tolist()):
            if not end <= offset <= rows:
                raise ValueError(
                    f"experts: offsets[{expert}] is {offset}, must be in {end}..{rows}: ends rise, "
                    f"up to the {rows} rows"
                )
            end = offset


def _check_token_rows(token_rows: torch.Tensor | None, indices: torch.Tensor) -> None:
    """Check that the rows of tokens are ``indices`` the other way round."""
    if token_rows is None:
        return
    owners, rows, seen = indices.tolist(), len(indices), set[int]()
    for token, of_token in enumerate(token_rows.tolist()):
        for choice, row in enumerate(of_token):
            if not 0 <= row < rows:
                wrong = f"must be in 0..{rows - 1}"
            elif owners[row] != token:
                wrong = f"a row of token {owners[row]} by indices"
            elif row in seen:
                wrong = "which an element before it is, too"
            else:
                seen.add(row)
                continue
            raise ValueError(
                f"experts: token_rows[{token}, {choice}] is {row}, {wrong}; take both from "
                "nvgemm_runtime.moe.sort_by_expert"
            )
