"""Reads any model's GEMMs: builds it, runs it twice under fake tensors, and names them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import MAX_EXTENT

from ..models.decoder import GATES
from ..models.gemm import (
    TOKENS,
    ExpertRouting,
    Fusible,
    ModelGemm,
    Part,
    Projection,
    Rows,
    Split,
    repeat,
)
from ..models.model import Model
from ..models.quantization import Quantization
from .building import HOW_ELSE, BuiltModel, build_model, make_fake, quietly
from .known_values import KnownValues
from .passes import FailedPass, PassSizes, longest_sequence, run_passes
from .sharding import heads_of, pattern_of, plan_of, split_of
from .weight_products import WeightProduct

_LENGTH = 16
"""Tokens per sequence in the first run; the second has twice as many, and twice the inputs."""


def read_model(
    path: Path, data: Mapping[str, Any], version: str, quantization: Quantization | None
) -> Model:
    """Finds a config.json model's GEMMs.

    Raises:
        ManifestError: If transformers cannot build it, or no part of it can run.
    """
    built = build_model(path, data, version)
    values = KnownValues()
    names = make_fake(built.module, values.mode)
    length = max(1, min(_LENGTH, longest_sequence(built.module) // 2))
    first, second = PassSizes(inputs=1, length=length), PassSizes(inputs=2, length=2 * length)
    with _without_log(), quietly():
        products, failed = run_passes(built.module, values, names, first)
        repeated, failed_again = run_passes(built.module, values, names, second)
    failed_parts = {failure.part for failure in failed}
    failed += [failure for failure in failed_again if failure.part not in failed_parts]
    if not products:
        reasons = (
            "; ".join(f"{failure.part}: {failure.reason}" for failure in failed)
            or "it multiplies nothing"
        )
        raise ManifestError(
            f"{path}: transformers {version} cannot run its {built.class_name} without weights: "
            f"{reasons}; {HOW_ELSE}"
        )
    uses = list(_uses(products, repeated, first, second))
    reader = _ProjectionReader(built=built, shapes={names[t]: tuple(t.shape) for t in names})
    projections = [*reader.projections(uses), *reader.unreached(uses, failed)]
    return Model(
        model_type=built.config.model_type,
        projections=tuple(_merge(projections)),
        modules=reader.modules_of,
        quantization=quantization,
        sizes=tuple(_sizes(data)),
        expert_keys=dict(_expert_keys(built.config)),
        source=_source_sentence(built),
        remarks=tuple(f"{failure.part} could not run: {failure.reason}" for failure in failed),
    )


@dataclass(frozen=True, kw_only=True)
class _Use:
    """Weight product with its row rule; ``path`` is the weight's name without ``.weight``."""

    path: str
    product: WeightProduct
    rows: Rows
    unserved: str = ""


def _uses(
    products: Sequence[WeightProduct],
    repeated: Sequence[WeightProduct],
    first: PassSizes,
    second: PassSizes,
) -> Iterator[_Use]:
    """Compares two runs to find how rows depend on tokens and inputs."""
    later = defaultdict(list)
    for product in repeated:
        later[product.weight].append(product.rows)
    earlier = Counter(product.weight for product in products)
    calls_read: Counter[str] = Counter()
    for product in products:
        weight = product.weight
        calls, calls_again = earlier[weight], len(later[weight])
        unserved, rows = _unserved_reason(product), TOKENS
        if calls == calls_again:
            rows = _fit_rows(product.rows, later[weight][calls_read[weight]], first, second)
            calls_read[weight] += 1
        else:
            unserved = (
                f"it is called {calls} times for {first.length} tokens and {calls_again} times for "
                f"{second.inputs * second.length}"
            )
        path = weight.removesuffix(".weight")
        yield _Use(path=path, product=product, rows=rows, unserved=unserved)


def _unserved_reason(product: WeightProduct) -> str:
    if product.is_turned:
        return "its weight is the first factor"
    if product.dtype is not torch.bfloat16:
        known = {torch.float32: "fp32", torch.float16: "fp16"}
        return f"it is computed in {known.get(product.dtype, product.dtype)}"
    return ""


def _fit_rows(rows: int, rows_again: int, first: PassSizes, second: PassSizes) -> Rows:
    """Solves ``a * tokens + b * inputs``; rows that do not grow are fixed."""
    if rows_again == rows:
        return Rows(per_token=Fraction(0), fixed=rows)
    tokens, inputs = first.inputs * first.length, first.inputs
    tokens_again, inputs_again = second.inputs * second.length, second.inputs
    determinant = tokens * inputs_again - tokens_again * inputs
    per_token = Fraction(rows * inputs_again - rows_again * inputs, determinant)
    per_input = Fraction(tokens * rows_again - tokens_again * rows, determinant)
    if per_input.denominator != 1 or per_token < 0:
        return Rows(per_token=Fraction(rows_again, tokens_again))
    return Rows(per_token=per_token, per_input=int(per_input))


_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<index>\d+)\.(?P<rest>.+)")
"""Name pattern for a Linear in an expert module."""

_FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("qkv_proj", ("q", "k", "v")),
    ("kv_proj", ("k_proj", "v_proj")),
    ("qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("gate_up_proj", ("wi_0", "wi_1")),
)
"""Weights with one input that serving engines join, with the joined name."""

_ROUTERS = frozenset({"gate", "router", "wg"})


class _ProjectionReader:
    """Converts a model's products into projections."""

    def __init__(self, *, built: BuiltModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._config = built.config
        self._modules = dict(built.module.named_modules())
        self._shapes = shapes
        self._plan = plan_of(built.module)
        head = built.module.get_output_embeddings()
        self._head = next((name for name, module in self._modules.items() if module is head), None)
        self._linears = [
            name for name, module in self._modules.items() if isinstance(module, torch.nn.Linear)
        ]
        self._experts = Counter(
            _expert_path(name) for name in self._linears if _EXPERT.fullmatch(name)
        )
        self._paths: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def modules_of(self, role: str) -> Iterable[str]:
        """Returns the full names of a role's modules."""
        return self._paths.get(role, (role,))

    def projections(self, uses: Iterable[_Use]) -> Iterator[Projection]:
        """Yields a projection per call, and one for all experts in a layer; joins fusible ones."""
        by_parent: defaultdict[str, list[tuple[str, ModelGemm]]] = defaultdict(list)
        for path, gemm in self._gemms(uses):
            parent, _, last = path.rpartition(".")
            by_parent[parent].append((last, gemm))
        for parent, gemms in by_parent.items():
            yield from self._fuse(parent, gemms)

    def _gemms(self, uses: Iterable[_Use]) -> Iterator[tuple[str, ModelGemm]]:
        """Yields plain GEMMs as called, and a layer's experts as one GEMM."""
        uses = list(uses)
        multiplied = Counter[str]()
        for use in uses:
            multiplied[use.path] += use.product.n * use.product.k
        routed: defaultdict[tuple[str, int, int], list[_Use]] = defaultdict(list)
        for use in uses:
            product = use.product
            shape = self._shapes[product.weight]
            size = product.n * product.k
            is_stack = len(shape) == 3 and product.batch == 1
            is_sliced = "experts" in use.path.split(".") and (
                size < multiplied[use.path] == math.prod(shape)
            )
            if _EXPERT.fullmatch(use.path):
                routed[_expert_path(use.path), product.n, product.k].append(use)
            elif is_stack or is_sliced:
                routed[use.path, product.n, product.k].append(use)
            else:
                yield use.path, self._plain(use)
        for (path, _, _), calls in routed.items():
            yield path, self._routed(path, calls)

    def _plain(self, use: _Use) -> ModelGemm:
        product = use.product
        split = self._split(use.path, product)
        last = use.path.rpartition(".")[2]
        module = self._modules.get(use.path)
        config = self._config_at(use.path)
        biased = product.biased or getattr(module, "bias", None) is not None
        return ModelGemm(
            role=self._role(use.path),
            n=product.n,
            k=product.k,
            rows=use.rows,
            batch=product.batch,
            part=self._part(use.path, product.n),
            split=split,
            layout=product.layout,
            biased=biased,
            gated=_gate_of(config) if last == "gate_up_proj" and product.batch == 1 else None,
            unserved=use.unserved,
        )

    def _routed(self, path: str, calls: Sequence[_Use]) -> ModelGemm:
        """Builds one grouped GEMM for all experts in a layer."""
        use = calls[0]
        product = use.product
        per_token = sum(call.rows.per_token for call in calls)
        experts = product.experts or self._experts.get(path)
        if not experts:
            experts = math.prod(self._shapes[product.weight]) // (product.n * product.k)
        unserved = use.unserved
        if per_token.denominator != 1 or per_token < 1 or use.rows.per_input:
            unserved = unserved or "its experts' rows are not a multiple of the tokens"
            per_token = Fraction(1)
        module = self._modules.get(path.rpartition(".")[0])
        last = path.rpartition(".")[2]
        gate = _experts_gate(module, self._config_at(path))
        is_up, is_down = last == "gate_up_proj", last == "down_proj"
        return ModelGemm(
            role=self._role(path),
            n=product.n,
            k=product.k,
            split=self._split(path, product),
            calls=experts,
            routing=ExpertRouting(
                experts=experts,
                experts_per_token=int(per_token),
                biased=bool(getattr(module, "has_bias", False)),
            ),
            layout=product.layout,
            gated=gate if is_up else None,
            gate_before=gate if is_down else None,
            has_rows_of_tokens=is_up,
            is_summed=is_down,
            unserved=unserved,
        )

    def _split(self, path: str, product: WeightProduct) -> Split | None:
        split = split_of(path, product.layout, self._plan)
        if split is None:
            return None
        size = product.n if split.extent == "n" else product.k
        return replace(split, heads=heads_of(path, split, size, self._config_at(path)))

    def _part(self, path: str, n: int) -> Part:
        if path == self._head:
            return Part.HEAD
        is_router = path.rpartition(".")[2] in _ROUTERS and n in _expert_keys(self._config_at(path))
        return Part.ROUTER if is_router else Part.LAYER

    def _role(self, path: str) -> str:
        role = pattern_of(path)
        self._paths[role][path] = None
        return role

    def _config_at(self, path: str) -> Any:
        """Returns the config from the innermost module around a weight that has one."""
        parts = path.split(".")
        for count in range(len(parts), -1, -1):
            module = self._modules.get(".".join(parts[:count]))
            if (config := getattr(module, "config", None)) is not None:
                return config
        return self._config

    def _fuse(self, parent: str, gemms: Sequence[tuple[str, ModelGemm]]) -> Iterator[Projection]:
        unfused = dict(gemms)
        if len(unfused) < len(gemms):  # a weight is used twice, which no engine fuses
            yield from (gemm for _, gemm in gemms)
            return
        for name, parts in _FUSED:
            fusible = [unfused[part] for part in parts if part in unfused]
            if len(fusible) < len(parts) or not _can_be_fused(fusible):
                continue
            role = self._role(f"{parent}.{name}" if parent else name)
            self._paths[role].pop(f"{parent}.{name}", None)
            self._paths[role].update((f"{parent}.{part}", None) for part in parts)
            is_gate = name == "gate_up_proj"
            yield Fusible(
                role=role,
                parts=tuple(fusible),
                gated=_gate_of(self._config_at(parent)) if is_gate else None,
            )
            for part in parts:
                del unfused[part]
        yield from unfused.values()

    def unreached(self, uses: Iterable[_Use], failed: Sequence[FailedPass]) -> Iterator[ModelGemm]:
        """Yields Linears that no run reached."""
        reached = {use.path for use in uses}
        reached |= {_expert_path(path) for path in reached}
        reason = "no run of the model reaches it"
        if failed:
            reason = f"no run of the model reaches it, because {failed[0].part} could not run"
        for name in self._linears:
            if name not in reached and _expert_path(name) not in reached:
                weight = self._modules[name].weight
                n, k = map(int, weight.shape)
                yield ModelGemm(role=self._role(name), n=n, k=k, unserved=reason)


def _expert_path(path: str) -> str:
    """Returns an expert Linear's path without the expert's index; other paths unchanged."""
    match = _EXPERT.fullmatch(path)
    return f"{match['experts']}.*.{match['rest']}" if match else path


def _can_be_fused(gemms: Sequence[ModelGemm]) -> bool:
    kinds = {
        (gemm.k, gemm.rows, gemm.layout, gemm.batch, gemm.routing, bool(gemm.unserved))
        for gemm in gemms
    }
    return len(kinds) == 1 and gemms[0].routing is None and gemms[0].batch == 1


def _gate_of(config: Any) -> Epilogue | None:
    keys = ("hidden_act", "hidden_activation", "activation_function")
    values = (getattr(config, key, None) for key in keys)
    return next((GATES.get(value) for value in values if isinstance(value, str)), None)


def _experts_gate(module: Any, config: Any) -> Epilogue | None:
    """Returns the gate for experts whose module stores [gate; up] and applies the usual product."""
    apply_gate = getattr(type(module), "_apply_gate", None)
    is_usual = getattr(apply_gate, "__name__", "") == "_default_apply_gate"
    if not is_usual or not module.has_gate or not module.is_concatenated:
        return None
    return _gate_of(config)


def _merge(projections: Iterable[Projection]) -> Iterator[Projection]:
    """Merges equal projections and adds up their calls."""
    for projection, count in Counter(projections).items():
        yield from repeat(count, [projection])


def _expert_keys(config: Any) -> dict[int, str]:
    configs = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = ((getattr(inner, key, None), key) for inner in configs for key in keys)
    return {count: key for count, key in counts if isinstance(count, int)}


_SIZE = re.compile(
    r"(vocab|hidden|intermediate|moe_intermediate|shared_expert_intermediate|image|patch)_size|"
    r"num_(hidden_layers|attention_heads|key_value_heads|experts|local_experts|experts_per_tok)|"
    r"head_dim|[a-z]+_lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|n_routed_experts|"
    r"d_model|encoder_layers|decoder_layers|(encoder|decoder)_ffn_dim|n_embd|n_layer"
)
_MOST_SIZES = 24


def _sizes(data: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sizes in a config and its nested configs."""
    sizes = (
        f"{key} {value}"
        for key, value in _flat(data)
        if type(value) is int
        and abs(value) <= MAX_EXTENT
        and _SIZE.fullmatch(key.rpartition(".")[2])
    )
    return itertools.islice(sizes, _MOST_SIZES)


def _flat(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and re.fullmatch(r"[a-z_]+_config", key):
            yield from ((f"{key}.{inner}", nested) for inner, nested in value.items())
        else:
            yield key, value


def _source_sentence(built: BuiltModel) -> str:
    return (
        f"Products of activations with weights in {built.class_name} (transformers "
        f"{built.transformers}), run under fake tensors; names are its modules', * is a number."
    )


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Suppresses torch's log for operators that fail on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
