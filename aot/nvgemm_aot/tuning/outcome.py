"""What tuning found for one problem, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nvgemm_runtime.bundle.encode import timing_json
from nvgemm_runtime.bundle.format import Conditions, Timing

from ..rankings.agreement import DISAGREEMENT, Measurement

UNSEEN_WORK = "other work on the GPU was not looked for: NVML does not tell how busy it is"

UNSEEN_SLOWDOWNS = "slowdowns were not looked for: NVML does not tell why clocks are low"


@dataclass(frozen=True, kw_only=True)
class TuningOutcome(Measurement):
    """What was measured of one problem; kernels are named by id, fastest first.

    Attributes:
        wrong: By id, incorrect kernels and what is wrong with them.
        back_to_back: By contender, times of launches back to back, of those that may be the fastest
            and of torch's own; the other times are of launches apart.
        confirmed_by: Digests of the UUIDs of the GPUs that confirm each other; see `compare`.
        repeated: Seconds after which another process measured the same; None where none did.
    """

    wrong: Mapping[str, str]
    back_to_back: Mapping[str, Timing] = field(default_factory=dict)
    confirmed_by: tuple[str, ...] = ()
    repeated: int | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether a doubt has a cause that may be gone when it is measured again."""
        lasting = (DISAGREEMENT, UNSEEN_WORK, UNSEEN_SLOWDOWNS)
        return not all(doubt.startswith(lasting) for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a problem was measured, and by which process.

    Attributes:
        at_s: Seconds of `gpu.Bench.now_s` when the measurement ended.
        process: Its `state.PROCESS`.
    """

    at_s: float
    process: str


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A later measurement of a problem by another process, of what may be the fastest alone.

    Attributes:
        outcome: What it found.
        after_s: Seconds from the end of the first measurement to its begin.
    """

    outcome: TuningOutcome
    after_s: int


def outcome_json(outcome: TuningOutcome) -> dict[str, Any]:
    """The JSON object of an outcome."""
    return {
        "kernels": [
            [id_, timing.time_ns, timing.spread_ns] for id_, timing in outcome.kernels.items()
        ],
        "aten": timing_json(outcome.aten),
        "triton": timing_json(outcome.triton),
        "wrong": dict(outcome.wrong),
        "doubts": list(outcome.doubts),
        "conditions": asdict(outcome.conditions),
        "back_to_back": {
            name: timing_json(timing) for name, timing in outcome.back_to_back.items()
        },
        "confirmed_by": list(outcome.confirmed_by),
        "repeated": outcome.repeated,
    }


def read_outcome(value: Mapping[str, Any]) -> TuningOutcome:
    """The outcome of a JSON object that `outcome_json` returned.

    Raises:
        ValueError, KeyError, TypeError: If it has other keys, or times that are none.
    """
    return TuningOutcome(
        kernels={id_: _timing(timing) for id_, *timing in value["kernels"]},
        aten=value["aten"] and _timing(value["aten"]),
        triton=value["triton"] and _timing(value["triton"]),
        wrong=value["wrong"],
        doubts=tuple(value["doubts"]),
        conditions=Conditions(**value["conditions"]),
        back_to_back={name: _timing(one) for name, one in value["back_to_back"].items()},
        confirmed_by=tuple(value["confirmed_by"]),
        repeated=value["repeated"],
    )


def _timing(value: list[int]) -> Timing:
    time_ns, spread_ns = value
    if not isinstance(time_ns, int) or not isinstance(spread_ns, int):
        raise ValueError(f"times are {time_ns!r} and {spread_ns!r}; must be nanoseconds")
    return Timing(time_ns=time_ns, spread_ns=spread_ns)
