"""Outcomes as JSON, read back by the rules that a bundle's header has for the same values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

from nvgemm_runtime.bundle.encode import timing_json
from nvgemm_runtime.bundle.format import Conditions, Timing

from .outcome import Outcome

_MOST = 2**63 - 1
"""The largest integer of a header."""


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a JSON object."""
    return {
        "kernels": [
            [id_, timing.time_ns, timing.spread_ns] for id_, timing in outcome.kernels.items()
        ],
        "aten": timing_json(outcome.aten),
        "triton": timing_json(outcome.triton),
        "wrong": dict(outcome.wrong),
        "doubts": list(outcome.doubts),
        "conditions": asdict(outcome.conditions),
    }


def read_outcome(value: Any, ids: Collection[str]) -> Outcome:
    """The outcome that a JSON object is.

    Args:
        value: What `outcome_json` returned.
        ids: Of the kernels that it may name.

    Raises:
        ValueError: If a value is none that a bundle could hold.
    """
    given = _object(value, [field.name for field in fields(Outcome)])
    kernels = {}
    for item in _items(given["kernels"]):
        id_, *timing = _items(item)
        kernels[_kernel(id_, ids)] = read_timing(timing)
    times = [timing.time_ns for timing in kernels.values()]
    if len(kernels) != len(given["kernels"]) or times != sorted(times):
        raise ValueError("kernels are named twice, or not the fastest first")
    wrong = _object(given["wrong"])
    conditions = _object(given["conditions"], [field.name for field in fields(Conditions)])
    return Outcome(
        kernels=kernels,
        aten=None if given["aten"] is None else read_timing(given["aten"]),
        triton=None if given["triton"] is None else read_timing(given["triton"]),
        wrong={_kernel(id_, ids): read_text(fault) for id_, fault in wrong.items()},
        doubts=tuple(map(read_text, _items(given["doubts"]))),
        conditions=Conditions(**{name: read_text(text) for name, text in conditions.items()}),
    )


def read_timing(value: Any) -> Timing:
    """The timing that ``[nanoseconds, spread]`` is.

    Raises:
        ValueError: If it is none.
    """
    time_ns, spread_ns = _items(value)
    for number, least in ((time_ns, 1), (spread_ns, 0)):
        if type(number) is not int or not least <= number <= _MOST:
            raise ValueError(f"{number!r:.80} is no integer in {least}..{_MOST}")
    return Timing(time_ns=time_ns, spread_ns=spread_ns)


def read_text(value: Any) -> str:
    """A text that a header can hold.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{value!r:.80} is no printable text")
    return value


def _kernel(id_: Any, ids: Collection[str]) -> str:
    if read_text(id_) not in ids:
        raise ValueError(f"there is no kernel {id_:.80}")
    return str(id_)


def _object(value: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict) or (names is not None and value.keys() != set(names)):
        raise ValueError(f"{value!r:.80} is not an object of {names}")
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is no list")
    return value
