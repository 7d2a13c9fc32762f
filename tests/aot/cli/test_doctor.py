"""What `nvgemm-aot doctor` finds on machines that lack this or that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.doctor import diagnosis, policy_here
from nvgemm_aot.cli.main import main
from nvgemm_aot.tuning.confirming.confirmed_output import write_confirmations
from nvgemm_runtime.bundle import calling_convention
from nvgemm_runtime.bundle.confirmations import Confirmations, ConfirmedTimes
from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS, EARLIER_SYMBOLS
from nvgemm_runtime.bundle.ranking_entries import Conditions, Timing
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ToolchainError, UnhealthyError
from nvgemm_runtime.installed.policy import utc_today
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.matching.device import UNKNOWN_VERSION, TorchVersions
from repository import TESTS
from signing_keys import new_key, set_policy, sign_bundle
from synthetic_bundles import install_lost_and_damaged, write_synthetic_bundle
from synthetic_facts import H200, LIBRARY

REAL_SM_90A = TESTS / "data/format-1/sm_90a.nvgemm"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def have(monkeypatch: pytest.MonkeyPatch, **parts: object) -> None:
    """Let the diagnosis find this; an exception is raised."""
    for name, found in parts.items():

        def look(*_: object, found: object = found) -> object:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(diagnosis, name, look)


def name_bundles(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", os.pathsep.join(map(str, places)))
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    monkeypatch.setattr(diagnosis, "INSTALLATION", Installation())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one H200, all software, an empty cache, and a bundle for it."""
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    have(monkeypatch, _version="1.2.3", _driver_version="13.0", torch_cuda="cu13", _gpus=(H200,))
    have(monkeypatch, find_runtime_library=LIBRARY)
    bundle = write_synthetic_bundle(tmp_path / "hopper.nvgemm", "sm_90a")
    name_bundles(monkeypatch, bundle)
    return bundle


def problems() -> str:
    result = run("--json")
    document = json.loads(result.stdout)
    assert document["healthy"] is (not document["problems"])
    assert result.exit_code == (UnhealthyError.exit_code if document["problems"] else 0)
    return "\n".join(document["problems"])


