"""Beside which serving engines and libraries this package can be installed."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import engines
from engines import Engine, Resolution
from repository import ROOT

ROWS = engines.load()
DOCS = ROOT / "docs/guide/installing.md"
LIBRARY = "nvidia-cutlass-dsl-libs-cu13"
each = pytest.mark.parametrize("engine", ROWS, ids=lambda one: one.text.replace(" ", "-"))


def own_ranges() -> dict[str, Requirement]:
    """What installing this package with the library of CUDA 13 requires."""
    lines = [Requirement(line) for line in requires("nvgemm-aot") or ()]
    cuda = {"extra": "cu13"}
    return {line.name: line for line in lines if line.marker is None or line.marker.evaluate(cuda)}


def pins(engine: Engine) -> dict[str, Version]:
    """Exact versions that an engine requires; the compiler package stands for its library."""
    found = {}
    for line in map(Requirement, engine.requires):
        for one in line.specifier:
            if one.operator == "==" and not one.version.endswith("*"):
                name = canonicalize_name(line.name)
                name = LIBRARY if name == "nvidia-cutlass-dsl" else name
                found[name] = Version(one.version)
    return found


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Resolution]:
    found = engines.resolve_all(ROWS, tmp_path_factory.mktemp("engines"))
    return {one.text: resolution for one, resolution in zip(ROWS, found)}


def test_the_engines_that_the_docs_promise_are_there() -> None:
    there = {one.text for one in ROWS}
    assert {f"vllm 0.{minor}.0" for minor in (24, 26, 30, 33)} <= there
    assert {"sglang", "flashinfer-python", "quack-kernels", "torchtitan"} <= {
        one.name for one in ROWS
    }


@each
def test_what_an_engine_pins_is_in_our_ranges_where_it_resolves(engine: Engine) -> None:
    """Needs no registry, and so decides where there is none."""
    ranges = own_ranges()
    outside = {
        name: str(version)
        for name, version in pins(engine).items()
        if name in ranges and version not in ranges[name].specifier
    }
    assert (outside == {}) == engine.resolves, outside


@pytest.mark.slow
@each
def test_uv_resolves_beside_an_engine_or_says_that_the_library_is_too_old(
    engine: Engine, resolved: dict[str, Resolution]
) -> None:
    found = resolved[engine.text]
    if found.unreachable:
        pytest.skip(f"no registry that has all of it: {found.reason[:300]}")
    assert (found.versions is not None) == engine.resolves, found.reason
    if found.versions is None:
        assert LIBRARY in found.reason
        return
    for name, version in pins(engine).items():
        assert Version(found.versions[name]) == version
    for name, requirement in own_ranges().items():
        assert requirement.specifier.contains(found.versions[name], prereleases=True)


@pytest.mark.slow
def test_a_conflict_is_told_from_a_registry_that_does_not_answer(tmp_path: Path) -> None:
    wheel = engines.own_wheel(tmp_path)
    own = own_ranges()[LIBRARY]
    conflict = engines.resolve([f"{LIBRARY}<4.5.2", "nvgemm-aot[cu13]"], wheel, tmp_path / "cache")
    assert conflict.versions is None
    assert conflict.unreachable or str(own.specifier).split(",")[0] in conflict.reason


def test_the_docs_have_the_table() -> None:
    assert engines.table(ROWS) in DOCS.read_text()
