"""Compares bounds of pyproject.toml with the newest releases, and says what to run to widen one.

Where a package index is::

    python tests/support/newest.py           # a table, and commands for what is outside
    python tests/support/newest.py torch     # one dependency, and its commands in any case

It asks pip, so it sees the releases that this Python and machine can install; pre-releases do not
count. The exit code is 1 if a newest release is outside its bound, and 2 if the index does not
answer. docs/develop/newest.md says how to go on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repository import ROOT

ENVIRONMENT = (
    "python3 -m venv build/newest && build/newest/bin/pip install "
    "-c <(grep -v '^{family}' constraints.txt) '.[build,cross,test]' '{install}=={version}'"
)
ALL_TESTS = 'build/newest/bin/pytest -n 2 --dist loadfile -m ""'
COMPILE = (
    "build/newest/bin/nvgemm-aot build quickstart --strict --out build/newest/bundles",
    "build/newest/bin/nvgemm-aot verify --disassemble build/newest/bundles/*.nvgemm",
)
GPU_WHEELS = "build/newest/bin/python tests/gpu/run --build wheels"
GPU_TESTS = "python3 tests/gpu/run --wheels wheels  # on the GPU, with {name} {version}"
PAIRS = (
    "build/newest/bin/nvgemm-aot build tests/gpu/versions.yaml --out build/newest/pairs",
    "build/newest/bin/python tests/gpu/versions.py prepare pairs build/newest/pairs/*.nvgemm",
    "python3 tests/gpu/versions.py run pairs  # on the GPU, without a network",
)

COMPILE_12 = (
    "build/newest/bin/nvgemm-aot build tests/gpu/cuda12.yaml --strict --out build/newest/cuda12",
    "build/newest/bin/nvgemm-aot verify --disassemble build/newest/cuda12/*.nvgemm",
)
WITHOUT_TORCH = (
    "build/newest/bin/python tests/gpu/cuda12.py prepare cuda12 build/newest/cuda12/*.nvgemm",
    "python3 tests/gpu/cuda12.py run cuda12  # on the GPU, without torch and a network",
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What shows that a release works, and what states the range beside pyproject.toml.

    Attributes:
        cpu: Commands that need no GPU; ``{name}``, ``{version}``, ``{install}`` and ``{family}``
            stand for the dependency, the release, what pip is asked for, and how the lines of
            constraints.txt begin that pin it.
        gpu: Commands for the wheels of GPU tests, and for the GPU.
        places: Files of the range, behind which it says what to change there.
    """

    cpu: tuple[str, ...]
    gpu: tuple[str, ...]
    places: tuple[str, ...]


TORCH = Steps(
    cpu=("tests/with_torch.sh {version}",),
    gpu=("python3 tests/gpu/run --build wheels", GPU_TESTS),
    places=(
        "runtime/nvgemm_runtime/inductor/autoload.py: SUPPORTED",
        "runtime/nvgemm_runtime/launch/loading/native.py: two messages",
        "docs/reference/support.md, docs/develop/torch.md, README.md: what was run",
    ),
)
TVM_FFI = Steps(
    cpu=(ENVIRONMENT, ALL_TESTS),
    gpu=PAIRS,
    places=(
        "tests/gpu/versions.py: TVM_FFI, before the pairs are prepared",
        "runtime/nvgemm_runtime/launch/loading/native.py: two messages",
        "docs/guide/installing.md: what was run",
    ),
)
LIBRARY = Steps(
    cpu=(ENVIRONMENT, ALL_TESTS, *COMPILE),
    gpu=PAIRS,
    places=(
        "tests/gpu/versions.py: LIBRARY, before the pairs are prepared",
        "runtime/nvgemm_runtime/bundle/imported_symbols.py: NEWEST_RUN",
        "runtime/nvgemm_runtime/matching/refusals.py: _RANGE",
        "docs/guide/installing.md: what was run",
    ),
)
LIBRARY_12 = Steps(
    cpu=(ENVIRONMENT, ALL_TESTS, *COMPILE, *COMPILE_12),
    gpu=WITHOUT_TORCH,
    places=("tests/gpu/cuda12.py: LIBRARY, before it is prepared", *LIBRARY.places[1:]),
)
COMPILER = Steps(
    cpu=(ENVIRONMENT, ALL_TESTS, *COMPILE),
    gpu=(GPU_WHEELS, GPU_TESTS),
    places=("constraints.txt", "CONTRIBUTING.md: the reason of the bound"),
)


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """A dependency whose new releases matter.

    ``install`` is what pip is asked for to get it, and ``family`` begins the lines of
    constraints.txt that would keep an old one; both are its name where they are left out.
    """

    name: str
    steps: Steps
    install: str = ""
    family: str = ""