def test_a_machine_with_everything_is_healthy(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems() == ""
    result = run()
    assert result.exit_code == 0
    assert result.stdout.endswith("\n\nkernels can be built here\n\nkernels can be run here\n")
    for part in ("NVIDIA H200, compute capability 9.0", "13.0", str(LIBRARY.path), str(machine)):
        assert part in result.stdout
    assert "  GPU 0: served" in result.stdout
    have(monkeypatch, find_runtime_library=replace(LIBRARY, version=UNKNOWN_VERSION))
    assert problems() == ""
    assert f"{LIBRARY.path} (unknown version)" in run().stdout


CUT_OFF = replace(LIBRARY, defect="it is truncated: 10 bytes, a table needs 64")


@pytest.mark.parametrize(
    ("part", "found", "said"),
    [
        ("_driver_version", None, "no CUDA driver: libcuda.so.1"),
        ("torch_cuda", None, "torch 1.2.3 is a CPU build, or broken; install one for CUDA 13 or "),
        ("torch_cuda", RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (
            "find_runtime_library",
            None,
            "run: pip install 'nvidia-cutlass-dsl-libs-cu13>=4.5.2,<4.9'",
        ),
        ("find_runtime_library", CUT_OFF, "/lib.so cannot be loaded: it is truncated: 10 bytes"),
        (
            "find_runtime_library",
            CUT_OFF,
            "--force-reinstall --no-deps 'nvidia-cutlass-dsl-libs-cu13==4.8.1'",
        ),
        ("_gpus", (), "torch sees no GPU"),
        ("_gpus", RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        ("offered_providers", ToolchainError("entry points cannot be read"), "cannot be read"),
        ("_gpus", (replace(H200, capability=(8, 0), name="A100"),), "no bundle serves A100"),
    ],
)
def test_says_what_is_missing_or_broken(
    machine: Path, monkeypatch: pytest.MonkeyPatch, part: str, found: Any, said: str
) -> None:
    have(monkeypatch, **{part: found})
    assert said in problems()
    assert run().stdout.endswith("\nkernels cannot be run here\n")


def test_a_mode_that_is_none_is_a_problem(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "requird")
    assert problems() == "NVGEMM_AOT=requird: allowed are auto, required, off"


def test_says_which_distribution_is_missing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"apache-tvm-ffi", "nvidia-cutlass-dsl"}
    monkeypatch.setattr(diagnosis, "_version", lambda name: None if name in missing else "1")
    said = "apache-tvm-ffi is not installed; run: pip install . in nvgemm-aot's checkout"
    assert problems().startswith(said)
    text = run().stdout
    assert "to build kernels: nvidia-cutlass-dsl is not installed; run: pip install '.[bu" in text
    assert "\nkernels cannot be built here\n\nto run kernels: apache-tvm-ffi" in text


def test_a_base_install_is_told_nothing_of_what_building_needs(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"nvgemm-aot", "torch", "apache-tvm-ffi", "zstandard"}
    monkeypatch.setattr(diagnosis, "_version", lambda name: "1" if name in base else None)
    monkeypatch.setattr(diagnosis, "load_provider", _unusable)
    assert problems() == ""
    text = run().stdout
    assert re.search(r"^builder +not installed; running kernels does not need it$", text, re.M)
    assert "provider " not in text
    assert "can be built" not in text
    assert text.endswith("kernels can be run here\n")


def _unusable(name: str) -> None:
    raise ToolchainError(f"{name} needs the compiler")


def test_a_build_machine_is_told_that_it_can_build_and_which_library_it_has(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, _driver_version=None, torch_cuda=None)
    name_bundles(monkeypatch)
    result = run()
    assert result.exit_code == UnhealthyError.exit_code
    assert f"runtime library             {LIBRARY.path} (4.8.1)" in result.stdout
    assert "\nkernels can be built here\n\nto run kernels: no CUDA driver" in result.stdout
    assert "is missing; run:" not in result.stdout
    have(monkeypatch, linker_version=ToolchainError("no C compiler"))
    assert "\nto build kernels: no C compiler\nkernels cannot be built here\n" in run().stdout


def test_a_launcher_that_does_not_load_is_a_problem(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise ToolchainError("_native.so is missing")

    monkeypatch.setattr(native, "load", load)
    assert problems() == "_native.so is missing"


def test_each_bundle_is_judged_for_each_gpu(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, _gpus=(H200, replace(H200, capability=(10, 0), name="NVIDIA B200")))
    b200 = "no bundle serves NVIDIA B200, compute capability 10.0"
    assert problems().startswith(f"{b200}: {machine}: sm_90a kernels")
    other = write_synthetic_bundle(tmp_path / "blackwell.nvgemm", "sm_100f")
    name_bundles(monkeypatch, machine, other)
    assert problems() == ""
    text = run().stdout
    assert "  GPU 0: served\n  GPU 1: sm_90a kernels do not run on NVIDIA B200" in text
    assert "  GPU 0: sm_100f kernels do not run on NVIDIA H200" in text


def test_says_whose_order_of_kernels_a_gpu_of_no_listed_product_gets(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tmp_path / "both.nvgemm"
    with Bundle(machine) as bundle:
        content = read_content(bundle)
    further = tuple(
        replace(one, source=replace(one.source, gpu="NVIDIA H100"), is_further=True)
        for one in content.rankings
    )
    write_bundle(both, replace(content, rankings=(*content.rankings, *further)))
    name_bundles(monkeypatch, machine, both)
    names = ("NVIDIA H200", "NVIDIA H100", "NVIDIA H20")
    have(monkeypatch, _gpus=tuple(replace(H200, name=name) for name in names))
    alone, together = run().stdout.split(str(machine))[-1].split(str(both))

    def guess(gpu: str) -> str:
        return f"served with the rankings for NVIDIA H200: the bundle has none for {gpu}"

    for text, of_h100 in ((alone, guess("NVIDIA H100")), (together, "served\n")):
        assert "  GPU 0: served\n" in text
        assert f"  GPU 1: {of_h100}" in text
        assert f"  GPU 2: {guess('NVIDIA H20')}; to measure, run there: nvgemm-aot confirm" in text


def test_says_which_confirmations_count_here(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path / "confirmed"))
    versions = TorchVersions(torch="2.14.0+cu130", cuda="13.0")
    have(monkeypatch, torch_versions=versions)
    key = "mm/tn/bf16xbf16/fp32/bf16/m8n64k64"

    def write(name: str, gpu: str, torch: str) -> None:
        conditions = Conditions(driver="1", torch=torch, cuda="13.0", date="2026-11-28")
        times = ConfirmedTimes(
            kernels={"a" * 64: Timing(time_ns=90, spread_ns=1)},
            aten=Timing(time_ns=100, spread_ns=1),
        )
        confirmations = Confirmations(gpu=gpu, by="x", conditions=conditions, problems={key: times})
        write_confirmations(confirmations, tmp_path / "confirmed" / f"{name}.confirmed.json")

    def rows() -> list[str]:
        name_bundles(monkeypatch, machine)
        assert problems() == ""
        return [row for row in run().stdout.splitlines() if row.startswith("confirmed rankings")]

    assert rows() == []
    write("a", "NVIDIA H200", "2.14.1")
    write("b", "NVIDIA H200", "2.13.0")
    write("c", "NVIDIA B200", "2.14.1")
    (tmp_path / "confirmed" / "d.confirmed.json").write_text("{}")
    here, older, elsewhere, damaged = rows()
    assert "NVIDIA H200 with torch 2.14.1, CUDA 13.0, 2026-11-28: kernels gain" in here
    assert here.endswith("kernels gain 2% or more in 1 of 1 GEMMs")
    assert "does not count here: ATen was measured with torch 2.13.0, this is 2.14" in older
    assert elsewhere.endswith("does not count here: measured on NVIDIA B200")
    assert "left out: " in damaged
    assert "no confirmations: format must be" in damaged


def test_each_refusal_names_its_bundles_and_stands_once(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = [
        write_synthetic_bundle(tmp_path / f"arm{i}.nvgemm", "sm_90a", platform="linux_aarch64")
        for i in (1, 2)
    ]
    blackwell = write_synthetic_bundle(tmp_path / "blackwell.nvgemm", "sm_100f")
    (broken := tmp_path / "broken.nvgemm").write_bytes(b"broken")
    name_bundles(monkeypatch, arm[0], blackwell, arm[1], broken)
    said = problems().splitlines()[-1]
    head, *refusals = said.split(f"{tmp_path}/")
    assert head == "no bundle serves NVIDIA H200, compute capability 9.0: "
    assert [one.split(" ")[0] for one in refusals] == [
        *("arm1.nvgemm,", "arm2.nvgemm:", "blackwell.nvgemm:", "broken.nvgemm:")
    ]
    assert said.count("built for platform linux_aarch64") == 1
    assert f"; {blackwell}: sm_100f kernels do not run on NVIDIA H200" in said
    assert f"; {broken}: [truncated]" in said


def test_a_bundle_for_a_target_of_later_releases_is_refused_without_a_gpu_too(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = write_synthetic_bundle(tmp_path / "later.nvgemm", "gfx950")
    name_bundles(monkeypatch, later)
    have(monkeypatch, _gpus=())
    refused = "target gfx950-linux_x86_64-cu13 is unknown to this release; upgrade"
    assert f"no bundle serves this process: {later}: {refused}" in problems()
    assert f"\n  {refused}" in run().stdout


def test_a_broken_or_forbidden_bundle_is_a_problem_beside_a_good_one_and_none_at_all(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, open_ = tmp_path / "broken.nvgemm", tmp_path / "open.nvgemm"
    broken.write_bytes(b"broken")
    open_.write_bytes(machine.read_bytes())
    open_.chmod(0o666)
    name_bundles(monkeypatch, broken, machine, open_)
    said = problems()
    assert "broken.nvgemm: [truncated]" in said
    assert "open.nvgemm can be written by others" in said
    assert "no bundle serves" not in said
    name_bundles(monkeypatch)
    assert "no bundle is installed; install a kernel wheel" in problems()


def test_a_wheel_without_its_bundle_or_its_record_is_a_problem_beside_a_good_bundle(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, damaged = install_lost_and_damaged(tmp_path, monkeypatch)
    said = problems().splitlines()
    assert [place for place, one in enumerate(said) if f"{lost} is missing" in one] == [1]
    assert ["reinstall" in one for one in said] == [True, True]
    assert "distribution nvgemm-kernels-damaged cannot be used: it has no RECORD" in said[0]
    text = run().output
    assert f"{lost} (nvgemm-kernels-lost 1.0): unusable" in text
    assert f"{damaged} (nvgemm-kernels-damaged 1.0): unusable" in text
    assert "served" in text


def test_a_bundle_without_a_kernel_that_can_be_launched_is_a_problem(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling_convention, "_FORM", re.compile("never"))
    calling_convention.parse_calling_convention.cache_clear()
    try:
        said = problems()
    finally:
        calling_convention.parse_calling_convention.cache_clear()
    h200 = "no bundle serves NVIDIA H200, compute capability 9.0"
    assert said.startswith(f"{h200}: {machine}: none of its 1")
    assert "calling convention 'tvm_ffi:gemm(a,b,out,stream)'" in said


def test_a_runtime_library_that_lacks_a_symbol_is_a_problem_with_its_next_step(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write_bytes(REAL_SM_90A.read_bytes())
    (lacking,) = EARLIER_SYMBOLS  # the bundle was built before it was done without
    old = replace(LIBRARY, version="4.6.3", exports=DEVICE_SYMBOLS)
    have(monkeypatch, _gpus=(replace(H200, runtime_library=old),))
    said = problems()
    assert said.startswith("no bundle serves NVIDIA H200, compute capability 9.0: ")
    assert f"import {lacking}, which the installed nvidia-cutlass-dsl-libs-cu13 4.6.3 does" in said
    assert said.endswith("run: pip install 'nvidia-cutlass-dsl-libs-cu13>=4.7'")


def test_a_driver_too_old_for_the_kernels_is_told_from_hidden_gpus(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, _driver_version="12.4", _gpus=())
    said = problems()
    assert said.startswith("the driver is for CUDA 12.4 and cannot load device code for cu13")
    assert "update NVIDIA's driver to one for CUDA 13" in said
    assert "CUDA_VISIBLE_DEVICES" not in said


def test_a_library_without_a_symbol_is_told_without_a_gpu_too(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lacking,) = EARLIER_SYMBOLS  # the bundle was built before it was done without
    old = replace(LIBRARY, version="4.6.3", exports=DEVICE_SYMBOLS)
    machine.write_bytes(REAL_SM_90A.read_bytes())
    have(monkeypatch, find_runtime_library=old, _gpus=())
    said = problems()
    process = f"no bundle serves this process: {machine}"
    assert f"{process}: kernels import {lacking}, which the installed" in said
    assert said.endswith("run: pip install 'nvidia-cutlass-dsl-libs-cu13>=4.7'")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"platform": "linux_aarch64"},
            "built for platform linux_aarch64, this is linux_x86_64; install its wheel for "
            "linux_x86_64, or build for platform: linux_x86_64",
        ),
        (
            {"cuda": "cu12"},
            "built for cu12, torch uses cu13; build for cuda: cu13, or install a torch for CUDA 12",
        ),
    ],
)
def test_a_bundle_for_another_process_says_so_without_a_gpu_too(
    machine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: dict[str, Any],
    reason: str,
) -> None:
    foreign = write_synthetic_bundle(tmp_path / "foreign.nvgemm", "sm_90a", **other)
    name_bundles(monkeypatch, foreign)
    h200 = "no bundle serves NVIDIA H200, compute capability 9.0"
    assert f"{h200}: {foreign}: {reason}" in problems()
    have(monkeypatch, _gpus=())
    assert f"no bundle serves this process: {foreign}: {reason}" in problems()
    assert f"\n  {reason}" in run().stdout
    name_bundles(monkeypatch, foreign, machine)
    assert "no bundle serves" not in problems()
    assert f"\n  {reason}" in run().stdout


def test_the_policy_is_shown_with_what_it_refuses(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = utc_today()
    monkeypatch.setattr(policy_here, "utc_today", lambda: today)
    keys = {name: new_key(tmp_path, name) for name in ("ends", "ended", "later", "gone", "open")}
    until = {
        "ends": str(today + timedelta(days=30)),
        "ended": str(today - timedelta(days=1)),
        "later": str(today + timedelta(days=31)),
    }
    path = tmp_path / "policy.yaml"
    set_policy(monkeypatch, path, keys, until=until, revoked=(keys["gone"],))
    text = run().stdout
    for expected in (
        f"policy                      {path}: 5 keys, 1 revoked; unsigned files are refused",
        f"ends: ends on {until['ends']}, 30 days from now: sign with another",
        f"ended: ended on {until['ended']}",
        f"later: until {until['later']}",
        "gone: revoked",
        "open: without an end",
    ):
        assert " ".join(expected.split()) in " ".join(text.split())
    assert f"{machine}: no key that counts in the policy {path} signed it" in problems()
    set_policy(monkeypatch, path, keys, required=False)
    name_bundles(monkeypatch, machine)
    assert problems() == ""
    assert "not signed by a key of the policy, which accepts that" in run().stdout
    sign_bundle(machine, keys["open"])
    name_bundles(monkeypatch, machine)
    assert "\n  signed by open\n" in run().stdout
    path.write_text("keys: 1")
    name_bundles(monkeypatch, machine)
    broken = f"policy {path}: keys: a text of 1 characters; allowed: a list"
    assert problems().splitlines().count(broken) == 1


def test_what_may_not_be_looked_at_is_a_problem_and_no_crash(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/site/nvidia")

    monkeypatch.setattr(diagnosis, "find_runtime_library", refused)
    monkeypatch.setattr(diagnosis.INSTALLATION, "bundles", refused)
    said = problems()
    assert said.count("PermissionError: [Errno 13] Permission denied: '/site/nvidia'") == 2
    assert "is missing" not in said
    assert "no bundle" not in said


def test_the_cache_is_described_and_no_problem_where_it_may_not_be_looked_at(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tmp_path / "cache" / "entries" / "ab"
    entries.mkdir(parents=True)
    (entries / "abc").write_bytes(bytes(1000))
    assert json.loads(run("--json").stdout)["cache"] == {
        "directory": str(tmp_path / "cache"),
        "writable": True,
        "entries": 1,
        "size_bytes": 1000,
    }
    assert "1 entry, 1000 B" in run().stdout

    def refused(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refused)
    assert problems() == ""
    assert ", not writable" in run().stdout


def test_works_for_real_on_this_machine(tmp_path: Path) -> None:
    """Nothing is replaced: on a machine without a GPU it says so, on one with a GPU what it is."""
    import torch

    environment = {**os.environ, "NVGEMM_AOT_CACHE": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "nvgemm_aot", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["healthy"] else UnhealthyError.exit_code)
    assert document["launcher"] is True
    assert len(document["gpus"]) == torch.cuda.device_count()
    if not document["gpus"]:
        assert "no CUDA driver" in done.stdout or "torch" in done.stdout
        assert "error" in done.stderr
    assert list(tmp_path.iterdir()) == []
