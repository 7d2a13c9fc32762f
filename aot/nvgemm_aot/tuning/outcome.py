"""What tuning found for one problem: its JSON form, and whether two runs agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nvgemm_runtime.bundle.encode import timing_json
from nvgemm_runtime.bundle.format import Conditions, Timing
from nvgemm_runtime.matching.refusals import version_numbers

from .contenders import ATEN, TRITON
from .race import RESOLUTION

UNSEEN_WORK = "other work on the GPU was not looked for: NVML does not tell how busy it is"

UNSEEN_SLOWDOWNS = "slowdowns were not looked for: NVML does not tell why clocks are low"

SLACK = 0.05
"""Share of a time by which two runs may differ besides their spreads: GPUs of one product differ by
a few percent, and so does one GPU from day to day."""

DISAGREEMENT = "two runs disagree: "
"""Start of the doubt that two runs disagree."""


@dataclass(frozen=True, kw_only=True)
class TuningOutcome:
    """What was measured of one problem.

    Attributes:
        kernels: Time of each correct kernel, by id, fastest first.
        aten: ATen's time; None where it has no operator for the problem.
        triton: The best Triton kernel's time; None where there is none or it was not asked for.
        wrong: By id, incorrect kernels and what is wrong with them.
        doubts: Reasons not to rely on the order.
        back_to_back: By contender, times of launches back to back, of those that may be the fastest
            and of torch's own; the other times are of launches apart.
    """

    kernels: Mapping[str, Timing]
    aten: Timing | None
    triton: Timing | None
    wrong: Mapping[str, str]
    doubts: tuple[str, ...]
    conditions: Conditions
    back_to_back: Mapping[str, Timing] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, Timing]:
        """Times of the kernels, and of ATen where it has one."""
        return {**self.kernels, **({} if self.aten is None else {ATEN: self.aten})}

    @property
    def is_disturbed(self) -> bool:
        """Whether a doubt has a cause that may be gone when it is measured again."""
        lasting = (DISAGREEMENT, UNSEEN_WORK, UNSEEN_SLOWDOWNS)
        return not all(doubt.startswith(lasting) for doubt in self.doubts)


def disagreement(before: TuningOutcome, now: TuningOutcome) -> str | None:
    """Why two runs contradict each other about the fastest contender, or None.

    They do if each run has the other's fastest clearly behind, or if the time of either's fastest
    has changed beyond the spreads. Only contenders that both measured count, and ATen only for
    equal minor versions of torch and CUDA. A disturbed run contradicts nothing, nor does one that
    timed its launches otherwise.
    """
    if before.conditions.launches != now.conditions.launches:
        return None
    if not all(doubt.startswith(DISAGREEMENT) for doubt in before.doubts):
        return None
    old, new = before.times, now.times
    common = old.keys() & new.keys()
    if _aten_version(before.conditions) != _aten_version(now.conditions):
        common -= {ATEN}
    if not common:
        return None
    first_old, first_new = (
        min(sorted(common), key=lambda name: times[name].time_ns) for times in (old, new)
    )
    date = before.conditions.date
    if _is_behind(new, first_old, first_new) and _is_behind(old, first_new, first_old):
        return (
            f"{DISAGREEMENT}{contender_name(first_new)} was fastest, and "
            f"{contender_name(first_old)} in the run of {date}, each beyond the spread"
        )
    for name in dict.fromkeys((first_new, first_old)):
        apart = abs(new[name].time_ns - old[name].time_ns)
        allowed = new[name].spread_ns + old[name].spread_ns + SLACK * old[name].time_ns
        if apart > allowed:
            return (
                f"{DISAGREEMENT}{contender_name(name)} took {new[name].time_ns} ns, and "
                f"{old[name].time_ns} ns in the run of {date}: at most {allowed:.0f} ns apart is "
                "noise"
            )
    return None


def _aten_version(conditions: Conditions) -> tuple[tuple[int, ...], str]:
    return version_numbers(conditions.torch)[:2], conditions.cuda


def _is_behind(times: Mapping[str, Timing], slower: str, faster: str) -> bool:
    one, other = times[slower], times[faster]
    noise = one.spread_ns + other.spread_ns + RESOLUTION * other.time_ns
    return one.time_ns - other.time_ns > noise


def contender_name(contender: str) -> str:
    """A contender's name for messages."""
    torchs_own = {ATEN: "ATen", TRITON: "Triton"}
    return torchs_own.get(contender, f"kernel {contender[:12]}")


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
    )


def _timing(value: list[int]) -> Timing:
    time_ns, spread_ns = value
    if not isinstance(time_ns, int) or not isinstance(spread_ns, int):
        raise ValueError(f"times are {time_ns!r} and {spread_ns!r}; must be nanoseconds")
    return Timing(time_ns=time_ns, spread_ns=spread_ns)
