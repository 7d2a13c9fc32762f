"""Model description for manifests, from a family's config or a transformers run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .gemm import Projection
from .quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model GEMMs on one GPU.

    Attributes:
        model_type: The config's ``model_type``.
        projections: GEMMs; an undeclarable one has a reason.
        modules: Function that lists a role's full Linear names.
        quantization: Checkpoint quantization; None if not quantized.
        sizes: Config values that determine the GEMMs, with their keys.
        expert_keys: Config keys by number of experts.
        source: Sentence on how GEMMs were found; empty for a family.
        remarks: Mistakes and omissions to show the user.
    """

    model_type: str
    projections: tuple[Projection, ...]
    modules: Callable[[str], Iterable[str]]
    quantization: Quantization | None
    sizes: tuple[str, ...]
    expert_keys: Mapping[int, str] = field(default_factory=dict)
    source: str = ""
    remarks: tuple[str, ...] = ()
