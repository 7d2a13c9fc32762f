"""A provider whose new version renames its operators: nothing of the old one is mixed up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreign_packages import write_package
from nvgemm_runtime.bundle.reader import Bundle

pytestmark = pytest.mark.slow

PROVIDER = """
from dataclasses import replace
from fake_provider import FakeProvider, candidate
from nvgemm_aot.providers import Enumeration

NAMES = {names}

class Foreign(FakeProvider):
    name = "foreign"

    def enumerate(self, signature, target):
        return Enumeration(candidates=tuple(
            replace(candidate(name, signature, tile=(64, 64, 64 * place)), provider=self.name)
            for place, name in enumerate(NAMES, start=1)
        ))

    def compile(self, candidate, target):
        place = NAMES.index(candidate.operator)  # which it does not have is an error
        return super().compile(replace(candidate, operator=f"code{{place}}"), target)
"""

MANIFEST = """
version: 1
name: renamed
targets: [sm_90a]
providers: [foreign]
gemms: [{dtype: bf16, mnk: [[64, 256, 256]]}]
"""


class Machine:
    """A machine on which the command is called with one version of the package installed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = directory / "renamed.yaml"
        self.manifest.write_text(MANIFEST, encoding="utf-8")

    def install(self, version: str, names: tuple[str, ...]) -> Path:
        site = self.directory / f"site-{version}-{'-'.join(names)}"
        write_package(site, "renaming", PROVIDER.format(names=names), version=version)
        return site

    def build(self, site: Path, out: str = "out") -> dict[str, object]:
        code = "from nvgemm_aot.__main__ import main; main()"
        arguments = ["build", str(self.manifest), "-o", str(self.directory / out), "-j1", "--json"]
        path = os.pathsep.join([str(site), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": path, "NVGEMM_AOT_CACHE": str(self.directory / "c")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def kernels(self, out: str = "out") -> dict[str, str]:
        """Names of the bundle's operators, and the digest of each one's code."""
        (path,) = (self.directory / out).glob("*.nvgemm")
        with Bundle(path) as bundle:
            bundle.check_body()
            return {kernel.operator: kernel.id for kernel in bundle.header.kernels}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_renamed_operator_is_planned_and_compiled_by_its_new_name(machine: Machine) -> None:
    assert machine.build(machine.install("1.0", ("one", "two")))["compiled"] == 2
    old = machine.kernels()
    assert old.keys() == {"one", "two"}
    again = machine.build(machine.install("1.1", ("uno", "two")))
    assert again["unserved"] == []
    new = machine.kernels()
    assert new.keys() == {"uno", "two"}
    assert new["uno"] == old["one"], "the code is the same, and so is its name in bundles"
    assert new["two"] == old["two"]


def test_an_operator_that_takes_anothers_name_does_not_take_its_code(machine: Machine) -> None:
    machine.build(machine.install("1.0", ("one", "two")))
    old = machine.kernels()
    machine.build(machine.install("1.1", ("two", "one")))
    new = machine.kernels()
    assert (new["one"], new["two"]) == (old["two"], old["one"])


def test_changed_code_is_compiled_anew_though_names_and_version_are_the_same(
    machine: Machine,
) -> None:
    site = machine.install("1.0", ("one", "two"))
    machine.build(site)
    old = machine.kernels()
    source = site / "renaming.py"
    source.write_text(source.read_text().replace('f"code{', 'f"other{'))
    assert machine.build(site)["compiled"] == 2
    new = machine.kernels()
    assert new.keys() == old.keys()
    assert not set(new.values()) & set(old.values())
