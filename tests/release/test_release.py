"""What wheels/release refuses of a native part."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import nvgemm_runtime

SCRIPT = Path(__file__).parents[2] / "wheels" / "release"
_loader = SourceFileLoader("wheels_release", str(SCRIPT))
_spec = importlib.util.spec_from_loader(_loader.name, _loader)
assert _spec is not None
release = importlib.util.module_from_spec(_spec)
_loader.exec_module(release)


def test_a_native_part_for_another_processor_is_found() -> None:
    image = (Path(nvgemm_runtime.__file__).parent / "_native.so").read_bytes()
    processor = "aarch64" if image[18] == 62 else "x86_64"  # e_machine
    assert any("is allowed" in finding for finding in release.native_findings(image, processor))


def test_a_compilers_own_library_is_found() -> None:
    # The installed native part comes from the machine's compiler, which needs libstdc++.
    image = (Path(nvgemm_runtime.__file__).parent / "_native.so").read_bytes()
    processor = "x86_64" if image[18] == 62 else "aarch64"
    findings = release.native_findings(image, processor)
    assert any("libstdc++.so.6" in finding for finding in findings)
