"""Providers of other packages are found by entry points, and what is no provider is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_provider import FakeProvider
from foreign_packages import write_package
from nvgemm_aot.manifest.parse import Declared
from nvgemm_aot.pipeline.target_plan import look_up_plan
from nvgemm_aot.providers import PROVIDERS, load_provider
from nvgemm_aot.providers.checking.checked import Checked
from nvgemm_aot.providers.discovery import Offered, offered_providers
from nvgemm_aot.providers.sources import source_modules
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Problem

GOOD = """
from fake_provider import FakeProvider

class Foreign(FakeProvider):
    name = "foreign"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    return site


def test_an_entry_point_names_a_provider_and_its_version_is_part_of_the_toolchain(
    site: Path,
) -> None:
    write_package(site, "good_foreign", GOOD, version="1.5")
    found = load_provider("foreign")
    assert isinstance(found, Checked)
    assert found.name == "foreign"
    assert found.toolchain() == {**FakeProvider().toolchain(), "foreign": "1.5"}
    assert Offered(name="foreign", distribution="foreign", version="1.5") in offered_providers()
    both = load_provider("cutlass_operators+foreign")
    assert both.toolchain()["foreign"] == "1.5"


def test_a_new_version_of_the_package_is_planned_anew(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(site, "good_foreign", GOOD, version="1.5")
    target, cache = build_target("sm_90a"), Cache(tmp_path / "cache")
    problem = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m8n64k64")
    declared = (Declared(problem=problem, candidates=2),)
    old = look_up_plan(declared, target, load_provider("foreign"), cache)
    info = site / "foreign-1.5.dist-info"
    metadata = (info / "METADATA").read_text()
    info.rename(site / "foreign-1.6.dist-info")
    (site / "foreign-1.6.dist-info" / "METADATA").write_text(metadata.replace("1.5", "1.6"))
    new = look_up_plan(declared, target, load_provider("foreign"), cache)
    assert old.key != new.key


def test_plans_depend_on_the_source_of_the_package(site: Path) -> None:
    write_package(site, "good_foreign", GOOD)
    assert "good_foreign" in source_modules(load_provider("foreign"))


@pytest.mark.parametrize("name", list(PROVIDERS))
def test_a_package_cannot_take_the_name_of_a_provider_that_comes_along(
    site: Path, name: str
) -> None:
    write_package(site, "good_foreign", GOOD, names=(name,))
    assert type(load_provider(name)).__module__ == f"nvgemm_aot.providers.{name}"


def test_two_packages_of_one_name_are_refused_both_named(site: Path) -> None:
    write_package(site, "good_foreign", GOOD, distribution="one", version="1.0")
    write_package(site, "good_foreign", GOOD, distribution="two", version="2.0")
    with pytest.raises(ToolchainError, match=r"one 1\.0 and two 2\.0 both define .* 'foreign'"):
        load_provider("foreign")
    with pytest.raises(ToolchainError, match="has the name 'foreign'"):
        load_provider("good_foreign:Foreign")


def test_an_unknown_name_lists_what_there_is(site: Path) -> None:
    write_package(site, "good_foreign", GOOD)
    with pytest.raises(
        ToolchainError, match=r"known: .*cutlass_operators, foreign, gathered, quack.*install"
    ):
        load_provider("foreing")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no GPU here')", r"RuntimeError: no GPU here \(.*bad_foreign\.py:1\)"),
        ("import sys; sys.exit(3)", "cannot be created: SystemExit: 3"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("x = 1", "AttributeError"),
        ("def Foreign(): raise KeyError('key')", r"KeyError: 'key' \(.*bad_foreign\.py:1\)"),
        ("class Foreign: pass", "is not a provider: it lacks interface, name, recipe, toolchain"),
        (
            GOOD + "    recipe = property(lambda self: 1 // 0)",
            "cannot be created: ZeroDivisionError",
        ),
        (GOOD + "    interface = 2", r"interface version 2; this nvgemm-aot supports 1"),
        (GOOD + "    interface = '1'", "its interface is '1', must be of type int"),
        (GOOD + "    recipe = ''", "its recipe is '', must be of type str and not empty"),
        (GOOD + r"    recipe = '\x1b[2J'", r"its recipe is '\\x1b\[2J', must be printable text"),
        (GOOD + "    compile = None", "its compile is not a method"),
        (GOOD.replace('"foreign"', '"other"'), "has the name 'other'; .* with 'other'"),
    ],
)
def test_what_is_no_provider_is_an_error_with_a_reason(site: Path, text: str, said: str) -> None:
    write_package(site, "bad_foreign", text)
    try:
        with pytest.raises(ToolchainError, match=said):
            load_provider("foreign")
    finally:
        import sys

        sys.modules.pop("bad_foreign", None)


def test_what_an_entry_point_names_must_be_a_class(site: Path) -> None:
    write_package(site, "no_class", GOOD + "\nTILES = (1, 2)\n", attribute="TILES")
    with pytest.raises(
        ToolchainError, match="is a tuple, must be a class; name a class as module:class"
    ):
        load_provider("foreign")


def test_a_panic_at_import_is_the_providers_error(site: Path) -> None:
    write_package(site, "panicking", "class Panic(BaseException): ...\nraise Panic('broken')\n")
    with pytest.raises(ToolchainError, match="'foreign' cannot be created: Panic: broken"):
        load_provider("foreign")


def test_damaged_entry_points_are_an_error_that_says_what_to_do(site: Path) -> None:
    write_package(site, "good_foreign", GOOD)
    (site / "foreign-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[[")
    with pytest.raises(ToolchainError, match=r"reinstall or uninstall distribution foreign$"):
        offered_providers()


@pytest.mark.parametrize("command", ["schema", "build"])
def test_a_command_that_imports_what_reads_entry_points_says_which_are_damaged(
    site: Path, tmp_path: Path, command: str
) -> None:
    """Pydantic reads all at its import, as torch does."""
    write_package(site, "good_foreign", GOOD)
    (site / "foreign-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[[")
    arguments = ["no.yaml"] if command == "build" else []
    done = subprocess.run(
        [sys.executable, "-m", "nvgemm_aot", command, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (ToolchainError.exit_code, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("nvgemm-aot: error: the entry points of installed packages cannot be")
    assert said.endswith("; reinstall or uninstall distribution foreign")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_package_without_metadata_has_no_name(site: Path, replaced: bool) -> None:
    if replaced:
        pytest.importorskip("importlib_metadata")  # answers in Python's place from now on
    write_package(site, "good_foreign", GOOD)
    (site / "foreign-1.0.dist-info" / "METADATA").unlink()
    (found,) = [one for one in offered_providers() if one.name == "foreign"]
    assert (found.distribution, found.version) == ("an unknown distribution", "unknown")
