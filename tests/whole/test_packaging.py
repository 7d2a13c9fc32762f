"""Builds and installs real wheels, where neither the builder nor torch is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from repository import ROOT
from synthetic_bundles import write_synthetic_bundle
from written_wheels import write_wheel

pytestmark = pytest.mark.slow  # builds the project's wheel; a base install is looked at always

REPOSITORY = ROOT

COMMAND_DEPENDENCIES = ("click", "zstandard", "pyelftools")
"""What the runtime and the read-only commands import besides torch."""

NOBODY = "65534"
"""User and group id of `nobody` on Linux."""

LIST_BUNDLES = """
import sys
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.installed.discover import find_wheel_bundles
for found in find_wheel_bundles():
    with Bundle(found.path) as bundle:
        bundle.check_body()
        print(found.distribution, found.version, bundle.header.target.key)
assert not [name for name in sys.modules if name.startswith("nvgemm_kernels")]
"""


def run(*command: str | Path) -> str:
    """Run a command away from the checkout, without this process's module path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        env=environment,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment, and the installer that fills it from outside."""

    directory: Path
    installer: str

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def site(self) -> Path:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.directory / "lib" / name / "site-packages"

    def install(self, *wheels: Path) -> None:
        if self.installer == "uv":
            self._uv("install", "--no-deps", "--no-index", *wheels)
        else:
            self._pip("install", "--no-deps", "--no-index", *wheels)

    def uninstall(self, name: str) -> None:
        if self.installer == "uv":
            self._uv("uninstall", name)
        else:
            self._pip("uninstall", "--yes", name)

    def files(self) -> dict[Path, int]:
        """Every path below the environment, with its time of modification in nanoseconds."""
        return {path: path.lstat().st_mtime_ns for path in sorted(self.directory.rglob("*"))}

    def _pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def _uv(self, verb: str, *arguments: str | Path) -> None:
        options = ("--python", self.python, "--cache-dir", self.directory.parent / "uv-cache")
        run(sys.executable, "-m", "uv", "pip", verb, *options, *arguments)


@pytest.fixture(scope="session")
def project_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's own wheel, built by the back end that is installed, or by an isolated one."""
    out_dir = tmp_path_factory.mktemp("project-wheel")
    has_backend = importlib.util.find_spec("scikit_build_core") is not None
    isolation = ["--no-build-isolation"] if has_backend else []
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation, "-w", out_dir, REPOSITORY)
    (wheel,) = out_dir.glob("*.whl")
    return wheel


def make_kernel_wheel(name: str, directory: Path) -> Path:
    bundles = [
        write_synthetic_bundle(directory / f"{arch}.nvgemm", arch) for arch in ("sm_90a", "sm_100f")
    ]
    return write_wheel(bundles, name=name, version="1.0", out_dir=directory)


@pytest.fixture(scope="session", params=["pip", "uv"])
def environment(
    request: pytest.FixtureRequest,
    project_wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Environment]:
    """A fresh environment with the runtime and a kernel wheel, that other users may enter."""
    # Not below pytest's own temporary directory: that is closed to other users.
    with tempfile.TemporaryDirectory(prefix="nvgemm-packaging-") as root:
        Path(root).chmod(0o755)
        made = Environment(directory=Path(root) / "venv", installer=request.param)
        if made.installer == "uv":
            run(sys.executable, "-m", "uv", "venv", "--python", sys.executable, made.directory)
        else:
            run(sys.executable, "-m", "venv", "--without-pip", made.directory)
        for name in COMMAND_DEPENDENCIES:
            copy_distribution(name, made.site)
        made.install(
            project_wheel, make_kernel_wheel("demo", tmp_path_factory.mktemp("kernel-wheel"))
        )
        yield made


def copy_distribution(name: str, site: Path) -> None:
    """Copy an installed distribution: the very version tested here, and without a network."""
    source = Path(sysconfig.get_path("purelib"))
    for file in distribution(name).files or ():
        located = Path(str(file.locate()))
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        assert located.is_file(), f"{name} is not installed in {source}"
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(located, site / file)


