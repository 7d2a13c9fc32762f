"""``tests/gpu/run``, without a GPU: which wheels it wants, what it installs, and what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TextIO, cast

import progress
import pytest
import yaml

from repository import TESTS

SCRIPT = TESTS / "gpu" / "run"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("gpu_run", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_run"] = module  # for its dataclasses
    loader.exec_module(module)
    return module


@pytest.fixture
def on_hopper(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_compute_capability", lambda: (9, 0))


def add_wheel(directory: Path, name: str, version: str = "0.1.0") -> Path:
    """A wheel of one file, which is enough for pip."""
    from zipfile import ZipFile

    package = f"nvgemm_kernels_{name.replace('-', '_')}"
    path = directory / f"{package}-{version}-py3-none-any.whl"
    info = f"{package.replace('.', '_')}-{version}.dist-info"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{package.replace('.', '_')}/here.txt", name)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_every_test_file_is_in_a_part(script: ModuleType) -> None:
    there = sorted(path.name for path in SCRIPT.parent.glob("test_*.py"))
    assert sorted({test for part in script.PARTS.values() for test in part.tests}) == there


def test_wheels_are_named_as_their_manifests(script: ModuleType) -> None:
    for name, path in script.MANIFESTS.items():
        assert yaml.safe_load(path.read_text())["name"] == name
    for blackwell in (False, True):
        for part in script.PARTS.values():
            assert {*script.wheels_of(part, blackwell=blackwell)} <= {*script.MANIFESTS}


@pytest.mark.usefixtures("on_hopper")
def test_missing_wheels_are_named_before_any_test_runs(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_wheel(tmp_path, "quickstart")
    with pytest.raises(SystemExit) as ended:
        script.main(["--wheels", str(tmp_path), "inductor", "packages"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} has no wheel of every-kind; build them" in said
    assert "tests/gpu/run --build DIR" in said


def test_a_machine_without_a_gpu_an_unknown_part_and_no_directory_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_compute_capability", lambda: None)
    for arguments, said in (
        (["--wheels", "w"], "torch sees no GPU"),
        (["--wheels", "w", "kernel"], "there is no part kernel; there are kernels, "),
        ([], "give either --wheels DIR"),
        (["--wheels", "w", "--build", "b"], "give either --wheels DIR"),
    ):
        with pytest.raises(SystemExit) as ended:
            script.main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_the_newest_wheel_of_a_name_is_taken(script: ModuleType, tmp_path: Path) -> None:
    old, new = (add_wheel(tmp_path, "llama-3.1-8b", version) for version in ("0.2.0", "0.1.0"))
    os.utime(old, (1, 1))
    add_wheel(tmp_path, "llama-3.1-8b-fp8")
    assert script.find_wheel(tmp_path, "llama-3.1-8b") == new
    assert script.find_wheel(tmp_path, "quickstart") is None


def note(path: Path, *events: tuple[str, str] | tuple[str, str, str]) -> None:
    lines = [
        {"event": name, "test": test, "kernel": "k", "operator": "op", "outcome": "".join(rest)}
        for name, test, *rest in events
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


PASSED = (("begin", "a"), ("outcome", "a", "passed"), ("end", "a"))
FAILED = (("begin", "b"), ("outcome", "b", "failed"), ("end", "b"))
BAD_TEARDOWN = (("begin", "d"), ("outcome", "d", "passed"), ("outcome", "d", "failed"))
SKIPPED = (("begin", "c"), ("outcome", "c", "skipped"), ("end", "c"))


@pytest.mark.parametrize(
    ("events", "status", "found", "is_good"),
    [
        ((*PASSED, *SKIPPED), 0, (1, 0, 1, ""), True),
        ((*PASSED, *FAILED, *SKIPPED), 1, (1, 1, 1, ""), False),
        ((*PASSED, *BAD_TEARDOWN, ("end", "d")), 1, (1, 1, 0, ""), False),
        (SKIPPED, 0, (0, 0, 1, ""), True),
        ((), 5, (0, 0, 0, "no test was found"), False),
        (PASSED, 2, (1, 0, 0, "pytest ended with status 2"), False),
        ((), -11, (0, 0, 0, "pytest ended with status -11"), False),
        ((*PASSED, ("begin", "e")), 0, (1, 0, 0, "e did not end (op)"), False),
    ],
)
def test_notes_are_counted(
    script: ModuleType,
    tmp_path: Path,
    events: tuple[tuple[str, str], ...],
    status: int,
    found: tuple[int, int, int, str],
    is_good: bool,
) -> None:
    path = tmp_path / "progress"
    if events:
        note(path, *events)
    outcome = script.read_outcome(path, status, 1.0)
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.note) == found
    assert outcome.is_good is is_good


def test_the_table_has_a_row_a_part_and_their_sum(script: ModuleType) -> None:
    outcomes = {
        "kernels": script.Outcome(1302, 0, 10, 61.7),
        "jit": script.Outcome(0, 1, 3, 4.2, "pytest ended with status 2"),
    }
    assert script.table(outcomes).splitlines() == [
        "part     passed  failed  skipped  seconds",
        "kernels    1302       0       10       62",
        "jit           0       1        3        4",
        "all        1302       1       13       66",
        "jit: pytest ended with status 2",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_a_part_sees_its_wheels_and_a_failure_is_the_exit_status(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Pytest is run for real, over tests that stand in for those of a GPU."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_one.py").write_text(
        "import os, pytest\n"
        "from importlib.resources import files\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_right():\n"
        "    assert files('nvgemm_kernels_quickstart').joinpath('here.txt').is_file()\n"
        "    assert 'NVGEMM_AOT_BUNDLES' not in os.environ\n"
        "def test_wrong():\n"
        "    import nvgemm_kernels_every_kind\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("quickstart", "every-kind"):
        add_wheel(wheels, name)
    part = script.Part(("test_one.py",), ("quickstart",))
    monkeypatch.setattr(script, "PARTS", {"one": part})
    monkeypatch.setattr(script, "HERE", folder)
    monkeypatch.setattr(script, "ROOT", folder)
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", "elsewhere")
    assert script.main(["--wheels", str(wheels)]) == 1
    assert capfd.readouterr().out.splitlines()[-2].split()[:4] == ["one", "1", "1", "1"]
    assert script.main(["--wheels", str(wheels), "--pytest=-k=right"]) == 0


HANGING = """
import time
from types import SimpleNamespace
import pytest
pytestmark = pytest.mark.gpu
time.sleep(1.5)  # as importing torch takes: a look at the notes comes before the first test
KERNELS = [(None, SimpleNamespace(id=name, operator="operator." + name)) for name in "rst"]
@pytest.mark.parametrize("installed", KERNELS, ids=lambda found: found[1].id)
class TestKernels:
    def test_one(self, installed):
        pass
    def test_two(self, installed):
        if installed[1].id == "s":
            time.sleep(600)
    def test_three(self, installed):
        pass
