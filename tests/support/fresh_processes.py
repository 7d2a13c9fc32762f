"""Compiling in fresh processes, as users do, with kernel wheels installed and a shared cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording_kernels import DESCRIPTOR, Record
from written_wheels import write_wheel

_PROGRAM = f"""
import gc; gc.disable()
import json, os, sys
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
exec(os.environ["TEST_BEFORE"])
os.dup2(os.open(os.environ["TEST_RECORD"], os.O_WRONLY | os.O_APPEND), {DESCRIPTOR})
import torch
gc.freeze(); gc.enable()

def loaded():
    packages = ("nvgemm", "tvm_ffi", "torch._inductor")
    return sorted(name for name in sys.modules if name.startswith(packages))

at_import = loaded()
opened_at_import = [path for path in opened if path.endswith(".nvgemm")]

def model(a, b, c):
    return a @ b, a @ c

a, b, c = torch.ones(16, 64), torch.full((64, 32), 2.0), torch.full((32, 64), 3.0).t()
right = []
if os.environ["TEST_COMPILES"]:
    if os.environ["TEST_SLOW_ATEN"]:
        import time
        from torch._inductor.select_algorithm import extern_kernels
        extern_kernels.mm = lambda *arguments, **options: (
            time.sleep(0.02), torch.mm(*arguments, **options)
        )[1]
    plain = os.environ["TEST_PLAIN"]
    compiled = torch.compile(model, mode=None if plain else "max-autotune")
    for rows in (16, 8) if plain else (16, 16):
        os.truncate(os.environ["TEST_RECORD"], 0)
        a = torch.ones(rows, 64)
        if plain:
            torch._dynamo.mark_dynamic(a, 0)
        results = compiled(a, b, c)
        right.append(all(map(torch.equal, results, model(a, b, c))))
exec(os.environ["TEST_AFTER"])
counters = torch._dynamo.utils.counters["inductor"] if right else {{}}
print(json.dumps({{
    "right": right,
    "hits": counters.get("fxgraph_cache_hit", 0),
    "misses": counters.get("fxgraph_cache_miss", 0),
    "at_import": at_import,
    "opened_at_import": opened_at_import,
    "at_end": loaded(),
    "launched": open(os.environ["TEST_RECORD"]).read().split(),
}}))
gc.freeze()
"""
"""A user's program, which does not name nvgemm-aot. What a test adds comes by variables.

While torch is imported and at the end, collecting garbage takes a quarter of the time.
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a process.

    Attributes:
        right: Whether each of the model's calls gave the right results.
        hits: Graphs that were found in torch's cache.
        misses: Graphs that were not.
        at_import: Modules of nvgemm-aot, TVM-FFI and Inductor that ``import torch`` had imported.
        opened_at_import: Bundles that it had opened.
        at_end: Such modules at the end.
        launched: Operators of bundled kernels that the last call of the model launched.
        said: What went to standard error.
    """

    right: list[bool]
    hits: int
    misses: int
    at_import: list[str]
    opened_at_import: list[str]
    at_end: list[str]
    launched: list[str]
    said: str

    def count(self, text: str) -> int:
        """How often a text was said."""
        return self.said.count(text)


class Home:
    """What several processes share: torch's compile caches, and confirmations if there are any."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.caches = directory / "caches"
        self.confirmed = directory / "confirmed"
        self._runs = 0

    def run(
        self,
        site: Path | None = None,
        *,
        compiles: bool = True,
        slow_aten: bool = False,
        plain: bool = False,
        before: str = "",
        after: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run the program in a process of its own.

        Args:
            site: A directory of installed wheels, first on its path.
            compiles: Whether it compiles its model of two GEMMs and calls it twice.
            slow_aten: Whether it makes ATen lose.
            plain: Whether it compiles without max-autotune, and for any number of rows: the second
                call has 8 instead of 16.
            before: Code to be run before ``import torch``.
            after: Code to be run at the end.
            variables: Of its environment.
        """
        self._runs += 1
        record = Record(self.directory / f"record-{self._runs}")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("NVGEMM_AOT")
        }
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
            "PYTHONPATH": "" if site is None else str(site),
            "NVGEMM_AOT_CONFIRMED": str(self.confirmed),
            "TEST_RECORD": str(record.path),
            "TEST_COMPILES": "yes" if compiles else "",
            "TEST_SLOW_ATEN": "yes" if slow_aten else "",
            "TEST_PLAIN": "yes" if plain else "",
            "TEST_BEFORE": before,
            "TEST_AFTER": after,
            **(variables or {}),
        }
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return Ran(said=done.stderr, **answer)

    def modules(self) -> list[Path]:
        """The generated modules that call bundled kernels, in the cache."""
        return [path for path in self.caches.rglob("*.py") if "= nvgemm_aot_" in path.read_text()]


def pip_install(bundle: Path, version: str, site: Path) -> Path:
    """Make a kernel wheel of a bundle and install it into a directory, over what is there."""
    wheel = write_wheel([bundle], name="model", version=version, out_dir=site.parent)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--upgrade", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True)
    return site
