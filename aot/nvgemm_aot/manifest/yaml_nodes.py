"""A YAML file as the parser's nodes, and how what is wrong with it is reported."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.composer import Composer

from nvgemm_runtime.errors import ManifestError

from ..storage.files import IrregularFileError, read_start

MAX_FILE_BYTES = 4 << 20
"""Longest file that is read."""

MAX_DEPTH = 32
"""Deepest nesting; a manifest needs five levels."""


@dataclass(frozen=True, kw_only=True, order=True)
class Mistake:
    """One thing wrong with a file; line and column count from 1."""

    line: int
    column: int
    text: str


def place(mark: yaml.Mark, text: str) -> Mistake:
    """Make a mistake of a text at a mark, whose line and column count from 0."""
    return Mistake(line=mark.line + 1, column=mark.column + 1, text=text)


def report_mistakes(path: Path, mistakes: Iterable[Mistake]) -> NoReturn:
    """Raise every mistake at once, a line each, by position, and their count.

    Raises:
        ManifestError: Always.

    """
    ordered = sorted(set(mistakes))
    lines = [f"{path}:{found.line}:{found.column}: {found.text}" for found in ordered]
    count = "1 mistake" if len(ordered) == 1 else f"{len(ordered)} mistakes"
    raise ManifestError("\n".join([*lines, f"{count} in {path}; nothing was built"]))


def fail(path: Path, mark: yaml.Mark, text: str) -> NoReturn:
    """Raise one mistake.

    Raises:
        ManifestError: Always.

    """
    report_mistakes(path, [place(mark, text)])


def read_bytes(path: Path, *, if_absent: str, if_too_long: str) -> bytes:
    """Read a file of at most `MAX_FILE_BYTES`.

    Args:
        path: The file.
        if_absent: What to do where there is none.
        if_too_long: What to do where it is longer.

    Raises:
        ManifestError: If it cannot be read or is too long.

    """
    try:
        data = read_start(path, MAX_FILE_BYTES + 1)
    except IrregularFileError as error:
        raise ManifestError(str(error)) from None
    except FileNotFoundError:
        raise ManifestError(f"{path}: there is no such file; {if_absent}") from None
    except IsADirectoryError:
        raise ManifestError(f"{path}: this is a directory; name a file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(f"{path}: cannot read it: {reason}; check the path") from error
    if len(data) > MAX_FILE_BYTES:
        raise ManifestError(
            f"{path}: the file is over {MAX_FILE_BYTES} bytes; allowed: at most that; {if_too_long}"
        )
    return data


def read_text(path: Path) -> str:
    """Read a file.

    Raises:
        ManifestError: If it cannot be read, is too long or not UTF-8.

    """
    data = read_bytes(
        path, if_absent="check the path", if_too_long="split it into several manifests"
    )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        found = Mistake(
            line=data.count(b"\n", 0, error.start) + 1,
            column=len(data[line_start : error.start].decode("utf-8")) + 1,
            text=f"found byte 0x{data[error.start]:02x}; allowed: UTF-8; save the file as UTF-8",
        )
        report_mistakes(path, [found])


class _Shallow(Composer):
    """Composes nodes, and refuses nesting that would exhaust Python's stack."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            event = self.peek_event()  # type: ignore[attr-defined]
            raise yaml.MarkedYAMLError(
                problem=f"found more than {MAX_DEPTH} levels of nesting",
                problem_mark=event.start_mark,
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Loader(_Shallow, yaml.SafeLoader):
    """PyYAML's own parser."""


def compose_fast(text: str) -> yaml.Node | None:
    """Parse YAML with libyaml, which is several times faster than PyYAML itself.

    Returns:
        The top-level node; None if libyaml is missing, refuses the text, or might read it in
        another way than PyYAML. Marks may differ from PyYAML's in rare places, so that messages
        are made from what `compose` returns.

    """
    if not yaml.__with_libyaml__ or "\t" in text or "\ufeff" in text:
        return None
    loader = _fast_loader()(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    except (yaml.YAMLError, ValueError, OverflowError):
        return None
    finally:
        loader.dispose()
    return node


@functools.cache
def _fast_loader() -> Any:
    from yaml._yaml import CParser
    from yaml.resolver import Resolver

    # libyaml's events only: its own composer recurses in C, without a limit.
    class FastLoader(_Shallow, CParser, Resolver):
        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            Resolver.__init__(self)

    return FastLoader


def compose(path: Path, text: str) -> yaml.Node | None:
    """Parse YAML; None if there is no document.

    Raises:
        ManifestError: If the text is not one YAML document, or nested too deeply.

    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        found = Mistake(
            line=before.count("\n") + 1,
            column=len(before) - before.rfind("\n"),
            text=f"found character {text[error.position]!r}, which YAML does not allow; remove it",
        )
        report_mistakes(path, [found])
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        if error.problem == "but found another document":
            fail(path, mark, "found a second YAML document; allowed: one a file")
        advice = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
        context = f"{error.context}, " if error.context else ""
        fail(path, mark, f"not valid YAML: {context}{error.problem}{advice}")
    except (ValueError, OverflowError) as error:
        # PyYAML lets these through from escapes like "\UFFFFFFFF" and from huge version numbers.
        fail(path, loader.get_mark(), f"not valid YAML: {error}")
    finally:
        loader.dispose()
