"""Operands for experts, as one value from the call to the computation, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch

_Named = TypeVar("_Named")

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


class ExpertOperands(NamedTuple):
    """Arguments of `experts`, in the order of its operator.

    A pair of weights or biases is split.

    Attributes:
        x: Rows, or tokens if there are indices.
        w_first: Weights of the first product: for gates and ups in one matrix for each expert, or
            for gates.
        w_second: Up weights of a second product; None if the first has both.
        w_down: Down projection weights.
        offsets, counts: Ends, or numbers, of each expert's rows.
        activation, order: Names for the activation and the order of gates and ups.
        first_bias, second_bias, down_bias: Biases, split as their weights.
        indices, token_rows: Each row's token, and each token's rows.
        routing_weights: Factor for each row's result.
        combine: True to add the results of each token's rows.
        alpha, limit: ``swiglu_oai`` constants.
        autocast: The call's `autocast_type`.
    """

    x: torch.Tensor
    w_first: torch.Tensor
    w_second: torch.Tensor | None
    w_down: torch.Tensor
    offsets: torch.Tensor | None
    counts: torch.Tensor | None
    activation: str
    order: str
    first_bias: torch.Tensor | None
    second_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    indices: torch.Tensor | None
    token_rows: torch.Tensor | None
    routing_weights: torch.Tensor | None
    combine: bool
    alpha: float
    limit: float
    autocast: torch.dtype | None

    def floating(self) -> dict[str, torch.Tensor | None]:
        """Returns the operands with one dtype, by argument name, x first."""
        if self.w_second is None:
            up = {"w_up": self.w_first, "up_bias": self.first_bias}
        else:
            up = {
                "w_up[0]": self.w_first, "w_up[1]": self.w_second,
                "up_bias[0]": self.first_bias, "up_bias[1]": self.second_bias,
            }  # fmt: skip
        return {"x": self.x, **up, "w_down": self.w_down, "down_bias": self.down_bias}

    def others(self) -> dict[str, torch.Tensor | None]:
        """Returns integers and routing weights by argument name."""
        ends = {"offsets": self.offsets} if self.counts is None else {"counts": self.counts}
        return {
            **ends,
            "indices": self.indices,
            "token_rows": self.token_rows,
            "routing_weights": self.routing_weights,
        }

    def cast(self, dtype: torch.dtype) -> ExpertOperands:
        """Returns the operands after autocast, which keeps fp64."""
        names = ("x", "w_first", "w_second", "w_down", "first_bias", "second_bias", "down_bias")
        operands = zip(names, (getattr(self, name) for name in names))
        return self._replace(
            **{
                name: operand.to(dtype)
                for name, operand in operands
                if operand is not None and operand.dtype is not torch.float64
            }
        )


def parse_name(argument: str, known: Mapping[str, _Named], value: str) -> _Named:
    """Returns the value that a name stands for.

    Takes a mapping because Dynamo in torch 2.11 cannot trace an enum's constructor, for
    torch.export.

    Raises:
        ValueError: If the name is unknown.
    """
    if value in known:
        return known[value]
    raise ValueError(f"experts: {argument} is {value!r}, must be one of {', '.join(known)}")


def parts_of_pairs(w_up: Any, up_bias: Any) -> tuple[Any, Any, Any, Any]:
    """Splits pairs into gate weights, up weights and their biases.

    A single tensor comes first, followed by None.

    Raises:
        ValueError: If only one argument is a pair, or a pair does not have two elements.
        TypeError: If a pair of weights has None as its second element.
    """
    is_pair = isinstance(w_up, tuple)
    if up_bias is not None and isinstance(up_bias, tuple) != is_pair:
        raise ValueError("experts: up_bias and w_up must both be pairs, or neither")
    if not is_pair:
        return w_up, None, up_bias, None
    for name, pair in (("w_up", w_up), ("up_bias", up_bias)):
        if pair is not None and len(pair) != 2:
            raise ValueError(f"experts: {name} has {len(pair)} tensors, must be a pair: gate, up")
    if w_up[1] is None:
        raise TypeError("experts: w_up[1] is None, must be a tensor")
    return (*w_up, *((None, None) if up_bias is None else up_bias))


def check_kinds(floating: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Checks that all arguments are plain tensors on one device with supported dtypes.

    Args:
        floating: Operands by argument name, x first. None is absent.
        others: Integers and ``routing_weights`` by argument name.

    Raises:
        ValueError: If devices differ.
        TypeError: If an argument is not a tensor, is a DTensor, or has a wrong dtype.
    """
    device = None
    for name, tensor in (*floating.items(), *others.items()):
        if tensor is None and name not in ("x", "w_up", "w_up[0]", "w_up[1]", "w_down"):
            continue
        check_tensor("experts", name, tensor, device)
        device = tensor.device if device is None else device
        is_floating = name in floating or name == "routing_weights"
        allowed = _FLOATING if is_floating else _INTEGERS
        if tensor.dtype not in allowed:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise TypeError(f"experts: {name} is {tensor.dtype}, must be one of {names}")