"""


def test_notes_name_the_kernel_of_either_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "notes"))
    kernel = SimpleNamespace(id="k", operator="o")
    for params in ({"installed": (None, kernel)}, {"kernel": kernel}, {"kernel": "ordered"}, {}):
        item = SimpleNamespace(nodeid="one", callspec=SimpleNamespace(params=params))
        progress.pytest_runtest_setup(cast(pytest.Item, item))
    notes = progress.read_progress(tmp_path / "notes")
    assert [(one["kernel"], one["operator"]) for one in notes] == [("k", "o")] * 2 + [("", "")] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_a_kernel_that_hangs_is_named_and_the_others_go_on(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Pytest is run for real, over a test that sleeps in place of a kernel that hangs."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_kernels.py").write_text(HANGING)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    add_wheel(tmp_path, "quickstart")
    part = script.Part(("test_kernels.py",), ("quickstart",), limit_s=3)
    monkeypatch.setattr(script, "PARTS", {"one": part})
    monkeypatch.setattr(script, "HERE", folder)
    monkeypatch.setattr(script, "ROOT", folder)
    assert script.main(["--wheels", str(tmp_path)]) == 1
    lines = capfd.readouterr().out.splitlines()
    (hung,) = {line for line in lines if "hangs" in line}
    assert "test_two[s]" in hung
    assert "operator.s" in hung
    # Two tests of s come after: one that hangs, and one that is not tried.
    rows = [line.split() for line in lines]
    assert [row[:4] for row in rows if row[:1] == ["one"]] == [["one", "7", "0", "0"]]
    assert sum("did not end (operator.s)" in line for line in lines) == 1


LASTING = """
import time
import pytest
pytestmark = pytest.mark.gpu
def test_right():
    pass
def test_wrong():
    raise ValueError("seen")
def test_long():
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            if not STUBBORN:
                raise
