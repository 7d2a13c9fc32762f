"""Reads a config's ``quantization_config`` as serving engines do: types for each GEMM."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nvgemm_runtime.gemm.types import DType, ScaleRecipe

from .gemm import ModelGemm, Part

_EXCEPTIONS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
"""Keys that list unquantized modules; each method has its own."""

_MODULES = {
    "attention": "self_attn",
    "mlp": "mlp",
    "shared experts": "mlp.shared_experts",
    "expert": "mlp.experts.0",
}
"""Layer modules that hold a role's Linears, by the role's first words."""

_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Checkpoint Linears by a fused role's last word."""

_MOST_MODULES = 4096
"""Most modules per GEMM to compare with the exceptions; no model has as many layers."""

_MOST_SECONDS = 10.0
"""Time limit for a config's exceptions: regular expressions may backtrack forever."""

_WEIGHTS_ALONE = frozenset({"awq", "gptq", "bitsandbytes", "hqq", "aqlm", "eetq", "higgs", "vptq"})
"""Methods that do not quantize activations."""


@dataclass(frozen=True, kw_only=True)
class QuantizedTypes:
    """Types for a quantized Linear's weights and activations, with their scales."""

    dtype: DType
    scales: ScaleRecipe


_TENSORS = QuantizedTypes(dtype=DType.FP8_E4M3, scales=ScaleRecipe.FP32_TENSOR)
_ROWS = QuantizedTypes(dtype=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW)
_NVFP4 = QuantizedTypes(dtype=DType.FP4_E2M1, scales=ScaleRecipe.E4M3_1X16)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Model quantization.

    Attributes:
        method: The config's ``quant_method``.
        types: Types and scales for quantized Linears, or the reason why no kernel computes them.
        exceptions: Unquantized modules: names, shell patterns, or ``re:`` with a regular
            expression.
        experts_alone: True if only routed experts are quantized.
        head: True if the head is quantized too.
    """

    method: str
    types: QuantizedTypes | str
    exceptions: tuple[str, ...] = ()
    experts_alone: bool = False
    head: bool = False

    def forms(
        self, gemm: ModelGemm, modules: Iterable[str]
    ) -> tuple[QuantizedTypes | str | None, ...]:
        """Returns a GEMM's types; None means the model's own type.

        There are two if the exceptions match some of its ``modules`` but not all.

        Raises:
            ValueError: If matching the exceptions takes too long.
        """
        if gemm.part is Part.ROUTER or (gemm.part is Part.HEAD and not self.head):
            return (None,)  # engines use the model's type here
        if self.experts_alone and gemm.routing is None:
            return (None,)
        if not self.exceptions:
            return (self.types,)
        with _time_limit(_MOST_SECONDS):
            exclusions = {
                self._excepts(name) or self._excepts(name.removeprefix("model."))
                for name in itertools.islice(modules, _MOST_MODULES)
            }
        return tuple(None if is_excluded else self.types for is_excluded in sorted(exclusions))

    def _excepts(self, name: str) -> bool:
        words = name.split(".")
        beginnings = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        for exception in self.exceptions:
            if exception.startswith("re:"):
                if re.match(exception.removeprefix("re:"), name):
                    return True
            elif "*" in exception:
                if any(fnmatchcase(beginning, exception) for beginning in beginnings):
                    return True
            elif f".{exception}." in f".{name}.":
                return True
        return False


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises ValueError in the block after a time limit; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise ValueError(
            "quantization_config: matching its exceptions with module names takes over "
            f"{seconds:g} s; allowed: faster regular expressions"
        )

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Reads a ``quantization_config``.

    Raises:
        ValueError: If a key is not understood. The message has the form ``key: found; allowed``.
    """
    method = str(config.get("quant_method", "")).lower()
    return Quantization(
        method=method or "an unnamed method",
        types=_types(method, config),
        exceptions=tuple(_exceptions(config)),
        experts_alone=method == "mxfp4",
        head=config.get("lm_head") is True,
    )


