"""What programs that people run beside this package require of the packages that both use.

`tests/data/engines.json` holds a row a release: its requirement lines for `SHARED`, as its metadata
states them, and whether this package can be installed beside it. Where a package registry is::

    python tests/support/engines.py read vllm==0.34.0 sglang==0.6.0  # adds rows, or renews them
    python tests/support/engines.py table  # resolves all; the table of the docs

`tests/whole/test_engines.py` compares rows, docs and what uv resolves.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheel.wheelfile import WheelFile

from repository import TESTS

FILE = TESTS / "data" / "engines.json"

PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_28"
"""What is resolved for: Python and platform as uv names them."""

SHARED = frozenset(
    {
        "apache-tvm-ffi",
        "click",
        "cuda-bindings",
        "cuda-python",
        "flashinfer-python",
        "numpy",
        "nvidia-cuda-nvdisasm",
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-cu13",
        "protobuf",
        "pyelftools",
        "quack-kernels",
        "torch",
        "typing-extensions",
        "zstandard",
    }
)
"""Packages that this one needs, directly or by another, and those that pin them in turn."""

_UNREACHABLE = re.compile(
    "error sending request|dns error|[Cc]ould not connect|timed out|Failed to fetch|"
    "connectivity is disabled|no version of"
)
"""What uv says where a registry does not answer, or lacks a release that a row names."""

_PATIENCE_S = 300
"""How long a registry may take, in seconds, until it counts as one that does not answer."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One release.

    Attributes:
        name: Its distribution.
        version: The release.
        read_on: Day (UTC) on which its metadata was read.
        requires: Its requirement lines for `SHARED`.
        resolves: Whether this package can be installed beside it.
    """

    name: str
    version: str
    read_on: str
    requires: tuple[str, ...]
    resolves: bool

    @property
    def text(self) -> str:
        return f"{self.name} {self.version}"

    def line_for(self, package: str) -> str:
        """What it requires of a package, without the package's name; empty where nothing."""
        found = [Requirement(line) for line in self.requires]
        return ", ".join(
            str(one.specifier) for one in found if canonicalize_name(one.name) == package
        )


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What uv makes of a release and this package.

    Attributes:
        versions: What would be installed, by distribution; None where nothing can be.
        reason: Why nothing can be.
        unreachable: Whether that is for want of a registry that has all of it.
    """

    versions: dict[str, str] | None
    reason: str
    unreachable: bool


def load() -> list[Engine]:
    rows = json.loads(FILE.read_text())
    return [Engine(**{**row, "requires": tuple(row["requires"])}) for row in rows]


def own_wheel(folder: Path) -> Path:
    """A wheel of the installed metadata and nothing else: all that resolving looks at."""
    installed = distribution("nvgemm-aot")
    metadata = installed.read_text("METADATA")
    assert metadata is not None
    path = folder / f"nvgemm_aot-{installed.version}-py3-none-any.whl"
    info = f"nvgemm_aot-{installed.version}.dist-info"
    with WheelFile(str(path), "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
    return path


def resolve(lines: Sequence[str], wheel: Path, cache: Path) -> Resolution:
    """Resolve requirement lines beside this package. Nothing is installed, no package fetched."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header"]
    command += ["--no-annotate", "--python-version", PYTHON, "--python-platform", PLATFORM]
    asked = "\n".join([*lines, f"nvgemm-aot[cu13] @ {wheel.as_uri()}"])
    try:
        done = subprocess.run(
            [*command, "--cache-dir", str(cache)],
            input=asked, capture_output=True, text=True, check=False, timeout=_PATIENCE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        reason = f"uv did not answer within {_PATIENCE_S} s"
        return Resolution(versions=None, reason=reason, unreachable=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        return Resolution(
            versions=None, reason=reason, unreachable=bool(_UNREACHABLE.search(reason))
        )
    pins = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return Resolution(
        versions={name.split("[")[0]: version for name, version in pins},
        reason="",
        unreachable=False,
    )


def resolve_all(engines: Sequence[Engine], folder: Path) -> list[Resolution]:
    """Resolve beside each, all at a time: it is waiting for the registry that takes long."""
    wheel = own_wheel(folder)
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(lambda one: resolve(one.requires, wheel, folder / "cache"), engines))


def table(engines: Sequence[Engine]) -> str:
    """Rows for docs/guide/installing.md."""
    lines = [
        "| beside | torch | tvm-ffi | cutlass-dsl | installs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in engines:
        torch, ffi, dsl = (
            one.line_for(name) or "any"
            for name in ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl")
        )
        lines.append(
            f"| {one.text} | {torch} | {ffi} | {dsl} | {'yes' if one.resolves else 'no'} |"
        )
    return "\n".join(lines)


def read(requirement: str) -> tuple[str, str, tuple[str, ...]]:
    """Name, version and shared requirement lines of a release, from its metadata alone."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--report", str(report), "--target", folder]
        command += ["--only-binary", ":all:", "--python-version", PYTHON]
        for minor in (28, 34, 39):
            command += ["--platform", f"manylinux_2_{minor}_x86_64"]
        subprocess.run([*command, requirement], check=True)
        (entry,) = json.loads(report.read_text())["install"]
    metadata = entry["metadata"]
    lines = tuple(line for line in metadata.get("requires_dist", ()) if _counts(line))
    return metadata["name"], metadata["version"], lines


def _counts(line: str) -> bool:
    """Whether a requirement line is of a shared package, on the machine that is resolved for."""
    requirement = Requirement(line)
    if canonicalize_name(requirement.name) not in SHARED:
        return False
    environment = {
        "extra": "",
        "platform_machine": "x86_64",
        "python_full_version": f"{PYTHON}.0",
        "python_version": PYTHON,
        "sys_platform": "linux",
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)


def main(words: Sequence[str]) -> None:
    engines = {(one.name, one.version): one for one in load()} if FILE.exists() else {}
    day = str(datetime.now(timezone.utc).date())
    if words[:1] == ["read"]:
        for word in words[1:]:
            name, version, lines = read(word)
            engines[name, version] = Engine(
                name=name, version=version, read_on=day, requires=lines, resolves=True
            )
    elif words != ["table"]:
        sys.exit(__doc__)
    rows = list(engines.values())
    with tempfile.TemporaryDirectory() as folder:
        found = resolve_all(rows, Path(folder))
    resolved = []
    for one, resolution in zip(rows, found):
        if resolution.unreachable:
            sys.exit(f"{one.text}: {resolution.reason}")
        resolved.append(Engine(**{**asdict(one), "resolves": resolution.versions is not None}))
    if words[0] == "read":
        FILE.write_text(json.dumps([asdict(one) for one in resolved], indent=1) + "\n")
    sys.stdout.write(table(resolved) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
