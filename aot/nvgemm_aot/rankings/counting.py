"""Counts for how many problems of a bundle torch.compile uses measured kernels, and by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import Header, Ranking
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.thresholds import MIN_GAIN, gains_enough


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Measured problems of one GPU product, by what torch.compile does with them there.

    Attributes:
        gpu, torch, cuda: The product, and the versions of the ATen that was measured.
        measured: How many problems were measured.
        confirmed, repeated: For how many default mode uses a kernel, as two GPUs confirm it, or as
            one repeated it.
        with_setting: For how many it does where repeated rankings count as confirmed ones do.
        aten: For how many ATen computes everywhere, as no kernel gains enough.
        beyond_default: How many are of operations that default mode leaves alone: fused
            activations and gates, and rows that indices name.
        competing: For how many kernels compete under max-autotune.
        doubtful: How many are in doubt, and timed again wherever their kernels compete.
    """

    gpu: str
    torch: str
    cuda: str
    measured: int
    confirmed: int
    repeated: int
    with_setting: int
    aten: int
    beyond_default: int
    competing: int
    doubtful: int


def count_by_product(header: Header) -> list[Counted]:
    """Count the measured problems of a bundle, for each product, torch and CUDA."""
    kinds: dict[tuple[str, str, str], Counter[str]] = {}
    for ranking in header.rankings:
        conditions = header.sources[ranking.source].conditions
        if ranking.measured is None or conditions is None:
            continue
        gpu = header.sources[ranking.source].gpu
        found = kinds.setdefault((gpu, conditions.torch, conditions.cuda), Counter())
        found.update(["measured", *_kinds(header, ranking)])
    names = [name for name in Counted.__dataclass_fields__ if name not in ("gpu", "torch", "cuda")]
    return [
        Counted(gpu=gpu, torch=torch, cuda=cuda, **{name: found[name] for name in names})
        for (gpu, torch, cuda), found in sorted(kinds.items())
    ]


def _kinds(header: Header, ranking: Ranking) -> Iterator[str]:
    measured, signature = ranking.measured, ranking.problem.signature
    assert measured is not None
    first_ns = ranking.kernels[0].time_ns
    assert first_ns is not None  # of a measured ranking
    if measured.doubts or measured.aten is None or first_ns < measured.aten.time_ns:
        yield "competing"
    if measured.doubts:
        yield "doubtful"
        return
    epilogue = signature.epilogue
    is_fused = epilogue is not None and (epilogue.row.activation or epilogue.row.gate)
    if is_fused or signature.op.is_gathered or measured.aten is None:
        yield "beyond_default"
        return
    time_ns = next(
        (
            place.time_ns
            for place in ranking.kernels
            if place.time_ns is not None and header.kernels[place.kernel].is_deterministic
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
        if least_gain is not None and gains_enough(time_ns, measured.aten, least_gain):
            yield kind
