"""A recording, and bundles that declare, know, or lack its GEMMs: each status, by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.roles import roles
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.matching.matches import BundleView
from synthetic_content import SIGNATURE, synthetic_content

FP16 = Signature.parse("mm/tn/fp16xfp16/fp32/fp16")
LIBRARY = "nvidia-cutlass-dsl-libs-cu13"


def problem(m: int, n: int = 64, k: int = 64, signature: Signature = SIGNATURE) -> Problem:
    return Problem(signature=signature, m=m, n=n, k=k)


DECLARED, OTHER_SIZE, OTHER_TYPE = problem(16), problem(32), problem(16, signature=FP16)
"""What `content` declares, what it serves by signature, and what it does not serve."""


def recording(
    counts: Iterable[tuple[Problem, int]], *archs: str, description: str = ""
) -> Manifest:
    return Manifest(
        name="recorded",
        description=description,
        targets=tuple(build_target(arch) for arch in archs or ("sm_100f",)),
        declared=tuple(
            Declared(problem=asked, candidates=4, count=count) for asked, count in counts
        ),
    )


RECORDING = recording([(DECLARED, 3), (OTHER_SIZE, 1), (OTHER_TYPE, 4)])
"""With u = the FLOPs of m = 16: declared 3 u, by signature 2 u, missed 4 u."""

RECORDING_TEXT = """
version: 1
name: recorded
targets: [sm_100f]
gemms:
  - {dtype: bf16, mnk: [[16, 64, 64]], count: 3}
  - {dtype: bf16, mnk: [[32, 64, 64]]}
  - {dtype: fp16, mnk: [[16, 64, 64]], count: 4}
"""
"""`RECORDING` as a file."""


def content(
    *declared: Problem, arch: str = "sm_100f", library: str | None = "4.8.1", alignment: int = 16
) -> BundleContent:
    """A bundle of one kernel a signature, ranked for some problems: `DECLARED` by default."""
    problems = declared or (DECLARED,)
    signatures = sorted({one.signature for one in problems})
    base = synthetic_content(kernels=len(signatures), problems=1)
    kernels = {
        signature: replace(
            kernel,
            signature=signature,
            alignment_bytes=alignment,
            calling_convention=_convention(signature),
        )
        for signature, kernel in zip(signatures, base.kernels)
    }
    return replace(
        base,
        target=Target(arch=arch),
        kernels=tuple(kernels.values()),
        toolchain={"dsl": "4.8.1"} | ({LIBRARY: library} if library else {}),
        rankings=tuple(
            ProblemRanking(
                problem=one,
                source=base.rankings[0].source,
                kernels=((sha256_hex(kernels[one.signature].payload), 1000),),
            )
            for one in problems
        ),
    )


def _convention(signature: Signature) -> str:
    return f"tvm_ffi:gemm({','.join(role.value for role in roles(signature))},stream)"


def view(built: BundleContent, name: str = "a bundle") -> BundleView:
    return BundleView(name=name, header=encode_bundle(built)[1])


def write(path: Path, built: BundleContent) -> Path:
    write_bundle(path, built)
    return path