def check_tensor(where: str, name: str, tensor: Any, device: torch.device | None) -> None:
    """Checks that an argument of ``where`` is a plain tensor, on x's device if that is known.

    Raises:
        ValueError: If it is on another device.
        TypeError: If it is not a tensor, or is a DTensor.
    """
    if not isinstance(tensor, torch.Tensor):
        observed = "None" if tensor is None else f"of type {type(tensor).__name__}"
        raise TypeError(f"{where}: {name} is {observed}, must be a tensor")
    if hasattr(tensor, "to_local"):
        raise TypeError(f"{where}: {name} is a DTensor; pass {name}.to_local()")
    if device is not None and tensor.device != device:
        raise ValueError(f"{where}: {name} is on {tensor.device}, x on {device}; move it there")


def check_routed(
    x: torch.Tensor,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor | None,
) -> None:
    """Checks arguments of `routed_experts` that `experts` would report under other names.

    Raises:
        ValueError: If a shape does not match, or devices differ.
        TypeError: If an argument is not a tensor, or is a DTensor.
    """
    needed = {"x": (x, 2), "w_down": (w_down, 3), "chosen": (chosen, 2)}
    if routing_weights is not None:
        needed["routing_weights"] = (routing_weights, 2)
    for name, (tensor, dimensions) in needed.items():
        check_tensor("routed_experts", name, tensor, None if tensor is x else x.device)
        if tensor.dim() != dimensions:
            raise ValueError(
                f"routed_experts: {name} is {tuple(tensor.shape)}, must have {dimensions} "
                "dimensions"
            )
    if chosen.shape[0] != x.shape[0]:
        raise ValueError(
            f"routed_experts: chosen is {tuple(chosen.shape)}, must be [tokens, k] with the "
            f"{x.shape[0]} tokens of x"
        )
    if routing_weights is not None and routing_weights.shape != chosen.shape:
        raise ValueError(
            f"routed_experts: routing_weights is {tuple(routing_weights.shape)}, must have the "
            f"shape of chosen, {tuple(chosen.shape)}"
        )
    if 0 in w_down.shape:
        raise ValueError(f"routed_experts: w_down is {tuple(w_down.shape)}; no size may be 0")


def check_dtypes(floating: Mapping[str, torch.Tensor | None]) -> None:
    """Checks that all operands have x's dtype.

    Raises:
        TypeError: If dtypes differ.
    """
    x = floating["x"]
    assert x is not None
    for name, tensor in floating.items():
        if tensor is not None and tensor.dtype is not x.dtype:
            raise TypeError(
                f"experts: {name} is {tensor.dtype}, x is {x.dtype}; convert one of them, or use "
                "torch.autocast"
            )