def _types(method: str, config: Mapping[str, Any]) -> QuantizedTypes | str:
    if method == "mxfp4":
        return "its weights are MXFP4 but its activations are not: no operator mixes them"
    if method in _WEIGHTS_ALONE:
        return f"{method} quantizes only weights, which engines multiply with their own kernels"
    if isinstance(config.get("config_groups"), Mapping):
        return _group_types(config["config_groups"])
    if method == "fbgemm_fp8":
        return _ROWS
    if method == "fp8":
        return _fp8_types(config)
    algorithm = str(config.get("quant_algo", "")).upper()
    if method == "modelopt" and algorithm in ("FP8", "NVFP4"):
        return _TENSORS if algorithm == "FP8" else _NVFP4
    named = f"{method} {algorithm}".strip() or "without a quant_method"
    return f"quantization_config {named} is not supported"


def _fp8_types(config: Mapping[str, Any]) -> QuantizedTypes | str:
    block = config.get("weight_block_size")
    if block is not None:
        return f"its weights are fp8 in blocks of {_short(block)}, which no operator scales"
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fmt is {_short(config['fmt'])}; only e4m3 is supported"
    if config.get("activation_scheme") != "static":
        # vLLM's Fp8LinearMethod: PER_TOKEN where its CUTLASS kernels run.
        return (
            "its weights are fp8 by tensor and its activations fp8 by token, because "
            "activation_scheme is not static (as vLLM reads it), a pair that no operator supports"
        )
    return _TENSORS


def _group_types(groups: Mapping[str, Any]) -> QuantizedTypes | str:
    """Reads compressed-tensors groups, which modelopt writes too."""
    if len(groups) != 1:
        return f"it has {len(groups)} config_groups; only one for all Linears is supported"
    (group,) = groups.values()
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if "Linear" not in (targets if isinstance(targets, list) else [targets]):
        return "its config_groups do not cover all Linears"
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return "its config_groups do not describe weights"
    if not isinstance(activations, Mapping):
        return (
            f"its weights are {_kind(weights)} and its activations are not quantized: engines "
            "multiply them with their own kernels"
        )
    for pair, types in _GROUP_TYPES.items():
        if (_form(weights), _form(activations)) == pair:
            return types
    return (
        f"its weights are {_kind(weights)} and its activations {_kind(activations)}, a pair that "
        "no operator supports"
    )


Form = tuple[object, object, object, object]


def _form(scheme: Mapping[str, Any]) -> Form:
    grouped = scheme.get("group_size") if _strategy(scheme) == "group" else None
    return scheme.get("type"), scheme.get("num_bits"), _strategy(scheme), grouped


def _strategy(scheme: Mapping[str, Any]) -> object:
    strategy = scheme.get("strategy")
    return "group" if strategy == "tensor_group" else strategy


_FP4_BLOCK: Form = ("float", 4, "group", 16)
_GROUP_TYPES: dict[tuple[Form, Form], QuantizedTypes] = {
    (("float", 8, "tensor", None), ("float", 8, "tensor", None)): _TENSORS,
    (("float", 8, "channel", None), ("float", 8, "token", None)): _ROWS,
    (_FP4_BLOCK, _FP4_BLOCK): _NVFP4,
}
"""Types by the form (type, bits, strategy, group size) of weights and activations."""


def _kind(scheme: Mapping[str, Any]) -> str:
    """Formats a short description such as ``int4 by group of 128``."""
    kind, bits, strategy, size = _form(scheme)
    grouped = f" of {_short(size)}" if size is not None else ""
    return f"{_short(kind)}{_short(bits)} by {_short(strategy)}{grouped}"


def _exceptions(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _EXCEPTIONS:
        listed = config.get(key)
        for name in () if listed is None else listed if isinstance(listed, list) else (listed,):
            if not isinstance(name, str):
                raise ValueError(f"{key}: found {_short(name)}; allowed: module names")
            if name.startswith("re:"):
                try:
                    re.compile(name.removeprefix("re:"))
                except re.error as error:
                    raise ValueError(
                        f"{key}: found {_short(name)}; allowed: a regular expression after re: "
                        f"({error})"
                    ) from None
            yield name


def modules_of_family(role: str, layers: int) -> Iterator[str]:
    """Yields a family role's full Linear names."""
    for words, module in _MODULES.items():
        if role.startswith(f"{words} "):
            last = role.removeprefix(f"{words} ")
            for layer in range(layers):
                for part in _PARTS.get(last, (last,)):
                    yield f"model.layers.{layer}.{module}.{part}"
            return
    yield role


def _short(value: object) -> str:
    return str(value)[:60]
