"""Verdicts on a call's result, and on how the kernel got there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nvgemm_aot.emulator.checking import kernel_check
from nvgemm_aot.emulator.checking.kernel_check import Verdict


@dataclass(frozen=True)
class Check:
    """Operands whose result is judged as a test says."""

    operands: tuple[torch.Tensor, ...]
    says: str | None
    name: str = "numbers"
    expected_sums: None = None

    def prepare(self) -> None:
        """Leaves the result as it is."""

    def fault(self, result: torch.Tensor) -> str | None:
        """Returns the test's judgement."""
        return self.says


@dataclass(frozen=True)
class Ended:
    """A launch with findings."""

    findings: list[str]
    reads_unwritten: bool = False


@pytest.mark.parametrize(
    ("says", "findings", "verdict", "reason"),
    [
        (None, [], None, None),
        (None, ["a race", "another"], Verdict.SUSPECT, "numbers: a race"),
        ("1 is 2", [], Verdict.WRONG, "numbers: 1 is 2"),
        ("1 is 2", ["a race", "another"], Verdict.WRONG, "numbers: 1 is 2; perhaps since a race"),
    ],
)
def test_a_wrong_result_names_a_finding_too(
    monkeypatch: pytest.MonkeyPatch,
    says: str | None,
    findings: list[str],
    verdict: Verdict | None,
    reason: str | None,
) -> None:
    result = torch.full((4,), 0xFF, dtype=torch.uint8)
    monkeypatch.setattr(kernel_check, "_framed", lambda loaded, out: (result, result))
    monkeypatch.setattr(kernel_check, "call_as_user", lambda loaded, operands: None)
    monkeypatch.setattr(kernel_check, "_executions", lambda device: [Ended(findings)])
    session: Any = type("Session", (), {"device": None})
    check: Any = Check((result, result, result), says)
    loaded: Any = None
    assert next(kernel_check._faults(session, loaded, check), (None, None)) == (verdict, reason)
