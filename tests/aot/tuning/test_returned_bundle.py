"""Bundles that workers return: kept if their native code is that of the tuned ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tuner import Tuner

from nvgemm_aot.bundle.content import BuiltKernel, read_content
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_aot.tuning.spread.returned_bundle import keep_returned
from nvgemm_aot.tuning.spread.tune_over_dask import tune_over
from nvgemm_aot.tuning.state.facts import Facts
from nvgemm_aot.tuning.state.journal import Journal, state_path
from nvgemm_aot.tuning.tune_bundles import TuningOptions
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import SignatureError, TuningError
from signing_keys import new_key, set_policy, sign_bundle

WORKER = "tcp://127.0.0.1:1"


def keep(tuner: Tuner, data: bytes, output: Path) -> Header:
    first = Journal(state_path(tuner.path), {}).lines[0]
    with Bundle(tuner.tunable) as bundle:
        return keep_returned(data, first, [bundle], output, WORKER)


def test_a_returned_bundle_is_written_and_its_key_noted_once(tuner: Tuner) -> None:
    tuner()
    output = tuner.beside("kept.nvgemm")
    for _ in range(2):
        header = keep(tuner, tuner.path.read_bytes(), output)
        assert output.read_bytes() == tuner.path.read_bytes()
        lines = Journal(state_path(output), {}).facts
        assert Facts(lines).written == {header.build_key}
        assert len(lines) == 1


def damaged(kernel: BuiltKernel) -> BuiltKernel:
    return replace(kernel, payload=kernel.payload + b"\0")


def renamed(kernel: BuiltKernel) -> BuiltKernel:
    return replace(kernel, operator=f"{kernel.operator}_other")


@pytest.mark.parametrize("change", [damaged, renamed])
def test_other_native_code_is_refused(
    tuner: Tuner, change: Callable[[BuiltKernel], BuiltKernel]
) -> None:
    tuner()
    with Bundle(tuner.path) as bundle:
        content = read_content(bundle)
    kernel, *others = content.kernels
    changed = change(kernel)
    rankings = tuple(
        replace(
            ranking,
            kernels=tuple(
                (changed.id if id_ == kernel.id else id_, time) for id_, time in ranking.kernels
            ),
        )
        for ranking in content.rankings
    )
    data, _ = encode_bundle(replace(content, kernels=(changed, *others), rankings=rankings))
    refused(tuner, data, f"returned kernel {changed.id[:12]}, which is not as in the tuned")


def test_what_is_no_bundle_is_refused(tuner: Tuner) -> None:
    tuner()
    refused(tuner, b"anything", "returned no intact bundle")
    data = bytearray(tuner.path.read_bytes())
    data[-1] ^= 1
    refused(tuner, bytes(data), "returned no intact bundle")


def refused(tuner: Tuner, data: bytes, message: str) -> None:
    output = tuner.beside("kept.nvgemm")
    with pytest.raises(TuningError, match=f"worker {WORKER} {message}"):
        keep(tuner, data, output)
    assert not output.exists()
    assert not state_path(output).exists()


def test_the_clients_policy_decides_before_anything_is_sent(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = new_key(tmp_path, "key"), new_key(tmp_path, "other")
    sign_bundle(tuner.tunable, other)
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ours": key})
    with pytest.raises(SignatureError, match=str(tuner.tunable)):
        tune_over("tcp://127.0.0.1:1", [tuner.tunable], tuner.path, TuningOptions())
