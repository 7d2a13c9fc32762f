"""The functions at which plug-ins enter engines, in the sources of each release."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import engine_sources
from engine_sources import SEAMS, Release
from nvgemm_runtime.engines.seams import Engine, Seam
from nvgemm_runtime.engines.sglang_plugin import SGLANG
from nvgemm_runtime.engines.vllm_plugin import VLLM
from nvgemm_runtime.errors import RequiredError

RELEASES = engine_sources.load()
ENGINES = {"vllm": VLLM, "sglang": SGLANG}


@pytest.mark.parametrize("release", RELEASES, ids=lambda one: f"{one.name}-{one.version}")
def test_a_release_has_the_functions(release: Release) -> None:
    assert ENGINES[release.name].why_unknown(release.version) is None
    for seam in SEAMS[release.name]:
        parameters = release.of(seam)
        assert parameters is not None, seam
        assert seam.find_difference(parameters) is None


@pytest.mark.parametrize(("name", "engine"), ENGINES.items())
def test_first_and_last_release_were_read(name: str, engine: Engine) -> None:
    numbers = [
        tuple(map(int, one.version.split(".")))[: len(engine.first)]
        for one in RELEASES
        if one.name == name
    ]
    assert (min(numbers), max(numbers)) == (engine.first, engine.last)


def test_reads_sources(tmp_path: Path) -> None:
    kernels = tmp_path / "vllm/model_executor/kernels/linear"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").write_text("from .cutlass import CutlassFP8ScaledMMLinearKernel\n")
    (kernels / "cutlass.py").write_text(
        "class CutlassFP8ScaledMMLinearKernel:\n    def apply_scaled_mm(self, *, A): ...\n"
    )
    release = engine_sources.read("vllm", "0.99.0", tmp_path)
    assert [parameters for parameters in release.parameters.values() if parameters] == [
        ["self", "A"]
    ]


def test_a_seam_describes_the_difference() -> None:
    seam = Seam(module="logging", name="Logger.log", parameters=("self", "level", "text"))
    assert seam.find_mismatch() == (
        "logging.Logger.log takes (self, level, msg, args, kwargs), must begin with "
        "(self, level, text)"
    )
    absent = Seam(module="no.such.module", name="function", parameters=())
    assert absent.find_mismatch() == "no.such.module has no function function"


def test_errors_that_the_user_asked_for_pass() -> None:
    def fail() -> None:
        raise RequiredError("no kernel", ())

    with pytest.raises(RequiredError, match="no kernel"):
        Engine(name="x", package="x", first=(1,), last=(1,), log=logging.getLogger("x")).guard(
            fail, "all"
        )