def test_never():
    pass
"""


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("stubborn", [False, True])
def test_what_ran_until_the_time_was_over_is_in_the_table(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stubborn: bool,
) -> None:
    """Pytest is run for real; a test that cannot be interrupted is killed."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_lasting.py").write_text(f"STUBBORN = {stubborn}" + LASTING)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    add_wheel(tmp_path, "quickstart")
    part = script.Part(("test_lasting.py",), ("quickstart",))
    monkeypatch.setattr(script, "PARTS", {"one": part, "two": part})
    monkeypatch.setattr(script, "HERE", folder)
    monkeypatch.setattr(script, "ROOT", folder)
    monkeypatch.setattr(script, "GRACE_S", 3 if stubborn else 60)
    notes: list[Path] = []
    run_session = script.run_session

    def noted(*given: Path) -> int:
        notes.append(given[2])
        return int(run_session(*given))

    def monotonic() -> float:
        """Later than any end, once the long test has begun."""
        begun = [one["test"] for path in notes for one in progress.read_progress(path)]
        return 1e12 if any(test.endswith("long") for test in begun) else time.monotonic()

    monkeypatch.setattr(script, "run_session", noted)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    assert script.main(["--wheels", str(tmp_path), "--seconds", "1e9", "one"]) == 1
    printed = capfd.readouterr().out
    assert [line.split()[:4] for line in printed.splitlines()][-3] == ["one", "1", "1", "0"]
    assert "test_long did not end" in printed.splitlines()[-1]
    assert ("ValueError: seen" in printed) is not stubborn
    assert "hangs" not in printed


@pytest.mark.usefixtures("on_hopper")
def test_parts_that_have_not_begun_when_the_time_is_over_are_named(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_wheel(tmp_path, "quickstart")
    assert script.main(["--wheels", str(tmp_path), "--seconds", "1e-9", "timing"]) == 1
    assert "timing: not begun: the time was over" in capsys.readouterr().out
    for wrong in ("0", "-1", "nan"):
        with pytest.raises(SystemExit):
            script.main(["--wheels", str(tmp_path), "--seconds", wrong])
        assert "--seconds must be more than 0" in capsys.readouterr().err


def test_parts_run_at_once_but_for_those_that_measure(
    script: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["tuning", "kernels", "rows", "timing"]
    both = threading.Barrier(2)
    running: list[str] = []

    def run(name: str, output: TextIO) -> object:
        if name in ("kernels", "rows"):
            both.wait(timeout=60)  # neither ends before the other has begun
        else:
            assert running == []
        running.append(name)
        subprocess.run(["echo", f"output of {name}"], stdout=output, check=True)
        running.remove(name)
        return script.Outcome(1, 0, 0, 1.0)

    assert list(script.run_parts(names, run, 2)) == names
    lines = capfd.readouterr().out.split("\n")
    told = [line for line in lines if line]
    assert sorted(told[:4:2]) == ["== kernels", "== rows"]
    assert told[4:] == ["== tuning", "output of tuning", "== timing", "output of timing"]
    for name in names:
        assert lines[lines.index(f"== {name}") + 1] == f"output of {name}"


def test_parts_for_hopper_alone_are_not_run_on_blackwell(script: ModuleType) -> None:
    for part in ("quack", "hopper", "provider"):
        assert part in script.parts_for([], blackwell=False)
        assert part not in script.parts_for([], blackwell=True)
    assert script.parts_for(["quack"], blackwell=True) == ["quack"]


def test_the_script_runs_as_a_command() -> None:
    done = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--wheels DIR" in done.stdout


@pytest.mark.slow
def test_wheels_of_the_package_with_a_provider_are_built(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is on the builder's path, and is not installed where the tests run."""
    manifest = tmp_path / "tiny.yaml"
    manifest.write_text(
        "version: 1\nname: tiny\ntargets: [sm_90a]\nproviders: [tiny_gemm]\ncandidates: 1\n"
        "gemms: [{dtype: bf16, mnk: [[64, 64, 64]]}]\n"
    )
    monkeypatch.setattr(script, "PARTS", {"one": script.Part(("test_one.py",), ("tiny",))})
    monkeypatch.setattr(script, "MANIFESTS", {"tiny": manifest})
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert script.build(wheels, [], blackwell=False) == 0
    assert script.find_wheel(wheels, "tiny") is not None
    assert not list(script.PROVIDER_PACKAGE.glob("*.egg-info"))
