"""The bundles of a process: opened once, broken ones beside good ones, in a fixed order."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import shutil
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import DType, Problem
from nvgemm_runtime.installed import registry as installation_module
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.combined.layered_index import LayeredIndex
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Match, Miss
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import B200
from written_wheels import write_wheel


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that NVGEMM_AOT_BUNDLES names; no wheel is installed."""
    named = tmp_path / "named"
    named.mkdir()
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(named))
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    return named


def not_bundled() -> Problem:
    return Problem(signature=replace(SIGNATURE, out=DType.FP32), m=1, n=16, k=16)


def opened_by(index: Index | LayeredIndex) -> list[Bundle]:
    assert isinstance(index, Index)
    return [view.opened for view in index.bundles if view.opened is not None]


def add(directory: Path, name: str, *, dsl: str = "4.8.1", seed: int = 0) -> Path:
    content = synthetic_content(kernels=2, problems=2, seed=seed)
    path = directory / f"{name}.nvgemm"
    write_bundle(path, replace(content, toolchain={"nvidia-cutlass-dsl": dsl}))
    return path


def test_nothing_is_read_before_it_is_asked(directory: Path) -> None:
    installation = Installation()
    path = add(directory, "late")
    assert [found.path for found in installation.bundles()] == [path]


def test_bundles_are_opened_once_and_stay_open(directory: Path) -> None:
    path = add(directory, "a")
    installation = Installation()
    (found,) = installation.bundles()
    add(directory, "b", seed=1)
    path.unlink()
    assert installation.bundles() == (found,)
    assert found.bundle is not None
    found.bundle.check_body()
    index = installation.index(B200)
    assert installation.index(B200) is index
    assert opened_by(index) == [found.bundle]


