"""Files that ``nvgemm-aot confirm`` writes: what is in them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nvgemm_runtime.bundle.confirmations import (
    MAX_BYTES,
    MAX_NS,
    MAX_TEXT,
    Confirmations,
    ConfirmedTimes,
    decode_confirmations,
    encode_confirmations,
)
from nvgemm_runtime.bundle.ranking_entries import APART, Conditions, Timing
from nvgemm_runtime.errors import RankingsError

KEY = "mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096"

CONFIRMATIONS = Confirmations(
    gpu="NVIDIA H100 80GB HBM3",
    by="nvgemm-aot 0.1",
    conditions=Conditions(
        driver="580.95.05",
        torch="2.14.1+cu130",
        cuda="13.0",
        date="2026-11-28",
        launches=APART,
        gpu_sha256="c" * 64,
    ),
    problems={
        KEY: ConfirmedTimes(
            kernels={
                "a" * 64: Timing(time_ns=9000, spread_ns=20),
                "b" * 64: Timing(time_ns=9100, spread_ns=0),
            },
            aten=Timing(time_ns=9500, spread_ns=30),
            doubts=("it was hot",),
        )
    },
)


def read(data: bytes) -> Confirmations:
    return decode_confirmations(data, "x.confirmed.json")


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = json.loads(encode_confirmations(CONFIRMATIONS))
    change(document)
    return json.dumps(document).encode()


def test_reads_what_it_writes() -> None:
    assert read(encode_confirmations(CONFIRMATIONS)) == CONFIRMATIONS
    unknown = replace(
        CONFIRMATIONS, conditions=replace(CONFIRMATIONS.conditions, gpu_sha256=None), problems={}
    )
    assert read(encode_confirmations(unknown)) == unknown


def test_members_of_later_releases_are_ignored() -> None:
    def add(document: dict[str, Any]) -> None:
        document["later"] = document["problems"][KEY]["later"] = 1

    assert read(changed(add)) == CONFIRMATIONS


def set_problem(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["problems"][KEY].update({name: value})


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: d.update(format="x"), "format must be 'confirmations of nvgemm-aot' (got 'x')"),
    (lambda d: d.update(version=2), "version must be 1 for this release (got 2)"),
    (lambda d: d.update(version=True), "(got True)"),
    (lambda d: d.pop("gpu"), "the file lacks gpu, which it must have"),
    (lambda d: d.update(gpu=""), f"gpu must be 1 to {MAX_TEXT} printable characters (got '')"),
    (lambda d: d.update(torch="2\n"), "torch must be 1 to"),
    (lambda d: d.update(driver="x" * (MAX_TEXT + 1)), "driver must be"),
    (lambda d: d.update(gpu_sha256="C" * 64), "gpu_sha256 must be 64 lower-case hex digits"),
    (lambda d: d.update(problems=[]), "problems must be an object (got [])"),
    (lambda d: d["problems"].update({"": {}}), "a problem must be 1 to"),
    (lambda d: d["problems"].update(x=3), "problems.x must be an object (got 3)"),
    (set_problem("kernels", []), "a list with at least one kernel (got [])"),
    (set_problem("kernels", {}), "kernels must be a list (got {})"),
    (set_problem("kernels", [["a" * 64, 1]]), "must be [id, time_ns, spread_ns]"),
    (set_problem("kernels", [["a" * 63, 1, 1]]), "must be 64 lower-case hex digits"),
    (set_problem("kernels", [["a" * 64, 1, 1]] * 2), "not listed twice"),
    (set_problem("kernels", [["a" * 64, 2, 1], ["b" * 64, 1, 1]]), "ordered by time"),
    (set_problem("kernels", [["a" * 64, 0, 1]]), f"its time must be 1 to {MAX_NS} nanoseconds"),
    (set_problem("kernels", [["a" * 64, 1, -1]]), "its spread must be 0 to"),
    (set_problem("kernels", [["a" * 64, 1.5, 1]]), "(got 1.5)"),
    (set_problem("kernels", [["a" * 64, MAX_NS + 1, 1]]), "its time must be"),
    (set_problem("aten", None), "aten must be [time_ns, spread_ns] (got None)"),
    (set_problem("aten", [True, 1]), "aten: its time must be"),
    (set_problem("doubts", "x"), "doubts must be a list (got 'x')"),
    (set_problem("doubts", [3]), "doubts must be 1 to"),
])  # fmt: skip
def test_refuses_what_breaks_a_rule(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(RankingsError) as caught:
        read(changed(change))
    text = str(caught.value)
    assert text.startswith("x.confirmed.json: no confirmations: ")
    assert said in text
    assert text.endswith("run: nvgemm-aot confirm")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 10**5, b"x" * (MAX_BYTES + 1)]
)
def test_refuses_what_is_no_document(data: bytes) -> None:
    with pytest.raises(RankingsError, match="no confirmations"):
        read(data)


def test_refuses_numbers_that_json_lacks() -> None:
    with pytest.raises(RankingsError, match="time must be"):
        read(encode_confirmations(CONFIRMATIONS).replace(b"9000", b"NaN"))
