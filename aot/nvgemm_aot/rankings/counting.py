"""Counts the problems in a bundle for which torch.compile uses measured kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import Ranking
from nvgemm_runtime.launch.dispatch_table import default_evidence
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.thresholds import MIN_GAIN, gains_enough


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Measured problems on one GPU product, by the treatment they get from torch.compile.

    Attributes:
        gpu, torch, cuda: The product, and the measured ATen's versions.
        measured: Number of measured problems.
        confirmed, repeated: Problems for which default mode uses a kernel, as confirmed by two GPUs
            or repeated on one.
        with_setting: Problems for which default mode uses a kernel if repeated rankings count like
            confirmed ones.
        if_fused: Gated products for which default mode uses a kernel if the user allows fusing and
            no kernel for the product alone is faster.
        aten: Problems that ATen computes everywhere, because no kernel gains enough.
        beyond_default: Problems that default mode leaves alone: fused activations, gates without a
            time for the separate operations, and gathered rows.
        competing: Problems whose kernels compete under max-autotune.
        doubtful: Problems in doubt, which are timed again wherever their kernels compete.
    """

    gpu: str
    torch: str
    cuda: str
    measured: int
    confirmed: int
    repeated: int
    with_setting: int
    if_fused: int
    aten: int
    beyond_default: int
    competing: int
    doubtful: int


def count_by_product(header: Header) -> list[Counted]:
    """Counts a bundle's measured problems for each product, torch and CUDA."""
    kinds: dict[tuple[str, str, str], Counter[str]] = {}
    for ranking in header.rankings:
        conditions = header.sources[ranking.source].conditions
        if ranking.measured is None or conditions is None:
            continue
        gpu = header.sources[ranking.source].gpu
        counts = kinds.setdefault((gpu, conditions.torch, conditions.cuda), Counter())
        counts.update(["measured", *_kinds(header, ranking)])
    names = [name for name in Counted.__dataclass_fields__ if name not in ("gpu", "torch", "cuda")]
    return [
        Counted(gpu=gpu, torch=torch, cuda=cuda, **{name: counts[name] for name in names})
        for (gpu, torch, cuda), counts in sorted(kinds.items())
    ]


def _kinds(header: Header, ranking: Ranking) -> Iterator[str]:
    measured, signature = ranking.measured, ranking.problem.signature
    assert measured is not None
    first_ns = ranking.kernels[0].time_ns
    assert first_ns is not None  # a measured ranking has times
    if measured.doubts or measured.aten is None or first_ns < measured.aten.time_ns:
        yield "competing"
    if measured.doubts:
        yield "doubtful"
        return
    epilogue = signature.epilogue
    is_fused = epilogue is not None and epilogue.activation and not epilogue.gate
    if is_fused or signature.op.is_gathered or measured.aten is None:
        yield "beyond_default"
        return
    time_ns = next(
        (
            ranked.time_ns
            for ranked in ranking.kernels
            if ranked.time_ns is not None and header.kernels[ranked.kernel].is_deterministic
        ),
        None,
    )
    if time_ns is None or not gains_enough(time_ns, measured.aten, MIN_GAIN):
        yield "aten"
        return
    for evidence, kind in (
        (Evidence.DEFAULT, "confirmed" if measured.is_confirmed else "repeated"),
        (Evidence.REPEATED, "with_setting"),
    ):
        least_gain = evidence.least_gain(measured)
        if least_gain is None or not gains_enough(time_ns, measured.aten, least_gain):
            continue
        if not signature.is_gated:
            yield kind
        elif evidence is default_evidence():
            yield "if_fused"
