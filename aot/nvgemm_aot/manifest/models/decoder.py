"""Shared parts for model families: common config keys and blocks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from nvgemm_runtime.gemm.epilogues import Epilogue, Gate, WeightOrder, find_gated
from nvgemm_runtime.gemm.problem import MAX_EXTENT, Layout

from .gemm import (
    COLUMNS,
    ROWS,
    ExpertRouting,
    Fusible,
    Heads,
    ModelGemm,
    Part,
    Projection,
    Split,
    repeat,
)
from .model import Model
from .quantization import Quantization, modules_of_family, read_quantization

Size = Annotated[int, Field(ge=1, le=MAX_EXTENT)]


GATES = {
    name: find_gated(gate, WeightOrder.HALVES) for gate in Gate for name in gate.row.hidden_acts
}
"""Gates after gate_up_proj, whose weight is [gate; up], by a config's ``hidden_act``."""


QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Config keys that describe checkpoint quantization."""


def quantization_of(value: object) -> Quantization:
    """Reads the value for a key in `QUANTIZATION_KEYS`.

    Raises:
        ValueError: If the value is not understood.
    """
    if not isinstance(value, dict):
        raise ValueError(
            f"quantization_config: found {str(value)[:60]}; allowed: an object, or no such key"
        )
    try:
        return read_quantization(value)
    except ValueError as error:
        raise ValueError(f"quantization_config.{error}") from None


class DecoderConfig(BaseModel, ABC):
    """Config keys that determine GEMMs.

    Field names are config keys; a default is transformers' own.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    hidden_act: str = "silu"
    quantization: Quantization | None = Field(
        default=None, validation_alias=AliasChoices(*QUANTIZATION_KEYS)
    )

    @field_validator("quantization", mode="before")
    @classmethod
    def _read_quantization(cls, value: object) -> Quantization | None:
        return None if value is None else quantization_of(value)

    @classmethod
    def key_of(cls, field: str) -> str:
        """Returns the config key for a field; if it has several, the usual one."""
        alias = cls.model_fields[field].validation_alias
        return str(alias.choices[0] if isinstance(alias, AliasChoices) else alias or field)

    def to_model(self, model_type: str) -> Model:
        """Returns this config's model."""
        return Model(
            model_type=model_type,
            projections=tuple(self.projections()),
            modules=lambda role: modules_of_family(role, self.num_hidden_layers),
            quantization=self.quantization,
            sizes=tuple(self._sizes()),
            expert_keys=self._expert_keys(),
        )

    def _sizes(self) -> Iterator[str]:
        """Yields the sizes read from the config, with their keys."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name not in ("quantization", "hidden_act") and value is not None:
                yield f"{self.key_of(name)} {json.dumps(value)}"

    def _expert_keys(self) -> dict[int, str]:
        return {}

    @abstractmethod
    def projections(self) -> Iterator[Projection]:
        """Yields the forward pass's GEMMs, except those in attention itself and the embedding."""

    def lm_head(self) -> ModelGemm:
        """Returns the head. Tying it to the embedding does not change the GEMM."""
        return ModelGemm(
            role="lm_head", n=self.vocab_size, k=self.hidden_size, split=COLUMNS, part=Part.HEAD
        )

    def gated_mlp(
        self, intermediate: int, role: str = "mlp", *, biased: bool = False
    ) -> Iterator[Projection]:
        """Yields a feed-forward block with separate gate and up projections."""
        hidden = self.hidden_size

        def into(name: str) -> ModelGemm:
            return ModelGemm(
                role=f"{role} {name}", n=intermediate, k=hidden, split=COLUMNS, biased=biased
            )

        yield Fusible(
            role=f"{role} gate_up_proj",
            parts=(into("gate_proj"), into("up_proj")),
            gated=GATES.get(self.hidden_act),
        )
        yield ModelGemm(
            role=f"{role} down_proj", n=hidden, k=intermediate, split=ROWS, biased=biased
        )

    def equal_layers(self, *blocks: Iterable[Projection]) -> Iterator[Projection]:
        """Yields blocks that all layers share, then the head."""
        for block in blocks:
            yield from repeat(self.num_hidden_layers, block)
        yield self.lm_head()

    @property
    def query_heads(self) -> Heads:
        """Heads that queries, and latent keys and values, are projected to."""
        return Heads(key="num_attention_heads", count=self.num_attention_heads)


