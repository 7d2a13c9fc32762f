"""Bundled kernels to measure, checked for exact results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.compiling import versions
from benchmarks.shared.measuring import Exact, Launch
from nvgemm_runtime import bundles
from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem, Signature
from nvgemm_runtime.launch.api import load_kernel
from nvgemm_runtime.matching.device import device_facts


def environment(**libraries: str) -> dict[str, Any]:
    """Returns GPU and versions; a measurement continues only with the same ones."""
    import torch

    found = versions()
    return {
        "gpu": found["device"],
        "driver": found["driver"],
        "torch": found["torch"],
        "CUDA": torch.version.cuda,
        **libraries,
        "nvgemm-aot": found["nvgemm-aot"],
        "bundles": found["bundles"],
    }


def plain(dtype: DType, layout: Layout) -> Signature:
    """Returns a one-type matrix product's signature, summed in fp32."""
    return Signature(op=Op.MM, layout=layout, a=dtype, b=dtype, accumulator=DType.FP32, out=dtype)


def declared(dtypes: Iterable[DType]) -> dict[Problem, list[str]]:
    """Returns every declared plain product that this GPU's bundles rank kernels for.

    Returns:
        Kernel ids by problem, best-ranked first; if several bundles rank a problem, the first
        bundle's kernels come first.
    """
    facts = device_facts("cuda", 0)
    signatures = {plain(dtype, layout) for dtype in dtypes for layout in Layout}
    found: dict[Problem, dict[str, None]] = {}
    for one in bundles():
        if one.bundle is None or one.refusal(facts) is not None:
            continue
        header = one.bundle.header
        for ranking in header.rankings_on(facts.name):
            if ranking.problem.signature in signatures:
                ids = (header.kernels[place.kernel].id for place in ranking.kernels)
                found.setdefault(ranking.problem, {}).update(dict.fromkeys(ids))
    return {problem: list(ids) for problem, ids in found.items()}


@dataclass(frozen=True, kw_only=True)
class CheckedKernels:
    """Kernels with checked results.

    Attributes:
        launches: Exact kernels' launches by id, in the ids' order.
        thrown_out: Reasons against the other kernels, by id.
    """

    launches: Mapping[str, Launch]
    thrown_out: Mapping[str, str]


def load_exact(ids: Iterable[str], exact: Exact) -> CheckedKernels:
    """Loads kernels and returns those that compute an exact product."""
    launches: dict[str, Launch] = {}
    thrown_out: dict[str, str] = {}
    for id_ in ids:
        try:
            launch: Any = load_kernel(id_).launch
            error = exact.error(launch)
            if error == 0.0:
                launches[id_] = launch
            else:
                thrown_out[id_] = f"its sums of zeros and ones are wrong: relative error {error:g}"
        except (NvgemmError, ValueError, TypeError, RuntimeError) as failure:
            thrown_out[id_] = f"{type(failure).__name__}: {failure}"
    return CheckedKernels(launches=launches, thrown_out=thrown_out)
