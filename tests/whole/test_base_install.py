"""Every command in a base install: with what the wheel alone brings, without [build]."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from base_install import PROJECT, BaseInstall, base_distributions, base_install, required
from made_rankings import entry, rankings
from nvgemm_aot.cli.main import main
from nvgemm_aot.rankings.file import write_rankings
from nvgemm_runtime.errors import (
    NvgemmError,
    RankingsError,
    ToolchainError,
    TuningError,
    UnhealthyError,
)
from repository import SUPPORT, TESTS

BUILD_COMMAND = "pip install '.[build]'"

CALLS_A_GEMM = "import torch; torch.ones(16, 64).bfloat16() @ torch.ones(64, 32).bfloat16()"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command and what comes of it in a base install.

    Attributes:
        arguments: After the command's name. ``{bundle}`` is one for sm_90a, ``{config}`` a model's
            config.json, ``{python}`` the interpreter.
        prints: What is found on standard output.
        fails: The error, if any, whose exit code it ends with.
        says: What is found on standard error.
        writes: A file, of the working directory, that is there afterwards.
    """

    arguments: tuple[str, ...] = ()
    prints: str = ""
    fails: type[NvgemmError] | None = None
    says: str = ""
    writes: str | None = None


NEEDS_BUILDER = {"fails": ToolchainError, "says": f"run: {BUILD_COMMAND}"}

CASES: dict[str, list[Case]] = {
    "build": [
        Case(arguments=("quickstart",), **NEEDS_BUILDER),
        Case(arguments=("quickstart", "--wheel"), **NEEDS_BUILDER),
        Case(arguments=("quickstart", "--dry-run"), **NEEDS_BUILDER),
        Case(arguments=("quickstart", "--dry-run", "--rejections", "why.jsonl"), **NEEDS_BUILDER),
    ],
    "wheel": [
        Case(
            arguments=("{bundle}", "--name", "mine", "--version", "1.0", "-o", "dist"),
            writes="dist/nvgemm_kernels_mine-1.0-py3-none-manylinux_2_28_x86_64.whl",
        )
    ],
    "inspect": [Case(arguments=("{bundle}",), prints="mm/tn/bf16xbf16/fp32/bf16")],
    "verify": [
        Case(arguments=("{bundle}",), prints="OK"),
        Case(arguments=("{bundle}", "--no-disassemble"), prints="OK"),
        Case(arguments=("{bundle}", "--disassemble"), **NEEDS_BUILDER),
    ],
    "list": [Case(prints="no bundle is installed")],
    "doctor": [
        Case(
            prints="builder          not installed; running kernels does not need it",
            fails=UnhealthyError,
        )
    ],
    "emulate": [Case(arguments=("quickstart",), **NEEDS_BUILDER)],
    "explain": [Case(arguments=("{python}", "-c", "pass"), prints="GEMM")],
    "record": [
        Case(arguments=("{python}", "-c", "pass"), says="no GEMM was recorded"),
    ],
    "coverage": [
        Case(arguments=("mine.yaml", "{bundle}", "--fail-under", "100"), prints="100.0 %"),
        Case(
            arguments=("mine.yaml", "{bundle}", "--html", "page.html"),
            writes="page.html",
        ),
        Case(arguments=("quickstart",), prints="no bundle is installed"),
    ],
    "confirm": [Case(fails=TuningError, says="GPU")],
    "tune": [Case(arguments=("{bundle}", "-o", "tuned.nvgemm"), fails=TuningError, says="GPU")],
    "rankings export": [
        Case(
            arguments=("{bundle}", "-o", "r.json"),
            fails=RankingsError,
            says="no ranking is measured",
        )
    ],
    "rankings merge": [Case(arguments=("made.json", "made.json", "-o", "r.json"), writes="r.json")],
    "merge": [Case(arguments=("{bundle}", "-o", "all.nvgemm"), writes="all.nvgemm")],
    "split": [Case(arguments=("{bundle}", "--parts", "1", "-o", "parts"), prints="written")],
    "keygen": [Case(arguments=("key.pem",), fails=ToolchainError, says="fleet")],
    "sign": [
        Case(arguments=("{bundle}", "--key", "key.pem"), fails=ToolchainError, says="fleet"),
    ],
    "rankings diff": [Case(arguments=("made.json", "made.json"), prints="1 problem in both")],
    "rankings show": [Case(arguments=("made.json",), prints="measured once")],
    "schema": [Case(prints='"title": "nvgemm-aot manifest"')],
    "cache path": [Case(prints="cache")],
    "cache list": [Case(prints="cache")],
    "cache clear": [Case(prints="freed")],
    "manifest from-config": [
        Case(arguments=("{config}", "--tokens", "1,16"), prints="gemms:"),
        Case(arguments=("{config}", "--tokens", "8", "-o", "made.yaml"), writes="made.yaml"),
    ],
}
"""By command."""

MANIFEST = """
version: 1
name: mine
targets: [sm_90a]
gemms:
  - {dtype: bf16, mnk: [[8, 4096, 4096]]}
"""
"""What the bundle declares."""


