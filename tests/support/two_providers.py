"""Two providers whose compiler processes say which of them they work for."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from compile_tasks import BF16
from fake_provider import FakeProvider, candidate
from nvgemm_aot.pipeline.compiler import Task, make_tasks
from nvgemm_aot.providers import Candidate, Enumeration, load_provider
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.gemm.problem import Signature

NOTES = "TWO_PROVIDERS_NOTES"
"""Environment variable: the file to which compiler processes write."""


class _Noting(FakeProvider):
    operators: tuple[str, ...] = ()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        return Enumeration(candidates=tuple(self.one(name, signature) for name in self.operators))

    def one(self, operator: str, signature: Signature) -> Candidate:
        tile = (64, 64, 64 * len(operator))
        plain = candidate(operator, signature, tile=tile)
        return Candidate(**{**vars(plain), "provider": self.name})

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        with Path(os.environ[NOTES]).open("a") as file:
            file.write(f"{self.name} {os.getpid()}\n")
        return super().compile(candidate, target)


class First(_Noting):
    name = "two_providers:First"
    operators = ("f", "ff")


class Second(_Noting):
    name = "two_providers:Second"
    operators = ("sss", "ssss")


BOTH = f"{First.name}+{Second.name}"


def tasks_of(provider: type[_Noting], *operators: str) -> list[Task]:
    """Tasks of one of the two."""
    candidates = [provider().one(name, BF16) for name in operators]
    return list(make_tasks(candidates, build_target("sm_100f"), load_provider(provider.name)))


def processes_by_provider(notes: Path) -> dict[str, set[str]]:
    """Which processes compiled for which provider."""
    found = defaultdict(set)
    for line in notes.read_text().splitlines():
        provider, process = line.split()
        found[provider].add(process)
    return found
