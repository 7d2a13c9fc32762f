"""Models to serve, with random weights, and the requests that are measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TOKEN_SPAN = 500
"""Prompts use so many token ids, from 2 on: 0 and 1 begin and end texts."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Decoder sizes, as a config.json gives them.

    Attributes:
        family: ``model_type``.
        architecture: Class in transformers and vLLM.
        has_head_norms: True if queries and keys are normalized by head.
    """

    family: str
    architecture: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    layers: int
    theta: float
    epsilon: float
    positions: int
    has_head_norms: bool = False

    def config(self, layers: int) -> dict[str, Any]:
        """Returns config.json's content."""
        return {
            "architectures": [self.architecture],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "num_hidden_layers": layers,
            "rope_theta": self.theta,
            "rms_norm_eps": self.epsilon,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


MODELS = {
    "llama-3.1-8b": Model(
        family="llama", architecture="LlamaForCausalLM", hidden=4096, intermediate=14336,
        heads=32, kv_heads=8, head=128, vocabulary=128256, layers=32, theta=500000.0, epsilon=1e-5,
        positions=131072,
    ),
    "qwen3-8b": Model(
        family="qwen3", architecture="Qwen3ForCausalLM", hidden=4096, intermediate=12288,
        heads=32, kv_heads=8, head=128, vocabulary=151936, layers=36, theta=1000000.0, epsilon=1e-6,
        positions=40960, has_head_norms=True,
    ),
    "tiny": Model(
        family="qwen3", architecture="Qwen3ForCausalLM", hidden=64, intermediate=128,
        heads=4, kv_heads=2, head=16, vocabulary=512, layers=2, theta=10000.0, epsilon=1e-6,
        positions=16384, has_head_norms=True,
    ),
}  # fmt: skip
"""Models by name. Sources: config.json of meta-llama/Llama-3.1-8B, whose scaling of positions is
left out, and of Qwen/Qwen3-8B. ``tiny`` tries the benchmark out."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every process measures.

    Attributes:
        engine: Key in `benchmarks.serving.engines.ENGINES`.
        model: Key in `MODELS`.
        layers: Decoder layers.
        batches: Sequences that decode.
        prefills: Prompt lengths to prefill.
        prompt: Tokens of a prompt before it decodes.
        tokens: Tokens that each sequence decodes.
        repeats: Timings of each size.
        is_deterministic: True if TORCHINDUCTOR_DETERMINISTIC is set.
        is_fusing: True if NVGEMM_AOT_FUSE is set.
    """

    engine: str
    model: str
    layers: int
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    prompt: int = 32
    tokens: int = 128
    repeats: int = 3
    is_deterministic: bool = False
    is_fusing: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the fields."""
        return {**asdict(self), "batches": list(self.batches), "prefills": list(self.prefills)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Workload:
        """Reads `to_json`'s fields."""
        tuples = {name: tuple(fields[name]) for name in ("batches", "prefills")}
        return cls(**{**fields, **tuples})

    @property
    def title(self) -> str:
        """Engine, model, layers, and settings that are not the default."""
        settings = (
            (self.is_fusing, "gates fused"),
            (self.is_deterministic, "deterministic"),
        )
        names = (name for is_set, name in settings if is_set)
        return ", ".join([f"{self.engine}/{self.model}", f"{self.layers} layers", *names])

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, with some to spare."""
        return max(self.prompt + self.tokens, *self.prefills, 1) + 64

    @property
    def cache_bytes(self) -> int:
        """Bytes for the keys and values of all sequences, in whole GiB.

        The same in every process, so that memory can be compared.
        """
        model = MODELS[self.model]
        of_token = 2 * model.kv_heads * model.head * 2 * self.layers
        most = max(self.longest, max(self.batches, default=1) * (self.prompt + self.tokens + 64))
        return math.ceil(1.1 * most * of_token / 2**30) * 2**30

    def write_config(self, directory: Path) -> Path:
        """Writes the model's config.json and returns its directory."""
        directory.mkdir(parents=True, exist_ok=True)
        config = MODELS[self.model].config(self.layers)
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
        return directory


def prompts(count: int, length: int) -> list[list[int]]:
    """Returns different prompts of a length, as token ids."""
    return [
        [(7 * number + 13 * place) % TOKEN_SPAN + 2 for place in range(length)]
        for number in range(count)
    ]


def fill(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gives a model the random weights that it has in every process of its engine."""
    import torch

    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(parameters, key=lambda pair: pair[0])):
            if "norm" in name:
                weight.fill_(1.0)
                continue
            generator = torch.Generator(device=weight.device).manual_seed(number)
            weight.normal_(0.0, 0.02, generator=generator)
