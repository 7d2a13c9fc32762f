"""The emulator gives what an H100 gave for the same kernels in PTX and the same inputs."""

import pytest

from benchmarks.emulation.hopper.instruction_runs import all_cases, compare, emulate, read_lines
from nvgemm_aot.emulator.emulation_errors import EmulationError
from repository import TESTS

LINES = read_lines(TESTS / "data" / "emulated-instructions-h100.jsonl")

REFUSED = {line["case"] for line in LINES if "error" in line}
"""Cases in which the H100 reports an illegal instruction: stores at negative coordinates."""


def disagreements(lines):
    compared = [line for line in lines if line["case"] not in REFUSED]
    assert compared
    return {
        name: outcome
        for name, outcome in compare(compared)
        if outcome != "equal" and not outcome.startswith("close")
    }


def test_some_cases_of_each_kind_agree():
    assert not disagreements(LINES[::17])


@pytest.mark.slow
def test_all_cases_agree():
    assert len(LINES) == 488
    assert {
        f"tensor store/2d/u8/{swizzle}/(-16, -5)" for swizzle in ("plain", "32", "64", "128")
    } == REFUSED
    assert not disagreements(LINES)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_store_that_the_gpu_refuses_is_refused(name):
    maps = {line["case"]: line.get("maps") for line in LINES}
    same = maps[name.replace("(-16, -5)", "(0, 0)")]  # the box lies elsewhere in the same tensor
    with pytest.raises(EmulationError, match=r"coordinates \(-16, -5\).* must not be negative"):
        emulate(all_cases()[name], map(bytes.fromhex, same))


def test_another_kernel_is_not_compared():
    (outcome,) = compare([{**LINES[0], "fingerprint": "of another"}])
    assert outcome == (LINES[0]["case"], "another kernel or input than the GPU ran")


def test_a_wrong_result_is_seen():
    (outcome,) = compare([{**LINES[-20], "sha256": "of another"}])
    assert outcome[1] != "equal"
