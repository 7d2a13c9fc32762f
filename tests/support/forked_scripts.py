"""Scripts in processes of their own, forked from one that has imported what they all need.

Importing torch takes seconds, so one process does it for all scripts of a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_SERVER = """
import gc, json, os, sys
gc.disable()
exec(sys.argv[1])
gc.freeze()
gc.enable()
for line in sys.stdin:
    asked = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for descriptor, path in enumerate((os.devnull, *asked["outputs"])):
        os.dup2(os.open(path, os.O_RDWR), descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    sys.argv[1:] = asked["arguments"]
    exec(asked["script"], {"__name__": "__main__"})
    break
sys.stdout.flush()
os._exit(0)  # taking down what was imported takes a second
"""


class ForkedScripts:
    """Runs scripts, one after the other; `forked_scripts` makes one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        script: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in a fork, with this environment or that of this process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as said:
            asked = {
                "script": script,
                "arguments": arguments,
                "environment": dict(os.environ if environment is None else environment),
                "directory": str(directory or Path.cwd()),
                "outputs": [output.name, said.name],
            }
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(
                [script, *arguments], status, output.read(), said.read()
            )


@contextlib.contextmanager
def forked_scripts(
    imports: str,
    *,
    python: Sequence[str | Path] = (sys.executable, "-W", "ignore"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ForkedScripts]:
    """Scripts of forks of a process that has run ``imports``."""
    process = subprocess.Popen(
        [*python, "-c", _SERVER, imports],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # which closes its standard input, and so ends it
        yield ForkedScripts(process)
