"""Installations of which files are missing or damaged: torch goes on, with one warning."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import nvgemm_aot_autoload
import nvgemm_runtime
from fresh_processes import Home, Ran
from nvgemm_aot.pipeline.pipeline import BuiltBundle

pytestmark = pytest.mark.slow

SAYS = "nvgemm-aot is disabled in torch.compile"


def remove(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble(file: Path) -> None:
    file.write_bytes(b"\x00\xff def (")


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def panic(file: Path) -> None:
    """What extension modules raise on bad days, which is no Exception."""
    file.write_text("class Panic(BaseException): ...\nraise Panic('on purpose')\n")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What became of a file.

    Attributes:
        way: What happens to it.
        says: A word of the one warning; None where nothing is lost, and none is given.
        compiles: Whether it is looked at what becomes of torch.compile.
    """

    file: str
    way: Callable[[Path], None]
    says: str | None = "reinstall"
    compiles: bool = False

    def __str__(self) -> str:
        return f"{self.file} {self.way.__name__}"


DAMAGES = [
    Damage(file="inductor/autoload.py", way=remove),
    Damage(file="inductor/autoload.py", way=empty, compiles=True),
    Damage(file="inductor/autoload.py", way=panic),
    Damage(file="__init__.py", way=remove),
    Damage(file="__init__.py", way=panic),
    Damage(file="inductor/__init__.py", way=garble),
    Damage(file="inductor/__init__.py", way=remove, says=None),  # nothing of it is needed
    Damage(file="settings.py", way=garble, says="SyntaxError"),
    Damage(file="gemm/problem.py", way=cut, says="problem", compiles=True),
]

ONLY_FROM = """
import sys
from importlib.machinery import PathFinder

class Only:
    def find_spec(self, name, path=None, target=None):
        is_runtime = name in ("nvgemm_runtime", "nvgemm_aot_autoload")
        return PathFinder.find_spec(name, [{site!r}]) if is_runtime else None

sys.meta_path.insert(0, Only())
"""
"""Hides the installed runtime, which would be found instead of a package without __init__.py."""


@pytest.fixture(scope="module")
def ran(
    recording_bundle: BuiltBundle, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Damage], Ran]:
    """Runs a program that compiles GEMMs over a damaged installation, once for each damage."""

    @functools.cache
    def run(damage: Damage) -> Ran:
        directory = tmp_path_factory.mktemp("damaged")
        site = directory / "site"
        damage.way(installation(site) / damage.file)
        return run_from(site, recording_bundle, compiles=damage.compiles)

    return run


def run_from(site: Path, bundle: BuiltBundle, **options: Any) -> Ran:
    """Run a program with a bundle and the runtime that was copied to a directory, and no other."""
    return Home(site.parent / "home").run(
        site,
        before=ONLY_FROM.format(site=str(site)),
        variables={"NVGEMM_AOT_BUNDLES": str(bundle.path)},
        **options,
    )


def installation(site: Path) -> Path:
    """A copy of the installed runtime, in a directory that comes before the installed one."""
    package = Path(str(nvgemm_runtime.__file__)).parent
    shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(str(nvgemm_aot_autoload.__file__), site)
    return site / package.name


every_damage = pytest.mark.parametrize("damage", DAMAGES, ids=str)


@every_damage
def test_torch_compiles_whatever_is_broken(ran: Callable[[Damage], Ran], damage: Damage) -> None:
    assert ran(damage).right == [True, True] * damage.compiles


@every_damage
def test_what_is_broken_is_said_once(ran: Callable[[Damage], Ran], damage: Damage) -> None:
    run = ran(damage)
    assert run.count(SAYS) == (damage.says is not None), run.said
    assert (damage.says or "") in run.said
    assert run.count("Traceback") == 0, run.said


def test_a_launcher_that_is_cut_off_leaves_gemms_to_aten(
    recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    cut(installation(site) / "_native.so")
    after = """
import nvgemm_runtime
try:
    nvgemm_runtime.mm(torch.ones(16, 64), torch.ones(64, 32))
except nvgemm_runtime.errors.ToolchainError as error:
    print(error, file=sys.stderr)
"""
    run = run_from(site, recording_bundle, after=after)
    assert run.right == [True, True]
    assert run.launched == []
    # The one warning, and what the call says that asks for a kernel outright.
    assert run.count("it is truncated") == 2, run.said
    assert run.count("is not offered") == 1, run.said
    assert "--force-reinstall --no-deps . in nvgemm-aot's checkout" in run.said.splitlines()[-1]


def test_without_max_autotune_a_missing_part_is_said_and_leaves_gemms_to_aten(
    recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    remove(installation(site) / "installed" / "discover.py")
    run = run_from(site, recording_bundle, plain=True)
    assert run.right == [True, True]
    assert run.launched == []
    assert run.count("nvgemm-aot is disabled in torch.compile") == 1, run.said
    assert run.count("torch's compile cache keys lack the installed bundles") == 1, run.said


def test_torch_names_a_module_that_imports_nothing_of_ours() -> None:
    [point] = [p for p in entry_points(group="torch.backends") if p.name == "nvgemm_aot"]
    assert point.value == "nvgemm_aot_autoload:activate"
    source = Path(str(nvgemm_aot_autoload.__file__)).read_text()
    before, _, _ = source.partition("def activate()")
    imports = [line for line in before.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["from __future__ import annotations", "import logging"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_a_program_that_is_being_ended_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, ending: type[BaseException]
) -> None:
    def end() -> None:
        raise ending

    monkeypatch.setattr("nvgemm_runtime.inductor.autoload.activate", end)
    with pytest.raises(ending):
        nvgemm_aot_autoload.activate()
