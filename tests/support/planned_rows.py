"""Every row of the support table and every shipped manifest, with bundles of what is planned.

Plans are the builder's own, by ``build --dry-run``. Planning all is minutes of work, so the real
provider is asked once for each kind (operation, types, scales, epilogue) and layout, with one
problem of it, and what it offers stands for every other result type and size. Bundles have those
kernels' facts around payloads that are no kernels, ranked for the problems of the manifest, of
which the largest have hundreds of sizes: some of those stand for all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline.pipeline import plan_build
from nvgemm_aot.pipeline.target_plan import Plan
from nvgemm_aot.providers import Enumeration
from nvgemm_aot.providers.cutlass_operators import CutlassOperators
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.ranking_entries import RankingSource
from nvgemm_runtime.errors import NoCandidateError
from nvgemm_runtime.gemm.problem import Layout, Problem, Signature
from nvgemm_runtime.recording.text import gemm_line
from repository import TESTS
from synthetic_content import synthetic_content

ROWS = {
    name: TESTS / f"gpu/{name}.yaml"
    for name in ("every_kind", "hopper_rows", "every_row_sm100", "int8_sm100", "gated", "grouped")
}
SHIPPED = {path.stem: path for path in sorted((TESTS.parent / "manifests").glob("*.yaml"))}
MANIFESTS = {**ROWS, **SHIPPED}

_MOST = 150

ELSEWHERE = {"every_row_sm100": "sm_90a", "int8_sm100": "sm_100f"}
"""Targets that lack some of the rows of a manifest, or all."""

PLAIN = tuple(
    Problem(signature=Signature.parse(key), m=16, n=64, k=64)
    for key in ("mm/tn/bf16xbf16/fp32/bf16", "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16")
)
"""What a bundle of plain kernels declares, whatever is asked for."""


@functools.cache
def manifest_of(name: str) -> Manifest:
    return load_manifest(MANIFESTS[name])


@functools.cache
def _problems(name: str) -> tuple[Problem, ...]:
    """What a manifest declares: of hundreds of sizes, about `_MOST`, and one of each kind."""
    problems = [declared.problem for declared in manifest_of(name).declared]
    some = problems[:: max(1, len(problems) // _MOST)]
    return tuple(sorted({*some, *representatives(problems)}))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A manifest on one of the targets that it is, or could be, built for."""

    name: str
    arch: str

    @property
    def id(self) -> str:
        return f"{self.name}-{self.arch}"

    @property
    def target(self) -> BuildTarget:
        return build_target(self.arch)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return _problems(self.name)

    def manifest_text(self, problems: Iterable[Problem]) -> str:
        """A manifest of some problems, for the same providers."""
        text = manifest_text(problems, self.arch)
        names = ", ".join(manifest_of(self.name).providers)
        return text + (f"providers: [{names}]\n" if names else "")


def kind(one: Signature) -> tuple[object, ...]:
    """What plans are made once for."""
    is_plain = one.scales is None and one.epilogue is None
    return one.op, one.a, one.b, one.scales, one.epilogue, one.layout if is_plain else Layout.TN


def is_plain(one: Signature) -> bool:
    return one.scales is None and one.epilogue is None and not one.op.has_groups


def representatives(problems: Iterable[Problem]) -> list[Problem]:
    """One problem of each kind: of the usual result and layout where there is one, and small."""
    chosen: dict[tuple[object, ...], Problem] = {}
    for problem in sorted(
        problems,
        key=lambda one: (
            one.signature.layout is not Layout.TN,
            one.signature.out is not one.signature.a.usual_out,
            one.flops,
        ),
    ):
        chosen.setdefault(kind(problem.signature), problem)
    return list(chosen.values())


def _list_cases() -> Iterator[Case]:
    """Every row, the quickstart, and shipped manifests with kinds of problems that none had."""
    seen: set[tuple[object, ...]] = set()
    for name in dict.fromkeys((*ROWS, "quickstart", *SHIPPED)):
        for arch in (
            *(target.arch for target in manifest_of(name).bundle_targets),
            *((ELSEWHERE[name],) if name in ELSEWHERE else ()),
        ):
            case = Case(name=name, arch=arch)
            kinds = {(arch, *kind(problem.signature)) for problem in case.problems}
            if name in (*ROWS, "quickstart") or not kinds <= seen:
                yield case
            seen |= kinds


CASES = list(_list_cases())

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """What the builder plans for a case.

    Attributes:
        manifest: What `Case.problems` has, as a file.
        document: What ``build --dry-run --json`` prints.
        plan: The same as the builder has it.
        right: The bundle of all kernels; None where the target serves nothing.
        plain: A bundle of the kernels with neither scales, groups nor epilogue.
    """

    case: Case
    manifest: Path
    document: dict[str, Any]
    plan: Plan
    right: Path | None
    plain: Path