_DSL = "nvidia-cutlass-dsl"
DEPENDENCIES = (
    Dependency(name="torch", steps=TORCH),
    Dependency(name="apache-tvm-ffi", steps=TVM_FFI),
    # Compiler and libraries require each other in equal versions.
    Dependency(name=_DSL, steps=COMPILER, install=f"{_DSL}[cu13]", family=_DSL),
    Dependency(name=f"{_DSL}-libs-cu13", steps=LIBRARY, install=f"{_DSL}[cu13]", family=_DSL),
    Dependency(name=f"{_DSL}-libs-cu12", steps=LIBRARY_12, install=f"{_DSL}[cu13]", family=_DSL),
    Dependency(name="nvidia-cutlass-operators", steps=COMPILER),
    Dependency(name="quack-kernels", steps=COMPILER),
)


class IndexSilentError(Exception):
    """The package index did not answer."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A dependency, its bound, and the newest release."""

    dependency: Dependency
    bound: SpecifierSet
    newest: Version

    @property
    def is_inside(self) -> bool:
        return self.newest in self.bound

    @property
    def wider(self) -> str:
        """The bound that would let the newest release in."""
        return ",".join(sorted((_widen(str(one), self.newest) for one in self.bound), reverse=True))

    def lines(self) -> Iterator[str]:
        """What to do, in order."""
        name, steps = self.dependency.name, self.dependency.steps
        words = {
            "name": name,
            "version": str(self.newest),
            "install": self.dependency.install or name,
            "family": self.dependency.family or f"{name}==",
        }
        yield f"{name} {self.newest}:"
        if self.is_inside:
            yield f"  1. pyproject.toml lets it in already: {bound_text(self.bound)}"
        else:
            old, new = bound_text(self.bound), self.wider
            yield f'  1. on a branch, in pyproject.toml, make "{old}" of {name} "{new}"'
        yield "  2. without a GPU (bash):"
        yield from (f"       {command.format(**words)}" for command in steps.cpu)
        yield "  3. then for the GPU, and on it:"
        yield from (f"       {command.format(**words)}" for command in steps.gpu)
        yield "  4. if all pass, change:"
        yield from (f"       {place}" for place in steps.places)


def _widen(specifier: str, newest: Version) -> str:
    """A specifier that lets 0.2.1 in: ``<0.3`` for ``<0.2``, ``==0.2.1`` for ``==0.1.9``."""
    if newest in SpecifierSet(specifier):
        return specifier
    if specifier.startswith("<") and not specifier.startswith("<="):
        count = len(Version(specifier[1:]).release)
        *head, last = (newest.release + (0,) * count)[:count]
        return "<" + ".".join(map(str, (*head, last + 1)))
    if specifier.startswith("=="):
        return f"=={newest}"
    raise ValueError(f"cannot widen {specifier} to let {newest} in: it is older than the bound")


def bound_text(bound: SpecifierSet) -> str:
    """Its parts, the lower first."""
    return ",".join(sorted(map(str, bound), reverse=True))


def bounds(project: Mapping[str, object]) -> dict[str, SpecifierSet]:
    """By name: what a pyproject.toml's dependencies and extras allow."""
    table = project["project"]
    assert isinstance(table, dict)
    lines = [*table["dependencies"]]
    for extra in table["optional-dependencies"].values():
        lines += extra
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        found[requirement.name] = (
            found.get(requirement.name, SpecifierSet()) & requirement.specifier
        )
    return found


def ask_pip(name: str) -> Version:
    """The newest release that this Python can install.

    Raises:
        IndexSilentError: If pip finds none.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        lines = done.stderr.strip().splitlines() or ["pip printed no versions"]
        raise IndexSilentError(f"{name}: {lines[-1]}")
    return max(Version(Version(word).public) for word in found[1].split(", "))


def compare(
    dependencies: Sequence[Dependency],
    allowed: Mapping[str, SpecifierSet],
    newest_of: Callable[[str], Version],
) -> list[Standing]:
    """Where each dependency stands, by an index that ``newest_of`` asks."""
    return [
        Standing(dependency=one, bound=allowed[one.name], newest=newest_of(one.name))
        for one in dependencies
    ]


def table(standings: Sequence[Standing]) -> str:
    """A row a dependency."""
    rows = [("dependency", "allowed", "newest", "inside")]
    rows += [
        (
            one.dependency.name,
            bound_text(one.bound),
            str(one.newest),
            "yes" if one.is_inside else "NO",
        )
        for one in standings
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def main(words: Sequence[str], newest_of: Callable[[str], Version] = ask_pip) -> int:
    names = [one.name for one in DEPENDENCIES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dependency", nargs="*", help=f"of {', '.join(names)}; all if left out")
    asked = parser.parse_args(words).dependency
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"no such dependency: {', '.join(unknown)}; allowed: {', '.join(names)}")
    chosen = [one for one in DEPENDENCIES if not asked or one.name in asked]
    try:
        standings = compare(chosen, bounds(read_project()), newest_of)
    except IndexSilentError as error:
        sys.stderr.write(
            f"the package index does not answer: {error}\n"
            "run this where pip reaches an index (pip config list says which one it asks)\n"
        )
        return 2
    parts = [table(standings)]
    parts += ["\n".join(one.lines()) for one in standings if asked or not one.is_inside]
    sys.stdout.write("\n\n".join(parts) + "\n")
    return 0 if all(one.is_inside for one in standings) else 1


def read_project() -> dict[str, object]:
    """The checkout's pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pytest brings it
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
