"""Tuning outcome for a problem, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nvgemm_runtime.bundle.encode import timing_json
from nvgemm_runtime.bundle.ranking_entries import Conditions, Timing

from ..rankings.agreement import DISAGREEMENT, Measurement

UNSEEN_WORK = "other work on the GPU was not looked for: NVML does not tell how busy it is"

UNSEEN_SLOWDOWNS = "slowdowns were not looked for: NVML does not tell why clocks are low"


@dataclass(frozen=True, kw_only=True)
class TuningOutcome(Measurement):
    """Measurement of a problem; kernels are named by id, fastest first.

    Attributes:
        wrong: Incorrect kernels and their faults, by id.
        back_to_back: Times for launches back to back, by contender: torch's own, and those that may
            be the fastest. All other times are for launches apart.
        confirmed_by: UUID digests for the GPUs that confirm each other; see `compare`.
        repeated: Seconds after which another process measured the same; None if none did.
    """

    wrong: Mapping[str, str]
    back_to_back: Mapping[str, Timing] = field(default_factory=dict)
    confirmed_by: tuple[str, ...] = ()
    repeated: int | None = None

    @property
    def is_disturbed(self) -> bool:
        """True if a doubt has a cause that may be gone in another measurement."""
        lasting = (DISAGREEMENT, UNSEEN_WORK, UNSEEN_SLOWDOWNS)
        return not all(doubt.startswith(lasting) for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Measurement time and process.

    Attributes:
        at_s: Seconds from `gpu.Bench.now_s` at the measurement's end.
        process: `state.PROCESS` in the measuring process.
    """

    at_s: float
    process: str


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Later measurement by another process, limited to contenders that may be the fastest.

    Attributes:
        outcome: Outcome of the second measurement.
        after_s: Seconds between the first measurement's end and this one's start.
    """

    outcome: TuningOutcome
    after_s: int


def outcome_json(outcome: TuningOutcome) -> dict[str, Any]:
    """Returns an outcome's JSON object."""
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
    """Reads an outcome from a JSON object made by `outcome_json`.

    Raises:
        ValueError, KeyError, TypeError: If keys are missing or times are invalid.
    """
    return TuningOutcome(
        kernels={id_: _timing(timing) for id_, *timing in value["kernels"]},
        aten=value["aten"] and _timing(value["aten"]),
        triton=value["triton"] and _timing(value["triton"]),
        wrong=value["wrong"],
        doubts=tuple(value["doubts"]),
        conditions=Conditions(**value["conditions"]),
        back_to_back={name: _timing(timing) for name, timing in value["back_to_back"].items()},
        confirmed_by=tuple(value["confirmed_by"]),
        repeated=value["repeated"],
    )


def _timing(value: list[int]) -> Timing:
    time_ns, spread_ns = value
    if not isinstance(time_ns, int) or not isinstance(spread_ns, int):
        raise ValueError(f"times are {time_ns!r} and {spread_ns!r}; must be nanoseconds")
    return Timing(time_ns=time_ns, spread_ns=spread_ns)
