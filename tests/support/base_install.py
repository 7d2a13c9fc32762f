"""A base install of nvgemm-aot: an environment with what the wheel alone brings.

Nothing is downloaded: it is made of links to what this environment has installed. Which
distributions belong to it follows from their own metadata.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forked_scripts import ForkedScripts, forked_scripts

PROJECT = "nvgemm-aot"


def required(name: str, extra: str = "") -> dict[str, frozenset[str]]:
    """Distributions that a distribution itself requires here, each with the extras asked of it."""
    found: dict[str, frozenset[str]] = {}
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            key = canonicalize_name(requirement.name)
            found[key] = found.get(key, frozenset()) | requirement.extras
    return found


def base_distributions() -> set[str]:
    """Canonical names of all distributions of a base install, its own among them."""
    seen: set[tuple[str, str]] = set()
    waiting = [(PROJECT, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for dependency, extras in required(name, extra).items():
            waiting += [(dependency, each) for each in ("", *extras)]
    return {name for name, _ in seen}


@contextlib.contextmanager
def base_install(directory: Path) -> Iterator[BaseInstall]:
    """Create the environment in a directory, and run commands in it."""
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    _link_distributions(base_distributions(), directory / "lib" / version / "site-packages")
    imports = "import torch\nfrom nvgemm_aot.cli.main import main"
    with forked_scripts(imports, python=(python, "-I"), environment={}) as scripts:
        yield BaseInstall(python, scripts)


class BaseInstall:
    """The environment."""

    def __init__(self, python: Path, scripts: ForkedScripts) -> None:
        self.python = python
        self._scripts = scripts

    def run(
        self, *arguments: str | Path, cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run the command ``nvgemm-aot``, in a fork of a process that has imported it."""
        program = "from nvgemm_aot.cli.main import main; main(prog_name='nvgemm-aot')"
        given = map(str, arguments)
        return self._scripts.run(program, *given, environment=environment, directory=cwd)

    def run_program(
        self, program: str, *arguments: str | Path, cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program; of the environment here it sees what is given alone."""
        command = [str(self.python), "-I", "-c", program, *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd, env=dict(environment), capture_output=True, text=True, check=False
        )


def _link_distributions(names: set[str], site_packages: Path) -> None:
    """Link all files of some installed distributions; whole directories where no other has any."""
    files = {
        canonicalize_name(found.metadata["Name"]): [
            (file, Path(str(found.locate_file(file))))
            for file in found.files or ()
            if ".." not in file.parts
        ]
        for found in metadata.distributions()
    }
    owners = Counter(
        top for listed in files.values() for top in {file.parts[0] for file, _ in listed}
    )
    for name in names:
        for file, source in files[name]:
            link = site_packages / file
            if len(file.parts) > 1 and owners[file.parts[0]] == 1:
                link = site_packages / file.parts[0]
                source = source.parents[len(file.parts) - 2]
            if source.exists() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
