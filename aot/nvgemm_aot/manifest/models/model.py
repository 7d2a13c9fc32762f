"""A model as manifests see it, whether a family's module read its config or transformers ran it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .gemm import Projection
from .quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class Model:
    """The GEMMs of a model on one GPU.

    Attributes:
        model_type: Its config's.
        projections: Its GEMMs; one that cannot be declared says why.
        modules: Lists the full names of the Linears that a role stands for.
        quantization: How its checkpoint is quantized; None where it is not.
        sizes: Values of the config that its GEMMs come from, each with its key.
        expert_keys: By number of experts: the config's key that holds it.
        source: How its GEMMs were found, as a sentence; empty for a family's.
        remarks: Mistakes and omissions that a user must see.
    """

    model_type: str
    projections: tuple[Projection, ...]
    modules: Callable[[str], Iterable[str]]
    quantization: Quantization | None
    sizes: tuple[str, ...]
    expert_keys: Mapping[int, str] = field(default_factory=dict)
    source: str = ""
    remarks: tuple[str, ...] = ()
