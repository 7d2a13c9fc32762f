"""Which part may import which: the runtime is light and never reaches into the builder."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nvgemm_aot
import nvgemm_runtime
from forked_scripts import ForkedScripts, forked_scripts
from repository import ROOT

OPTIONAL = {"torchtitan", "transformers"}
"""Packages that some modules need, and that are no dependency or have no release for 3.10."""

SHARED_NAMES = {"__init__", "command", "compiled"}
"""Names of several modules: packages, folders of commands, and a module with its former path."""

STAND_IN = "_emulated_cuda.so"

HEAVY = ("torch", "cutlass", "nvMatmulHeuristics", "pydantic", "cuda", "tvm_ffi")


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkedScripts]:
    """Processes that have imported next to nothing, and warn as usual."""
    with forked_scripts("", python=[sys.executable]) as scripts:
        yield scripts


def modules_after(scripts: ForkedScripts, statement: str) -> set[str]:
    """Top-level packages that a new process has imported after ``statement``."""
    script = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    result = scripts.run(script)
    assert (result.returncode, result.stderr) == (0, ""), "importing is silent"
    return set(result.stdout.split())


def modules_of(package: ModuleType) -> list[str]:
    """Every module of a package and of those in it, without the native parts."""
    names = (one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    found = [name for name in names if not name.endswith(("._native", "._emulated_cuda"))]
    assert len(found) > 60
    return found


@pytest.mark.parametrize(
    "module",
    [name for name in modules_of(nvgemm_runtime) if not {"inductor", "moe"} & {*name.split(".")}],
)
def test_runtime_modules_import_neither_builder_nor_compiler(
    scripts: ForkedScripts, module: str
) -> None:
    assert not modules_after(scripts, f"import {module}") & {*HEAVY, "nvgemm_aot"}


@pytest.mark.parametrize("package", [nvgemm_aot, nvgemm_runtime], ids=lambda one: one.__name__)
def test_every_module_can_be_imported_and_says_what_it_is_for(package: ModuleType) -> None:
    for name in modules_of(package):
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
        else:
            assert module.__doc__, name


ASK_FOR_THE_DRIVER = """
import contextlib, ctypes
with contextlib.suppress(OSError):
    ctypes.CDLL("libcuda.so.1")
"""


@pytest.mark.parametrize(
    "script",
    [
        "import nvgemm_runtime",
        "import nvgemm_aot.cli.main",
        "import nvgemm_aot.emulator.session.emulated_device",
        "from nvgemm_runtime.launch.loading import native\nnative.load()",
    ],
)
def test_a_process_that_does_not_emulate_never_loads_the_emulated_driver(
    scripts: ForkedScripts, script: str
) -> None:
    assert STAND_IN not in libraries_after(scripts, script + ASK_FOR_THE_DRIVER)


def test_a_loaded_emulated_driver_is_noticed(scripts: ForkedScripts) -> None:
    script = "from nvgemm_aot.emulator.driver.stand_in import load_stand_in\nload_stand_in()"
    assert STAND_IN in libraries_after(scripts, script)


def libraries_after(scripts: ForkedScripts, script: str) -> set[str]:
    """Names of the files that a new process has mapped after a script."""
    listing = "print(*{line.split()[-1].rpartition('/')[2] for line in open('/proc/self/maps')})"
    result = scripts.run(f"{script}\n{listing}")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_runtime_sources_never_name_the_builder() -> None:
    for path in (ROOT / "runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            assert not {name.split(".")[0] for name in names} & {"nvgemm_aot", "cutlass"}, path


def test_the_plug_in_alone_imports_inductor() -> None:
    plug_in = ROOT / "runtime/nvgemm_runtime/inductor"
    importing = set()
    for path in [*ROOT.glob("aot/**/*.py"), *ROOT.glob("runtime/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(f"{name}.".startswith("torch._inductor.") for name in names):
                importing.add(path.is_relative_to(plug_in))
    assert importing == {True}


def test_what_benchmarks_and_tests_import_exists() -> None:
    """Also inside functions, and where no test runs a benchmark."""
    roots = {"nvgemm_aot": ROOT / "aot", "nvgemm_runtime": ROOT / "runtime", "benchmarks": ROOT}
    checked: Counter[str] = Counter()
    for path in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[tuple[str, str | None]] = []
            if isinstance(node, ast.Import):
                imported = [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
                module = ".".join([*package, *([node.module] if node.module else [])])
                imported = [(module, alias.name) for alias in node.names]
            for module, name in imported:
                if (top := module.split(".")[0]) in roots:
                    names = names_of(roots[top] / module.replace(".", "/"))
                    assert name is None or name in names, f"{path}: {module}.{name}"
                    checked[top] += 1
    assert checked.keys() == roots.keys()


@functools.cache
def names_of(module: Path) -> frozenset[str]:
    """Names that can be imported from a module, given its path without suffix."""
    names: set[str] = set()
    source = module.with_suffix(".py")
    if module.is_dir():
        names = {path.stem for path in module.iterdir()}
        source = module / "__init__.py"
        if not source.exists():
            return frozenset(names)
    for statement in ast.parse(source.read_text()).body:
        inner = [statement]
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            inner = [*ast.walk(statement)]
        for node in inner:
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Import() | ast.ImportFrom():
                    names |= {alias.asname or alias.name for alias in node.names}
                case ast.Assign() | ast.AnnAssign():
                    names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return frozenset(names)


def test_the_command_starts_without_the_compiler(scripts: ForkedScripts) -> None:
    imported = modules_after(scripts, "import nvgemm_aot.cli.main")
    assert not imported & {*HEAVY, "yaml", "packaging", "wheel"}


@pytest.mark.parametrize(
    "root", ["aot/nvgemm_aot", "aot/csrc", "runtime/nvgemm_runtime", "runtime/csrc"]
)
def test_no_folder_of_sources_has_more_than_14_entries(root: str) -> None:
    ignored = {"__pycache__", "__init__.py", "py.typed", "_native.so", "_native.so.sha256"}
    entries = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / root).rglob("*")
        if path.name not in ignored and path.suffix != ".pyc"
    )
    assert not {name for name, count in entries.items() if count > 14}


def test_no_two_modules_share_a_name() -> None:
    folders = [ROOT / "aot/nvgemm_aot", ROOT / "runtime/nvgemm_runtime"]
    names = Counter(path.stem for folder in folders for path in folder.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES


def test_errors_import_nothing_of_the_package() -> None:
    tree = ast.parse((ROOT / "runtime/nvgemm_runtime/errors.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imports} == {"__future__", "typing"}


@pytest.mark.parametrize("module", ["configuration.cache_key", "entry_point"])
def test_a_module_that_waits_for_inductor_can_be_imported_first(
    scripts: ForkedScripts, module: str
) -> None:
    script = f"""
import nvgemm_runtime.inductor.{module} as first
import sys, torch._inductor.select_algorithm
from torch._inductor.codegen.common import custom_backend_passes
assert first is sys.modules[first.__name__] and callable(first.install)
print(custom_backend_passes.keys(), torch._inductor.select_algorithm.autotune_select_algorithm)
"""
    result = scripts.run(script)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert "nvgemm_aot" in result.stdout