class Planner:
    """Plans cases, each once, and the kernels of a signature once for all of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cache = directory / "cache"
        self._planned: dict[Case, Planned] = {}
        self._enumerated: dict[tuple[Signature, str], Enumeration] = {}

    def plan(self, case: Case) -> Planned:
        if case not in self._planned:
            self._planned[case] = self._plan(case)
        return self._planned[case]

    def _plan(self, case: Case) -> Planned:
        path = self._directory / f"{case.id}.yaml"
        path.write_text(case.manifest_text(representatives(case.problems)))
        command = ["build", str(path), "--dry-run", "--json", "--cache-dir", str(self._cache)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CutlassOperators, "enumerate", self._enumerating())
            result = CliRunner().invoke(main, command)
            [planned] = plan_build(load_manifest(path), Cache(self._cache))
        assert result.exit_code in (0, NoCandidateError.exit_code), result.output
        right = _right(case, planned.plan)
        manifest = self._directory / f"{case.id}-all.yaml"
        manifest.write_text(case.manifest_text(case.problems))
        return Planned(
            case=case,
            manifest=manifest,
            document=json.loads(result.stdout),
            plan=planned.plan,
            right=None if right is None else self._write(f"{case.id}-right", right),
            plain=self._write(f"{case.id}-plain", _plain(case, right)),
        )

    def _enumerating(self) -> Any:
        enumerate_really = CutlassOperators.enumerate

        def enumerate_once(
            provider: CutlassOperators, signature: Signature, target: BuildTarget
        ) -> Enumeration:
            key = signature, target.target.arch
            if key not in self._enumerated:
                self._enumerated[key] = enumerate_really(provider, signature, target)
            return self._enumerated[key]

        return enumerate_once

    def _write(self, stem: str, content: BundleContent) -> Path:
        path = self._directory / f"{stem}.nvgemm"
        write_bundle(path, content)
        return path


def manifest_text(problems: Iterable[Problem], arch: str, name: str = "written") -> str:
    lines = [gemm_line(problem) for problem in problems]
    target = "{arch: sm_90a, device: H200}" if arch == "sm_90a" else arch  # one product each
    return "\n".join(["version: 1", f"name: {name}", f"targets: [{target}]", "gemms:", *lines, ""])


def _right(case: Case, plan: Plan) -> BundleContent | None:
    """A bundle of a plan's kernels, for all sizes of a manifest; None where there are none."""
    planned = {
        kind(one.problem.signature): plan.candidates[one.choices[0][0]] for one in plan.problems
    }
    reasons = {kind(problem.signature): reason for problem, reason in plan.unserved}
    served = [problem for problem in case.problems if kind(problem.signature) in planned]
    kernels = {}
    for signature in {problem.signature for problem in served}:
        candidate = planned[kind(signature)]
        kernels[signature] = BuiltKernel(
            payload=f"{case.arch} {signature.key}".encode(),
            signature=signature,
            provider=candidate.provider,
            operator=candidate.operator,
            design=candidate.design,
            alignment_bytes=candidate.alignment_bytes,
            workspace_bytes=candidate.workspace_bytes,
            workspace=candidate.workspace,
            is_deterministic=candidate.is_deterministic,
            calling_convention=candidate.calling_convention,
        )
    unserved = {
        problem: reasons[kind(problem.signature)]
        for problem in case.problems
        if kind(problem.signature) not in planned
    }
    return _content(case, kernels, served, unserved) if kernels else None


def _plain(case: Case, right: BundleContent | None) -> BundleContent:
    """What of a bundle is plain, beside `PLAIN`."""
    kernels = {}
    for problem in PLAIN:
        [kernel] = synthetic_content(kernels=1, problems=0).kernels
        payload = f"{case.arch} {problem.signature.key}".encode()
        kernels[problem.signature] = replace(kernel, payload=payload, signature=problem.signature)
    for kernel in () if right is None else right.kernels:
        if is_plain(kernel.signature):
            kernels[kernel.signature] = kernel
    problems = [problem for problem in case.problems if problem.signature in kernels]
    return _content(case, kernels, [*problems, *PLAIN], {})


def _content(
    case: Case,
    kernels: dict[Signature, BuiltKernel],
    problems: Iterable[Problem],
    unserved: dict[Problem, str],
) -> BundleContent:
    source = RankingSource(kind="estimate", by="test 1.0", gpu=case.target.device.driver_name)
    return BundleContent(
        target=case.target.target,
        device=case.target.device.name,
        generator="test",
        build_key=sha256_hex(case.id.encode()),
        toolchain={"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"},
        kernels=tuple(kernels.values()),
        rankings=tuple(
            ProblemRanking(
                problem=problem, source=source, kernels=((kernels[problem.signature].id, 1000),)
            )
            for problem in dict.fromkeys(problems)
        ),
        unserved=unserved,
    )