class GroupedQueryConfig(DecoderConfig):
    """Decoder whose query heads share key-value heads."""

    num_key_value_heads: Size | None = None
    head_dim: Size | None = None

    @model_validator(mode="after")
    def _check_heads(self) -> GroupedQueryConfig:
        if self.num_attention_heads % self._key_value_heads:
            raise ValueError(
                f"num_key_value_heads: found {self.num_key_value_heads}; allowed: "
                f"a divisor of num_attention_heads, {self.num_attention_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"head_dim: found none, and hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}; allowed: a positive integer"
            )
        return self

    @property
    def _key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def attention(self, *, biased: bool = False) -> Iterator[Projection]:
        """Yields the projections around attention; ``biased`` is True if they have biases."""
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        heads = self.query_heads
        shared = Heads(key="num_key_value_heads", count=self._key_value_heads, copied=True)

        def into(name: str, heads: Heads) -> ModelGemm:
            return ModelGemm(
                role=f"attention {name}",
                n=heads.count * head_dim,
                k=self.hidden_size,
                split=Split(extent="n", heads=heads),
                biased=biased,
            )

        parts = (into("q_proj", heads), into("k_proj", shared), into("v_proj", shared))
        yield Fusible(role="attention qkv_proj", parts=parts)
        yield ModelGemm(
            role="attention o_proj",
            n=self.hidden_size,
            k=heads.count * head_dim,
            split=Split(extent="k", heads=heads),
            biased=biased,
        )


class SparseConfig(DecoderConfig):
    """Decoder with routed experts. Each family names the key for their number."""

    experts: Size
    num_experts_per_tok: Size

    @model_validator(mode="after")
    def _check_experts(self) -> SparseConfig:
        if self.num_experts_per_tok > self.experts:
            raise ValueError(
                f"num_experts_per_tok: found {self.num_experts_per_tok}; allowed: "
                f"at most the number of experts, {self.experts}"
            )
        return self

    def _expert_keys(self) -> dict[int, str]:
        return {self.experts: self.key_of("experts")}

    def router(self, *, biased: bool = False, unserved: str = "") -> ModelGemm:
        """Returns the router Linear, which every rank computes."""
        return ModelGemm(
            role="router",
            n=self.experts,
            k=self.hidden_size,
            part=Part.ROUTER,
            biased=biased,
            unserved=unserved,
        )

    def routed_experts(
        self,
        *,
        intermediate: int,
        layout: Layout = Layout.TN,
        gated: Epilogue | None = None,
        biased: bool = False,
    ) -> Iterator[Projection]:
        """Yields the experts with joined gate and up projections, as in transformers.

        Expert biases, if any, are added by a separate operation.
        """
        routing = ExpertRouting(
            experts=self.experts, experts_per_token=self.num_experts_per_tok, biased=biased
        )
        hidden, gate = self.hidden_size, gated or GATES.get(self.hidden_act)
        into = ModelGemm(
            role="expert gate_up_proj",
            n=2 * intermediate,
            k=hidden,
            split=COLUMNS,
            gated=gate,
            has_rows_of_tokens=True,
        )
        out_of = ModelGemm(
            role="expert down_proj",
            n=hidden,
            k=intermediate,
            split=ROWS,
            gate_before=gate,
            is_summed=True,
        )
        both = [replace(gemm, routing=routing, layout=layout) for gemm in (into, out_of)]
        yield from repeat(self.experts, both)
