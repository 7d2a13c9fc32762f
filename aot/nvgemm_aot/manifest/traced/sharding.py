"""How tensor parallelism divides a weight: by the model's plan, else by the weight's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nvgemm_runtime.gemm.problem import Layout

from ..models.gemm import Heads, Split

# fmt: off
_COLUMNS = frozenset(
    (
        "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "query", "key",
        "value", "q", "k", "v", "qkv", "Wqkv", "c_attn", "q_b_proj", "kv_b_proj",
        "gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h",
        "wi", "wi_0", "wi_1", "w1", "w3", "Wi", "up_gate_proj", "linear_1", "lm_head",
        "embed_out", "proj_out",
    )
)
"""Last names of weights whose out features ranks divide, where no plan names them."""

_ROWS = frozenset(
    (
        "o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "wo",
        "w2", "Wo", "linear_2",
    )
)
"""Likewise of those whose in features ranks divide."""

_QUERIES = frozenset(
    (
        "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "out_proj", "query", "q", "Wqkv",
        "qkv_proj", "query_key_value", "c_attn",
    )
)
_KEYS_AND_VALUES = frozenset(
    (
        "k_proj", "v_proj", "key", "value", "k", "v",
    )
)
# fmt: on

_INDEX = re.compile(r"\.\d+(?=\.|$)")


def pattern_of(path: str) -> str:
    """A module's name with ``*`` for the numbers of layers and experts."""
    return _INDEX.sub(".*", path)


def plan_of(model: Any) -> dict[str, str]:
    """A model's plan of tensor parallelism; empty where it divides no weight."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    return plan if any(_dimension(style) is not None for style in plan.values()) else {}


def split_of(path: str, layout: Layout, plan: Mapping[str, str]) -> Split | None:
    """The extent of a weight that ranks divide; None where each has all of it.

    A weight that the plan does not name is divided by its last name, as engines do; if there is a
    plan for others, and ranks cannot divide this one, each has all of it.
    """
    style = plan.get(pattern_of(path)) or plan.get(path)
    if style is None:
        last = path.rpartition(".")[2]
        if last not in _COLUMNS and last not in _ROWS:
            return None
        return Split(extent="n" if last in _COLUMNS else "k", is_optional=bool(plan))
    dimension = _dimension(style)
    if dimension is None:
        return None
    # A weight is kept as [n, k] in layout tn, as [k, n] in tt.
    return Split(extent="n" if (dimension == "first") == (layout is Layout.TN) else "k")


def _dimension(style: str) -> str | None:
    if style.startswith(("colwise", "packed_colwise")):
        return "first"
    return "second" if style.startswith(("rowwise", "packed_rowwise")) else None


def heads_of(path: str, size: int, config: Any) -> Heads | None:
    """The attention heads that the divided extent of a weight consists of, if it does."""
    last = path.rpartition(".")[2]
    if "attn" not in path.lower() and "attention" not in path.lower():
        return None
    if last in _KEYS_AND_VALUES:
        keys, copied = ("num_key_value_heads", "num_kv_heads", "num_attention_heads"), True
    elif last in _QUERIES:
        keys, copied = ("num_attention_heads", "n_head", "num_heads"), False
    else:
        return None
    for key in keys:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > 0 and size % count == 0:
            return Heads(key=key, count=count, copied=copied)
    return None
