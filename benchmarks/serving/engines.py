"""Serving engines, behind one interface."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from benchmarks.serving.workload import Workload

if TYPE_CHECKING:
    import torch

Tokens = list[list[int]]
"""Token ids of several sequences."""


class Engine(Protocol):
    """A started engine with the workload's model."""

    def generate(self, prompts: Tokens, count: int) -> Tokens:
        """Generates so many tokens for each prompt, the most probable ones."""
        ...

    def log_probabilities(self, prompts: Tokens, count: int) -> tuple[Tokens, list[list[float]]]:
        """Generates, and returns tokens with their log probabilities."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """Returns a weight by its name in vLLM, without ``model.``."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine that can be measured.

    Attributes:
        package: Package that must be installed.
        modules: Modules that it imports at its start, with commas between.
        start: Starts it in this process.
    """

    package: str
    modules: str
    start: Callable[[Workload, Path], Engine]

    def require_installed(self) -> None:
        """Raises if the engine is not installed."""
        if importlib.util.find_spec(self.package) is None:
            raise click.ClickException(
                f"{self.package} is not installed here: install it beside nvgemm-aot and the "
                "kernel wheel, or choose another --engine"
            )

    @property
    def version(self) -> str:
        """The package's version."""
        return importlib.metadata.version(self.package)


def _start_vllm(workload: Workload, directory: Path) -> Engine:
    from benchmarks.serving.vllm_engine import VllmEngine

    return VllmEngine(workload, directory)


def _start_transformers(workload: Workload, directory: Path) -> Engine:
    from benchmarks.serving.transformers_engine import TransformersEngine

    return TransformersEngine(workload, directory)


ENGINES = {
    "vllm": EngineKind(
        package="vllm",
        modules="vllm.entrypoints.llm, vllm.v1.engine.llm_engine, vllm.v1.worker.gpu_worker",
        start=_start_vllm,
    ),
    "transformers": EngineKind(
        package="transformers",
        modules="transformers.generation.utils, transformers.models.llama.modeling_llama",
        start=_start_transformers,
    ),
}
"""Engines by name."""


def environment(directory: Path, workload: Workload) -> dict[str, str | None]:
    """Returns variables under which any engine keeps to a directory and to this process.

    Args:
        directory: Cache directory.
        workload: What the process measures.
    """
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # kernels are profiled, and weights read, in it
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles kernels at its first use
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TORCHINDUCTOR_DETERMINISTIC": "1" if workload.is_deterministic else None,
        "NVGEMM_AOT_FUSE": "1" if workload.is_fusing else None,
    }


def sequences(prompts: Sequence[list[int]], generated: Sequence[list[int]]) -> Tokens:
    """Joins prompts with what was generated for them."""
    return [[*prompt, *more] for prompt, more in zip(prompts, generated, strict=True)]
