"""Kernels for Arm from the tests' provider, and `tests/arm/run`, as far as they go without qemu."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import arm_provider
import pytest

import cpu_provider
from nvgemm_aot.verify.bundle import HOST_ONLY, verify_bundle
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.device import device_facts, host_platform

SCRIPT = Path(__file__).with_name("run")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    loader = SourceFileLoader("arm_run", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


SERVED = (cpu_provider.SIGNATURES[0], cpu_provider.FUSED[0])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arm_provider.build_bundle(tmp_path_factory.mktemp("arm"), SERVED)


@pytest.mark.slow
def test_kernels_for_arm_are_reproducible_and_pass_verify(bundle: Path, tmp_path: Path) -> None:
    again = arm_provider.build_bundle(tmp_path, SERVED)
    assert bundle.name == "arm-cpu-linux_aarch64-cu13.nvgemm"
    assert bundle.read_bytes() == again.read_bytes()
    report = verify_bundle(bundle)
    assert report.ok, report.findings
    assert report.notes == (HOST_ONLY,)


@pytest.mark.slow
def test_a_bundle_for_arm_is_refused_elsewhere_with_the_reason(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host_platform() == arm_provider.PLATFORM:
        pytest.skip("this is an Arm machine")
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(bundle))
    (found,) = Installation().bundles()
    said = f"built for platform linux_aarch64, this is {host_platform()}"
    assert str(found.refusal(device_facts("cpu", 0))).startswith(said)


def test_missing_programs_are_named_with_their_packages(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "qemu-aarch64" else name)
    assert script.missing_programs() == ["qemu-aarch64 (Debian: apt-get install qemu-user)"]


def test_requirements_are_those_of_the_wheel_and_of_one_extra(
    script: ModuleType, tmp_path: Path
) -> None:
    lines = [
        "Metadata-Version: 2.4", "Name: x", "Requires-Dist: torch<2.16,>=2.11",
        "Requires-Dist: libs-cu13>=4.7; extra == 'cu13'",
        'Requires-Dist: libs-cu12; extra == "cu12"',
    ]  # fmt: skip
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x.dist-info/METADATA", "\n".join(lines) + "\n\nText\n")
    assert script.requirements(wheel, "cu13") == ["torch<2.16,>=2.11", "libs-cu13>=4.7"]
    assert script.requirements(wheel, "cu12") == ["torch<2.16,>=2.11", "libs-cu12"]


def test_the_described_processor_is_arms(script: ModuleType, tmp_path: Path) -> None:
    script.describe_processor(tmp_path)
    text = (tmp_path / "proc/cpuinfo").read_text()
    assert text.startswith("processor\t: 0\n")
    assert "CPU implementer\t: 0x41" in text