def commands(group: click.Group, prefix: str = "") -> Iterator[str]:
    """Names of all commands below a group."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseInstall]:
    with base_install(tmp_path_factory.mktemp("base") / "environment") as base:
        yield base


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """No program is on PATH: neither a compiler nor a disassembler of another installation."""
    empty = tmp_path / "bin"
    empty.mkdir()
    return {
        "PATH": str(empty),
        "HOME": str(tmp_path),
        "NVGEMM_AOT_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_every_command_has_a_case_here() -> None:
    needs_a_store = {"cache remote"}
    assert set(CASES) == set(commands(main)) - needs_a_store


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "case"),
    [
        pytest.param(
            command,
            case,
            id=f"{command} {' '.join(case.arguments)}".replace(" ", "-"),
        )
        for command, cases in CASES.items()
        for case in cases
    ],
)
def test_commands_of_a_base_install(
    command: str,
    case: Case,
    base: BaseInstall,
    environment: Mapping[str, str],
    real_bundles: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    places = {
        "bundle": real_bundles["sm_90a"],
        "config": TESTS / "data/configs/llama-3.1-8b.json",
        "python": base.python,
    }
    (tmp_path / "mine.yaml").write_text(MANIFEST)
    write_rankings(tmp_path / "made.json", rankings(entry({"x": 1000})))
    arguments = [
        re.sub(r"^\{(\w+)\}$", lambda name: str(places[name[1]]), argument)
        for argument in case.arguments
    ]
    done = base.run(*command.split(), *arguments, cwd=tmp_path, environment=environment)
    assert done.returncode == (case.fails.exit_code if case.fails else 0), done.stderr
    assert case.prints in done.stdout
    assert case.says in done.stderr
    assert "Traceback" not in done.stderr
    if command != "record":  # torch may warn the user's program
        assert "Warning" not in done.stderr
    if case.writes:
        assert (tmp_path / case.writes).stat().st_size


def test_help_of_every_command(
    base: BaseInstall, environment: Mapping[str, str], tmp_path: Path
) -> None:
    asked = ["", "cache", "manifest", "rankings", *CASES]
    program = (
        "import contextlib, sys\n"
        "from nvgemm_aot.cli.main import main\n"
        "for command in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main([*command.split(), '--help'], prog_name='nvgemm-aot')"
    )
    done = base.run_program(program, *asked, cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    usages = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("Usage:")]
    assert [" ".join(usage[: usage.index("[OPTIONS]")]) for usage in usages] == asked


@pytest.mark.slow
def test_what_was_recorded_and_what_a_config_means_are_manifests(
    base: BaseInstall, environment: Mapping[str, str], tmp_path: Path
) -> None:
    config = TESTS / "data/configs/llama-3.1-8b.json"
    record = ("record", "--fake", base.python, "-c", CALLS_A_GEMM)
    done = base.run(*record, cwd=tmp_path, environment=environment)
    assert "1 GEMM recorded" in done.stderr
    recorded = yaml.safe_load((tmp_path / "recorded.yaml").read_text())
    assert [[gemm[extent] for extent in "mnk"] for gemm in recorded["gemms"]] == [[16, 32, 64]]
    made = base.run(
        "manifest", "from-config", config, "--tokens", "1", cwd=tmp_path, environment=environment
    )
    (tmp_path / "made.yaml").write_text(made.stdout)
    for name in ("recorded.yaml", "made.yaml"):
        done = base.run("coverage", name, "--json", cwd=tmp_path, environment=environment)
        assert json.loads(done.stdout)["targets"][0]["percent"]["count"]["covered"] == 0


def test_nothing_of_the_extras_is_in_a_base_install(
    base: BaseInstall, environment: Mapping[str, str], tmp_path: Path
) -> None:
    program = (
        "from importlib import metadata\n"
        "print(*{found.metadata['Name'] for found in metadata.distributions()})"
    )
    done = base.run_program(program, cwd=tmp_path, environment=environment)
    found = {re.sub("[-_.]+", "-", name).lower() for name in done.stdout.split()}
    assert found == base_distributions()
    for extra in ("build", "test"):
        absent = required(PROJECT, extra).keys() - required(PROJECT).keys()
        assert absent, extra
        assert found.isdisjoint(absent - required("torch").keys())


def test_compiling_at_run_time_says_what_is_missing(
    base: BaseInstall, environment: Mapping[str, str], tmp_path: Path
) -> None:
    program = (
        f"import sys; sys.path.append({str(SUPPORT)!r})\n"
        "from synthetic_facts import H200\n"
        "from nvgemm_runtime.jit.client import why_not_compiling\n"
        "print(why_not_compiling(H200))"
    )
    done = base.run_program(program, cwd=tmp_path, environment=environment)
    assert done.stdout.startswith("the builder is not installed: no ")
    assert f"; run: {BUILD_COMMAND} in nvgemm-aot's checkout" in done.stdout


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("pydantic", ("schema",)),
        ("yaml", ("coverage", "quickstart")),
        ("packaging", ("wheel", "some.nvgemm", "--name", "some")),
        ("wheel", ("wheel", "some.nvgemm", "--name", "some")),
    ],
)
def test_a_dependency_that_is_not_there_is_named(module: str, arguments: tuple[str, ...]) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from nvgemm_aot.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == ToolchainError.exit_code
    assert f"the Python module {module} is not installed" in done.stderr
    assert "run: pip install . in nvgemm-aot's checkout" in done.stderr
