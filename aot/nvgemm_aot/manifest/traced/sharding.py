"""Divides weights for tensor parallelism: by the model's plan, else by name."""

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
        "wi", "wi_0", "wi_1", "w1", "w3", "v1", "Wi", "up_gate_proj", "linear_1", "linear_fc1",
        "query_proj", "key_proj", "value_proj", "intermediate.dense", "intermediate_dense",
        "in_proj", "dt_proj", "lm_head", "embed_out", "proj_out",
    )
)
"""Name endings for weights whose out features ranks divide, without a plan."""

_ROWS = frozenset(
    (
        "o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "wo",
        "w2", "Wo", "linear_2", "linear_fc2", "output.dense", "output_dense", "x_proj",
    )
)
"""Name endings for weights whose in features ranks divide."""

_ROWS_OF_ATTENTION = frozenset(("dense", "proj", "o"))
"""The same, within attention."""

_QUERIES = frozenset(("q_proj", "q_b_proj", "kv_b_proj", "query", "query_proj", "q"))
_KEYS_AND_VALUES = frozenset(
    ("k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "k", "v")
)
_ALL_OF_ATTENTION = frozenset(("Wqkv", "qkv_proj", "query_key_value", "c_attn", "qkv"))
"""Weights that join queries, keys and values."""
# fmt: on

_QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")

_INDEX = re.compile(r"\.\d+(?=\.|$)")


def pattern_of(path: str) -> str:
    """Replaces layer and expert numbers in a module's name with ``*``."""
    return _INDEX.sub(".*", path)


def plan_of(model: Any) -> dict[str, str]:
    """Returns a model's tensor-parallel plan; empty if it divides no weight."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    return plan if any(_dimension(style) is not None for style in plan.values()) else {}


def split_of(path: str, layout: Layout, plan: Mapping[str, str]) -> Split | None:
    """Returns the weight extent that ranks divide; None if each rank has the whole weight.

    A weight outside the plan is divided by its last name, as in engines. If the plan names others
    and ranks cannot divide this weight, each rank has the whole weight.
    """
    style = plan.get(pattern_of(path)) or plan.get(path)
    if style is None:
        parts = path.split(".")
        ends = {parts[-1], ".".join(parts[-2:])}
        if ends & _COLUMNS:
            return Split(extent="n", is_optional=bool(plan))
        if ends & _ROWS or (_is_attention(path) and parts[-1] in _ROWS_OF_ATTENTION):
            return Split(extent="k", is_optional=bool(plan))
        return None
    dimension = _dimension(style)
    if dimension is None:
        return None
    # A weight is [n, k] in layout tn, [k, n] in tt.
    return Split(extent="n" if (dimension == "first") == (layout is Layout.TN) else "k")


def _dimension(style: str) -> str | None:
    if style.startswith(("colwise", "packed_colwise")):
        return "first"
    return "second" if style.startswith(("rowwise", "packed_rowwise")) else None


def heads_of(path: str, split: Split, size: int, config: Any) -> Heads | None:
    """Returns the attention heads in a weight's divided extent, if it has heads."""
    last = path.rpartition(".")[2]
    if not _is_attention(path):
        return None
    if split.extent == "n" and last in _ALL_OF_ATTENTION:
        return _all_heads(size, config)
    if split.extent == "n" and last in _KEYS_AND_VALUES:
        counts = _counts(config, (*_KEY_HEADS, "num_attention_heads"))
        copied = True
    elif split.extent == "k" or last in _QUERIES:
        counts, copied = _counts(config, _QUERY_HEADS), False
    else:
        return None
    for key, count in counts.items():
        if size % count == 0:
            return Heads(key=key, count=count, copied=copied)
    return None


def _all_heads(size: int, config: Any) -> Heads | None:
    """Returns the heads for a joined weight; keys and values may have fewer than queries."""
    for key, count in _counts(config, _QUERY_HEADS).items():
        # Models with a single key-value head may state it only by a flag.
        for keys in (*_counts(config, _KEY_HEADS).values(), count, 1):
            if size % (count + 2 * keys) == 0:
                return Heads(key=key, count=count, keys=keys)
    return None


def _counts(config: Any, keys: tuple[str, ...]) -> dict[str, int]:
    values = {key: getattr(config, key, None) for key in keys}
    return {key: count for key, count in values.items() if isinstance(count, int) and count > 0}


def _is_attention(path: str) -> bool:
    return "attn" in path.lower() or "attention" in path.lower()