def check_shapes(
    floating: Mapping[str, torch.Tensor | None],
    others: Mapping[str, torch.Tensor | None],
    combine: bool,
) -> None:
    """Checks that all shapes match. Arguments are those of `check_kinds`.

    Raises:
        ValueError: If a shape does not match.
    """
    tensors = {
        name: tensor for name, tensor in (*floating.items(), *others.items()) if tensor is not None
    }
    is_pair = "w_up[0]" in floating
    axes_by_name = {name: _axes_of(name, pair=is_pair) for name in tensors}
    for name, tensor in tensors.items():
        axes = axes_by_name[name]
        if tensor.dim() != len(axes):
            raise ValueError(
                f"experts: {name} is {tuple(tensor.shape)}, must have {len(axes)} dimensions: "
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
    for name, tensor in tensors.items():
        axes = axes_by_name[name]
        # Without indices, tokens are the rows. Any k fits.
        expected = [sizes.get(axis, tensor.shape[-1]) for axis in axes]
        if [*tensor.shape] != expected:
            raise ValueError(
                f"experts: {name} is {tuple(tensor.shape)}, must be {tuple(expected)}: "
                f"[{', '.join(axes)}], "
                f"with {count} experts, dim {dim} and hidden {hidden} of w_down"
            )
    if token_rows is not None and (token_rows.shape[1] == 0 or token_rows.numel() != sizes["rows"]):
        raise ValueError(
            f"experts: token_rows is {tuple(token_rows.shape)}, must be [tokens, k] with k at "
            f"least 1 and an element for each of the {sizes['rows']} rows in indices"
        )
    if combine and indices is None:
        raise ValueError("experts: combine needs indices, the token of each row")


def _axes_of(name: str, *, pair: bool) -> tuple[str, ...]:
    """Returns the names of a tensor's dimensions. The rows of a gathered x are tokens."""
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
    """Checks ends or counts, and indices. Copies them from the device; for debugging.

    Args:
        others: As in `check_kinds`, with checked shapes.
        tokens: Number of rows in x.

    Raises:
        ValueError: If a value is out of range.
    """
    indices = others["indices"]
    rows = tokens
    if indices is not None:
        rows = indices.shape[0]
        for position, index in enumerate(indices.tolist()):
            if not 0 <= index < tokens:
                raise ValueError(
                    f"experts: indices[{position}] is {index}, must be in 0..{tokens - 1}: "
                    f"x has {tokens} tokens"
                )
        _check_token_rows(others["token_rows"], indices)
    counts = others.get("counts")
    if counts is not None:
        end = 0
        for expert, count in enumerate(counts.tolist()):
            if not 0 <= count <= rows - end:
                raise ValueError(
                    f"experts: counts[{expert}] is {count}, must be in 0..{rows - end}: "
                    f"earlier experts have {end} of {rows} rows"
                )
            end += count
    offsets = others.get("offsets")
    if offsets is not None:
        end = 0
        for expert, offset in enumerate(offsets.tolist()):
            if not end <= offset <= rows:
                raise ValueError(
                    f"experts: offsets[{expert}] is {offset}, must be in {end}..{rows}: "
                    f"ends must not fall or pass the {rows} rows"
                )
            end = offset


def _check_token_rows(token_rows: torch.Tensor | None, indices: torch.Tensor) -> None:
    """Checks that ``token_rows`` is the inverse of ``indices``."""
    if token_rows is None:
        return
    owners, rows, seen_rows = indices.tolist(), len(indices), set[int]()
    for token, of_token in enumerate(token_rows.tolist()):
        for choice, row in enumerate(of_token):
            if not 0 <= row < rows:
                wrong = f"must be in 0..{rows - 1}"
            elif owners[row] != token:
                wrong = f"which is a row of token {owners[row]} in indices"
            elif row in seen_rows:
                wrong = "as an earlier element is"
            else:
                seen_rows.add(row)
                continue
            raise ValueError(
                f"experts: token_rows[{token}, {choice}] is {row}, {wrong}; take both from "
                "nvgemm_runtime.moe.sort_by_expert"
            )
