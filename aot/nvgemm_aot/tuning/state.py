"""What a tuning has measured so far, in a file that outlives an interruption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import StorageError, TuningError
from nvgemm_runtime.format import Conditions, Timing

from ..storage import write_atomic
from .outcome import Outcome

VERSION = 1
"""Of the file."""


def state_path(output: Path) -> Path:
    """Where the state of a tuning lies: beside what it is to write."""
    return output.with_name(f"{output.name}.tuning.json")


class TuningState:
    """The outcomes of a tuning, by problem key.

    Args:
        path: The file; read if it is there.
        identity: What must be equal for outcomes to belong to this tuning: bundles, GPU, versions.

    Attributes:
        outcomes: Those that are known.
        broken: By id, kernels that left the GPU unusable, and how.

    Raises:
        StorageError: If the file cannot be read, or is damaged.
        TuningError: If it belongs to another tuning.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self._path = path
        self._identity = dict(identity)
        self.outcomes: dict[str, Outcome]
        self.broken: dict[str, str]
        self.outcomes, self.broken = _read(path, self._identity)

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome, in the file too.

        Raises:
            StorageError: If the file cannot be written; it is then as before.
        """
        self.outcomes[key] = outcome
        self._write()

    def add_broken(self, kernel_id: str, reason: str) -> None:
        """Keep that a kernel left the GPU unusable, in the file too."""
        self.broken[kernel_id] = reason
        self._write()

    def _write(self) -> None:
        document = {
            "version": VERSION,
            "identity": self._identity,
            "broken": self.broken,
            "outcomes": {key: _encode(outcome) for key, outcome in self.outcomes.items()},
        }
        write_atomic(self._path, json.dumps(document).encode())

    def remove(self) -> None:
        """Remove the file: the tuning is complete."""
        self._path.unlink(missing_ok=True)


def _read(path: Path, identity: Mapping[str, str]) -> tuple[dict[str, Outcome], dict[str, str]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}, {}
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror}") from error
    try:
        document = json.loads(data)
        version, found = document["version"], dict(document["identity"])
        if version == VERSION:
            outcomes = {key: _decode(item) for key, item in document["outcomes"].items()}
            broken = {str(id_): str(text) for id_, text in document["broken"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            f"{path}: the state of a tuning is damaged ({type(error).__name__}: {error}); remove "
            "it to measure from the beginning"
        ) from error
    if version != VERSION:
        raise TuningError(
            f"{path}: state of version {version}, this release reads {VERSION}; finish it with the "
            "release that wrote it, or remove it to measure from the beginning"
        )
    for name in identity.keys() | found.keys():
        if identity.get(name) != found.get(name):
            raise TuningError(
                f"{path} belongs to another tuning: its {name} is {found.get(name)}, here it is "
                f"{identity.get(name)}; finish that one, choose another output, or remove the file"
            )
    return outcomes, broken


def _encode(outcome: Outcome) -> dict[str, Any]:
    return {
        "kernels": [[id_, *_encode_timing(timing)] for id_, timing in outcome.kernels.items()],
        "aten": outcome.aten and _encode_timing(outcome.aten),
        "triton": outcome.triton and _encode_timing(outcome.triton),
        "wrong": dict(outcome.wrong),
        "doubts": list(outcome.doubts),
        "conditions": asdict(outcome.conditions),
    }


def _encode_timing(timing: Timing) -> list[int]:
    return [timing.time_ns, timing.spread_ns]


def _decode(item: dict[str, Any]) -> Outcome:
    return Outcome(
        kernels={id_: _decode_timing(timing) for id_, *timing in item["kernels"]},
        aten=item["aten"] and _decode_timing(item["aten"]),
        triton=item["triton"] and _decode_timing(item["triton"]),
        wrong={str(id_): str(text) for id_, text in item["wrong"].items()},
        doubts=tuple(map(str, item["doubts"])),
        conditions=Conditions(**item["conditions"]),
    )


def _decode_timing(timing: list[int]) -> Timing:
    time_ns, spread_ns = timing
    if time_ns < 1 or spread_ns < 0:
        raise ValueError(f"a time of {time_ns} ± {spread_ns} ns")
    return Timing(time_ns=time_ns, spread_ns=spread_ns)