def expected_listing(*distributions: str) -> list[str]:
    targets = ("sm_100f-linux_x86_64-cu13", "sm_90a-linux_x86_64-cu13")
    return [f"{name} 1.0 {target}" for name in distributions for target in targets]


def test_project_wheel_holds_the_data_that_commands_need(project_wheel: Path) -> None:
    assert "-py3-none-linux_" in project_wheel.name, "one wheel serves every Python"
    with ZipFile(project_wheel) as archive:
        names = set(archive.namelist())
    assert {
        "nvgemm_aot_autoload.py",
        "nvgemm_aot/__main__.py",
        "nvgemm_aot/emulator/driver/_emulated_cuda.so",
        "nvgemm_aot/py.typed",
        "nvgemm_runtime/py.typed",
        "nvgemm_runtime/_native.so",
        "nvgemm_runtime/_native.so.sha256",
        "nvgemm_aot/wheels/README.md.in",
        "nvgemm_aot/wheels/__init__.py.in",
        "nvgemm_aot/wheels/licenses/BSD-3-Clause.txt",
    } <= names


def test_installed_template_is_found_without_the_checkout(environment: Environment) -> None:
    # `read_template` needs packages that this environment lacks, and reads this file.
    file = "resources.files('nvgemm_aot').joinpath('wheels', 'README.md.in')"
    code = f"from importlib import resources; print({file}.read_text())"
    assert "$distribution" in run(environment.python, "-I", "-c", code)


def test_runtime_finds_installed_bundles(environment: Environment) -> None:
    listing = run(environment.python, "-I", "-c", LIST_BUNDLES)
    assert listing.splitlines() == expected_listing("nvgemm-kernels-demo")


def test_environment_has_neither_torch_nor_the_compiler(environment: Environment) -> None:
    code = (
        "from importlib.util import find_spec as f;"
        "print([n for n in ('torch', 'cutlass', 'wheel', 'packaging', 'yaml') if f(n)])"
    )
    assert run(environment.python, "-I", "-c", code).strip() == "[]"


def test_list_command_shows_installed_bundles(environment: Environment) -> None:
    listing = run(environment.directory / "bin" / "nvgemm-aot", "list")
    assert "nvgemm-kernels-demo" in listing
    assert "sm_100f" in listing
    assert "sm_90a" in listing


def test_read_only_installation_works_for_another_user(environment: Environment) -> None:
    prefix: list[str] = []
    if os.geteuid() == 0:  # Permissions do not bind root.
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("running as root, and setpriv is not installed to become another user")
        prefix = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        reach = subprocess.run([*prefix, environment.python, "-c", ""], capture_output=True)
        if reach.returncode != 0:
            pytest.skip("this Python interpreter lies where only root can reach it")
    directories = [environment.directory, *environment.directory.rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in directories if path.is_dir()}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    try:
        before = environment.files()
        probe = f"open({str(environment.site / 'probe')!r}, 'w')"
        refused = subprocess.run([*prefix, environment.python, "-c", probe], capture_output=True)
        assert b"PermissionError" in refused.stderr
        listing = run(*prefix, environment.python, "-I", "-c", LIST_BUNDLES)
        assert environment.files() == before
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert listing.splitlines() == expected_listing("nvgemm-kernels-demo")


def test_uninstalling_leaves_nothing_of_a_kernel_wheel(
    environment: Environment, tmp_path: Path
) -> None:
    before = environment.files().keys()
    environment.install(make_kernel_wheel("other", tmp_path))
    listing = run(environment.python, "-I", "-B", "-c", LIST_BUNDLES)
    assert listing.splitlines() == expected_listing("nvgemm-kernels-demo", "nvgemm-kernels-other")
    environment.uninstall("nvgemm-kernels-other")
    left = environment.files().keys() - before
    assert left == set()
    listing = run(environment.python, "-I", "-B", "-c", LIST_BUNDLES)
    assert listing.splitlines() == expected_listing("nvgemm-kernels-demo")
