"""Parts of a tuning: each GPU's journal beside the output, until the output's journal takes it."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path

from ...storage.files import remove_file, write_atomic
from .facts import Facts
from .journal import Journal, encode_line, reserved, state_path
from .tuning_state import TuningState, check_identity


def part_path(output: Path, number: int, count: int) -> Path:
    """Returns the output that a GPU's part would have; its journal is next to it."""
    return output.with_name(f".{output.name}.{number}of{count}")


def gather(output: Path) -> None:
    """Adds to an output's journal what parts of its tuning have saved, and removes their journals.

    A process that is killed here loses nothing, and the next call adds nothing twice.

    Raises:
        StorageError: If a file cannot be read or written, or is damaged.
        TuningError: If a part belongs to another tuning, or is still being measured.
    """
    name = glob.escape(f".{output.name}.")
    parts = [
        path.with_name(path.name.removesuffix(_SUFFIX))
        for path in sorted(output.parent.glob(f"{name}*of*{glob.escape(_SUFFIX)}"))
    ]
    if parts:
        with reserved(output):
            for part in parts:
                with reserved(part):
                    _take(state_path(output), state_path(part))


_SUFFIX = state_path(Path("x")).name.removeprefix("x")


def _take(path: Path, part: Path) -> None:
    journal = Journal(part, {})
    if journal.lines:
        own, first = Journal(path, {}), journal.lines[0]
        if own.lines:
            check_identity(journal, own.lines[0].get("identity", {}))
        # Opening both notes what killed processes left open.
        identity = first.get("identity", {})
        for one in (path, part):
            TuningState(one, identity).close()
        data = part.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        lines = list(Journal(path, {}).lines) or [first]
        if digest not in Facts(lines[1:]).taken:
            lines += [line for line in Journal(part, {}).facts if "written" not in line]
            write_atomic(path, b"".join(map(encode_line, [*lines, {"taken": digest}])))
    remove_file(part)
