"""Rankings files: what is written can be read, and nothing else can."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_provider
from made_rankings import GPU_A, GPU_B, entry, rankings
from nvgemm_aot.rankings import file
from nvgemm_aot.rankings.entries import Entry, Rankings, merge
from nvgemm_aot.rankings.file import decode, encode, read_rankings, write_rankings
from nvgemm_runtime.bundle.ranking_entries import BACK_TO_BACK
from nvgemm_runtime.errors import RankingsError, StorageError

OTHER = cpu_provider.problem(sizes=(16, 32, 64))

SOME = rankings(
    entry({"x": 1000, "y": 1100}, repeated=150),
    entry({"x": 1010, "y": 1100}, gpu=GPU_B, date="2026-11-22", doubts=("it was hot",)),
    entry({"z": 500}, problem=OTHER, aten=None, gpu=None, launches=BACK_TO_BACK),
)


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_rankings(path, SOME)
    assert read_rankings(path) == SOME


def test_equal_rankings_give_equal_bytes_with_a_line_for_each_problem() -> None:
    turned = merge([Rankings(entries=(one,)) for one in reversed(SOME.entries)])
    assert encode(turned) == encode(SOME)
    lines = encode(SOME).splitlines()
    assert sum(line.startswith(b'{"measurements":') for line in lines) == 2
    assert json.loads(encode(SOME))["version"] == 1


def test_what_is_there_twice_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    many = rankings(*(entry({"x": 1000 + time}) for time in range(100)))
    document = json.loads(encode(many))
    (problem,) = document["problems"]
    problem["measurements"].append(problem["measurements"][-1])
    asked = []
    sort_key = Entry.__dict__["sort_key"].func

    def noted(one: Entry) -> Any:
        asked.append(one)
        return sort_key(one)

    monkeypatch.setattr(Entry, "sort_key", property(noted))
    with pytest.raises(RankingsError, match="has one measurement twice"):
        decode("r.json", json.dumps(document).encode())
    assert len(asked) <= 3 * 101


def test_any_json_text_of_it_is_read_and_unknown_members_are_ignored() -> None:
    document = json.loads(encode(SOME))
    document["note"] = "added by hand"
    document["problems"][0]["measurements"][0]["note"] = [1.5, None]
    assert decode("r.json", json.dumps(document, indent=3).encode()) == SOME


Edit = Callable[[Any], Any]


def put(*path: Any, to: Any) -> Edit:
    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return edit


FIRST = ("problems", 0, "measurements", 0)

DAMAGES: list[tuple[Edit, str]] = [
    (put("format", to="another"), "format must be 'nvgemm-aot rankings' (got 'another')"),
    (lambda d: d.pop("format"), "format must be"),
    (put("version", to=2), "version is 2, this release reads 1; upgrade"),
    (put("version", to="1"), "version is '1', this release reads 1; upgrade"),
    (put("version", to=True), "version is True"),
    (lambda d: d.pop("origins"), "origins is missing"),
    (put("operators", to={}), "operators must be a list"),
    (put("operators", 0, to=["x"]), "operators[0] must be a list of provider and operator"),
    (put("operators", 0, 1, to=""), "operators[0] must be printable text"),
    (put("operators", 0, 1, to="x\x1b[31m"), "operators[0] must be printable text"),
    (put("operators", 0, 1, to="x" * 1001), "operators[0] must be printable text"),
    (lambda d: d["operators"].append(d["operators"][0]), "operators has one entry twice"),
    (lambda d: d["origins"].append(d["origins"][0]), "origins has one entry twice"),
    (put("origins", 0, "arch", to="hopper"), "origins[0].arch must be an architecture"),
    (put("origins", 0, "toolchain", to={}), "origins[0].toolchain must be an object of versions"),
    (put("origins", 0, "toolchain", to={"a": 1}), "origins[0].toolchain.a must be"),
    (lambda d: d["origins"][0]["conditions"].pop("driver"), "origins[0].conditions.driver is mis"),
    (put("origins", 0, "conditions", to=7), "origins[0].conditions must be an object"),
    (put("origins", 0, "conditions", "gpu_sha256", to="GPU-1"), "must be 64 lower-case hex"),
    (put("origins", 0, "conditions", "gpu_sha256", to=None), "must be 64 lower-case hex"),
    (put("problems", 0, "problem", to="mm/tn"), "problems[0].problem must be a problem such as"),
    (put("problems", 0, "measurements", to=[]), "problems[0].measurements must be at least one"),
    (lambda d: d["problems"].append(d["problems"][0]), "problems has one entry twice"),
    (put(*FIRST, "origin", to=9), "measurements[0].origin must be an integer in 0..2 (got 9)"),
    (put(*FIRST, "origin", to=-1), "measurements[0].origin must be an integer"),
    (put(*FIRST, "date", to="21.11.2026"), "measurements[0].date must be a day"),
    (put(*FIRST, "kernels", to=[]), "must be at least one kernel, the fastest first (got [])"),
    (put(*FIRST, "kernels", 0, to=[0, 1]), "kernels[0] must be a list of operator"),
    (put(*FIRST, "kernels", 0, 0, to=3), "must be an integer in 0..2 (got 3)"),
    (put(*FIRST, "kernels", 0, 1, to=5000), "the fastest first (got [5000, 1100])"),
    (put(*FIRST, "kernels", 0, 1, to=0), "must be an integer in 1.."),
    (put(*FIRST, "kernels", 0, 1, to=1e3), "must be an integer in 1.."),
    (put(*FIRST, "kernels", 0, 1, to=2**64), "must be an integer in 1.."),
    (put(*FIRST, "kernels", 1, 0, to=0), "kernels has one entry twice"),
    (put(*FIRST, "aten", to=[1]), "aten must be a list of nanoseconds and spread"),
    (lambda d: d["problems"][0]["measurements"][0].pop("aten"), "measurements[0].aten is missing"),
    (put(*FIRST, "doubts", to="hot"), "doubts must be a list"),
    (put(*FIRST, "repeated", to=119), "repeated must be an integer in 120.."),
    (put(*FIRST, "repeated", to=None), "repeated must be an integer in 120.."),
    (put(*FIRST, "doubts", to=[""]), "doubts[0] must be printable text"),
    (
        lambda d: d["problems"][0]["measurements"].append(d["problems"][0]["measurements"][0]),
        "has one measurement twice; to drop duplicates, run: nvgemm-aot rankings merge",
    ),
]


@pytest.mark.parametrize(("edit", "said"), DAMAGES)
def test_damage_is_refused_with_place_finding_and_next_step(edit: Edit, said: str) -> None:
    document = json.loads(encode(SOME))
    edit(document)
    with pytest.raises(RankingsError) as raised:
        decode("r.json", json.dumps(document).encode())
    text = str(raised.value)
    assert said in text
    assert text.startswith("r.json: ")
    assert ("nvgemm-aot rankings" in text) or ("upgrade" in text)
    assert text.isprintable()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON: RecursionError"),
        (b'{"format": NaN}', "has the number NaN"),
        (b'{"format": 1, "format": 2}', "an object has 'format' twice"),
        (b'{"version": ' + b"9" * 5000 + b"}", "has an integer of 5000 digits"),
        (b"7", "format must be"),
        (
            b"\x89NVGEMM\n",
            "r.json: is a bundle, must be a rankings file; take its rankings: nvgemm-aot rankings "
            "export r.json -o FILE",
        ),
    ],
)
def test_what_is_no_rankings_file_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(RankingsError) as raised:
        decode("r.json", data)
    assert said in str(raised.value)


@pytest.mark.parametrize(("name", "why"), [("nope.json", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_read_says_what_to_name(tmp_path: Path, name: str, why: str) -> None:
    said = f"cannot read: {why}.*; name a file that nvgemm-aot rankings export or merge wrote"
    with pytest.raises(StorageError, match=said):
        read_rankings(tmp_path / name)


def test_what_is_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "MOST_BYTES", 100)
    with pytest.raises(RankingsError, match="has more than 100 bytes"):
        decode("r.json", encode(SOME))


def test_files_that_cannot_be_read_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing.json", ".", "pipe"):
        with pytest.raises(StorageError, match=str(tmp_path)):
            read_rankings(tmp_path / name)


@settings(max_examples=300)
@given(st.data())
def test_any_change_is_read_or_refused(data: st.DataObject) -> None:
    text = bytearray(encode(SOME))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        decode("r.json", bytes(text))
    except RankingsError as error:
        assert str(error).startswith("r.json: ")  # noqa: PT017
    assert decode("r.json", encode(SOME)) == SOME


def test_the_uuid_itself_is_nowhere(tmp_path: Path) -> None:
    assert GPU_A.encode() in encode(SOME)
    assert b"GPU-" not in encode(SOME)