def test_a_broken_bundle_beside_a_good_one_is_left_out_and_said(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = add(directory, "good")
    broken = directory / "broken.nvgemm"
    broken.write_bytes(good.read_bytes()[:100])
    installation = Installation()
    with caplog.at_level(logging.WARNING, "nvgemm_runtime.installed.registry"):
        installation.bundles()
        installation.bundles()
    assert len(caplog.records) == 1
    assert "broken.nvgemm: [header-size]" in caplog.text
    by_name = {found.path.name: found for found in installation.bundles()}
    assert by_name["broken.nvgemm"].bundle is None
    assert "[header-size]" in str(by_name["broken.nvgemm"].refusal(B200))
    assert by_name["good.nvgemm"].refusal(B200) is None
    index = installation.index(B200)
    assert [bundle.path for bundle in opened_by(index)] == [good]
    miss = index.match(not_bundled(), 256)
    assert isinstance(miss, Miss)
    assert any("[header-size]" in reason for reason in miss.reasons), miss.reasons


FAULTS = (
    KeyError("cluster_limits"),
    MemoryError(),
    RecursionError("deep"),
    ValueError("bad\nline"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize(
    "place",
    [
        "nvgemm_runtime.bundle.reader.decode_header",
        "nvgemm_runtime.bundle.reader.file_identity",
        "nvgemm_runtime.matching.index.refusal",
        "nvgemm_runtime.matching.usable_rankings.kernel_refusals",
        "nvgemm_runtime.matching.usable_rankings.launchable",
    ],
)
@pytest.mark.parametrize("call", [0, 1])
def test_whatever_goes_wrong_with_one_bundle_the_others_are_used(
    place: str, fault: Exception, call: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate("ab"):
        add(directory, name, seed=seed)
    module_name, _, function = place.rpartition(".")
    module = importlib.import_module(module_name)
    right = getattr(module, function)
    calls = itertools.count()

    def faulty(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise fault
        return right(*arguments, **named)

    monkeypatch.setattr(module, function, faulty)
    index = Installation().index(B200)
    assert isinstance(index, Index)
    problem = index.bundles[0].header.rankings[0].problem
    assert isinstance(index.match(problem, 256), Match)
    assert len(index.refusals) == 1
    assert f"internal error, {type(fault).__name__}: " in index.refusals[0]
    assert "\n" not in index.refusals[0]


def test_a_miss_names_a_bundle_that_could_not_be_opened(directory: Path) -> None:
    (directory / "broken.nvgemm").write_bytes(b"broken")
    index = Installation().index(B200)
    miss = index.match(not_bundled(), 256)
    assert opened_by(index) == []
    assert isinstance(miss, Miss)
    assert miss.reasons[0].startswith("no bundle serves this device (NVIDIA B200")
    assert "broken.nvgemm: [truncated]" in miss.reasons[1]


def test_the_newest_toolchain_comes_first_whatever_the_names(directory: Path) -> None:
    for name, dsl in (("a", "4.8.1"), ("b", "4.10.0"), ("c", "4.8"), ("d", "4.9.2")):
        add(directory, name, dsl=dsl, seed=ord(name))
    index = Installation().index(B200)
    opened = opened_by(index)
    assert [bundle.path.stem for bundle in opened] == ["b", "d", "a", "c"]
    match = index.match(opened[0].header.rankings[0].problem, 256)
    assert isinstance(match, Match)
    assert match.kernels[0].bundle.opened is opened[0]


def test_kernels_are_found_by_id_in_the_first_bundle_that_holds_them(directory: Path) -> None:
    first = add(directory, "a")
    shutil.copy(first, directory / "b.nvgemm")
    kernels = Installation().kernels()
    assert len(kernels) == 2
    assert {bundle.path for bundle, _ in kernels.values()} == {first}
    assert all(id_ == kernel.id for id_, (_, kernel) in kernels.items())


def test_an_entry_that_can_be_launched_comes_before_one_that_cannot(directory: Path) -> None:
    """An older release may have built the same payload under another calling convention."""
    base = synthetic_content(kernels=1, problems=1)
    old = replace(base.kernels[0], calling_convention="tvm_ffi:gemm(a,b,out)")
    for name, content in (("a", replace(base, kernels=(old,))), ("b", base)):
        write_bundle(directory / f"{name}.nvgemm", content)
    [(bundle, kernel)] = Installation().kernels().values()
    assert bundle.path.name == "b.nvgemm"
    assert kernel.calling_convention == base.kernels[0].calling_convention


@pytest.mark.parametrize("other", [{"platform": "linux_aarch64"}, {"cuda": "cu12"}])
def test_a_bundle_for_this_process_comes_before_one_for_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    monkeypatch.setattr(installation_module, "torch_cuda", lambda: "cu13")
    base = synthetic_content(kernels=1, problems=1)
    foreign = replace(base, target=replace(base.target, **other))
    for name, content in (("a", foreign), ("b", base)):
        write_bundle(directory / f"{name}.nvgemm", content)
    [(bundle, _)] = Installation().kernels().values()
    assert bundle.path.name == "b.nvgemm"


def test_a_bundle_without_a_kernel_that_can_be_launched_is_refused(directory: Path) -> None:
    base = synthetic_content(kernels=2, problems=2)
    old = [replace(kernel, calling_convention="old:gemm(a,b,out)") for kernel in base.kernels]
    write_bundle(directory / "mixed.nvgemm", replace(base, kernels=(old[0], base.kernels[1])))
    write_bundle(directory / "old.nvgemm", replace(base, kernels=tuple(old)))
    mixed, useless = Installation().bundles()
    assert mixed.refusal(B200) is None
    refusal = str(useless.refusal(B200))
    assert refusal.startswith("none of its 2 kernels can be launched: calling convention 'old:gemm")


def test_threads_that_race_open_each_bundle_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        add(directory, name, seed=ord(name))
    opened = []
    real = installation_module.Bundle

    def counted(path: Path) -> object:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(installation_module, "Bundle", counted)
    installation, barrier = Installation(), threading.Barrier(6)
    answers: list[object] = []

    def ask(place: int) -> None:
        barrier.wait()
        answers.append(installation.index(B200) if place % 2 else installation.kernels())

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 3
    assert len({id(answer) for answer in answers}) == 2


def test_an_empty_variable_names_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", os.pathsep)
    miss = Installation().index(B200).match(not_bundled(), 256)
    assert isinstance(miss, Miss)
    assert "install a kernel wheel" in miss.reasons[0]


def test_installed_wheels_are_found_without_being_imported(
    cpu_bundle: BuiltBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel([cpu_bundle.path], name="cpu", version="1.0", out_dir=tmp_path)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    (found,) = Installation().bundles()
    assert found.origin == "nvgemm-kernels-cpu 1.0"
    assert found.bundle is not None
    assert found.bundle.header == cpu_bundle.header
    assert "nvgemm_kernels_cpu" not in sys.modules
