"""Grouped products to time: experts' sizes, rows and routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvgemm_aot.providers.heuristics.group_times import ROUTINGS, routed_counts
from nvgemm_runtime.gemm.problem import Problem

if TYPE_CHECKING:
    import torch

SEED = 18


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of a layer on one GPU.

    Attributes:
        count: Expert count.
        top_k: Experts per token, among these.
        dim, hidden: Weight extents.
        is_held_back: True if estimates are judged by it instead of fitted on it.
    """

    count: int
    top_k: int
    dim: int
    hidden: int
    is_held_back: bool = False


EXPERTS = {
    "gpt-oss-20b": Experts(count=32, top_k=4, dim=2880, hidden=2880),
    "qwen3-30b-a3b": Experts(count=128, top_k=8, dim=2048, hidden=768),
    "mixtral-8x7b": Experts(count=8, top_k=2, dim=4096, hidden=14336),
    "deepseek-v3, 1 of 8": Experts(count=32, top_k=1, dim=7168, hidden=2048),
    "gpt-oss-120b": Experts(count=128, top_k=4, dim=2880, hidden=2880, is_held_back=True),
    "phi-3.5-moe": Experts(count=16, top_k=2, dim=4096, hidden=6400, is_held_back=True),
    "qwen3-235b-a22b, 1 of 4": Experts(count=32, top_k=2, dim=4096, hidden=1536, is_held_back=True),
}
"""Sizes from the models' public configs; a rank has its share of experts and rows."""

TRAINED_TOKENS = 16_384
SERVED_TOKENS = {False: (64, 2048), True: (512,)}
"""Tokens, by whether the experts are held back."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Problem with each group's rows.

    Attributes:
        experts: Name in `EXPERTS`.
        routing: Name in `ROUTINGS`.
    """

    experts: str
    problem: Problem
    routing: str

    @property
    def key(self) -> str:
        """Name in a record."""
        return f"{self.problem.key}, {self.routing}"

    @property
    def is_held_back(self) -> bool:
        """True if the experts are held back; see `Experts`."""
        return EXPERTS[self.experts].is_held_back

    def counts(self) -> list[int]:
        """Each group's rows; along k, its share."""
        return routed_counts(self.problem, self.routing)

    def offsets(self) -> torch.Tensor:
        """Group ends, int32 on the GPU."""
        import torch

        ends = torch.tensor(self.counts()).cumsum(0)
        return ends.to("cuda", torch.int32)


def cases() -> Iterator[Case]:
    """Returns all cases, in a fixed order."""
    for name, experts in EXPERTS.items():
        rows = TRAINED_TOKENS * experts.top_k
        for problem in (*_forward(experts, rows), *_backward(experts, rows)):
            for routing in ROUTINGS:
                yield Case(experts=name, problem=problem, routing=routing)
        for tokens in SERVED_TOKENS[experts.is_held_back]:
            for problem in _forward(experts, tokens * experts.top_k):
                yield Case(experts=name, problem=problem, routing="skewed")


def _forward(experts: Experts, rows: int) -> Iterator[Problem]:
    up, down = (2 * experts.hidden, experts.dim), (experts.dim, experts.hidden)
    for n, k in (up, down):
        yield _problem("grouped_mm/tn", experts, rows, n, k)


def _backward(experts: Experts, rows: int) -> Iterator[Problem]:
    up, down = (2 * experts.hidden, experts.dim), (experts.dim, experts.hidden)
    for k, n in (down, up):
        yield _problem("grouped_mm/tt", experts, rows, n, k)
    for m, n in (down, up):
        yield _problem("k_grouped_mm/nt", experts, m, n, rows)


def _problem(kind: str, experts: Experts, m: int, n: int, k: int) -> Problem:
    key = f"{kind}/bf16xbf16/fp32/bf16/g{experts.count}m{m}n{n}k{k}"
    return Problem.parse(key)
