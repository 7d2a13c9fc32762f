"""A YAML file as plain data that remembers where each value stands.

PyYAML's own construction would silently keep the last of two equal keys, read ``010`` as eight and
``1:30`` as ninety, and forget every position. Here only its parser is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nvgemm_runtime.errors import ManifestError

MAX_FILE_BYTES = 4 << 20
"""Longest file that is read."""

MAX_VALUES = 1_000_000
"""Most values after aliases are expanded: a few nested aliases can stand for billions."""

MAX_DEPTH = 32
"""Deepest nesting; a manifest needs five levels."""

MAX_DIGITS = 20
"""Longest integer that is converted: Python refuses to convert, or show, those of thousands."""

Location = tuple[str | int, ...]
"""Keys and indices from the top level down to a value."""

_Entries = dict[int, dict[str, tuple[yaml.Node, yaml.Node]]]

_TAG_PREFIX = "tag:yaml.org,2002:"
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)")
_FOREIGN_KINDS = {
    "null": "null",
    "bool": "a boolean",
    "int": "not a plain decimal integer",
    "float": "a number with a fraction",
    "timestamp": "a date",
    "str": "text with unprintable characters",
}


@dataclass(frozen=True, kw_only=True, order=True)
class Mistake:
    """One thing wrong with a file; line and column count from 1."""

    line: int
    column: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A value of a YAML type that has no use here; ``text`` is how the file spells it."""

    kind: str
    text: str

    @property
    def shown(self) -> str:
        """The spelling, short and on one line, and the kind where that says more."""
        if not self.text:
            return "nothing"
        text = self.text if len(self.text) <= 40 else f"{self.text[:37]}..."
        text = text.encode("unicode_escape").decode("ascii")
        return text if text == self.kind else f"{text} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A parsed file.

    Attributes:
        path: The file.
        root: Its top-level YAML node.
        data: Its values: str, int, list, dict with text keys, and `Foreign` for anything else.
        entries: By the id of a mapping node: its entries' nodes, by key.
        mistakes: What was wrong already on the level of YAML; such parts are not in ``data``.

    """

    path: Path
    root: yaml.MappingNode
    data: dict[str, Any]
    entries: _Entries
    mistakes: tuple[Mistake, ...]

    def mistake(self, location: Location, text: str, *, at_key: bool = False) -> Mistake:
        """Place a mistake at a value, or at its key.

        A location below a scalar counts as the scalar's: checks treat ``m: 16`` as ``m: [16]``.
        """
        node: yaml.Node = self.root
        mark = node.start_mark
        known: list[str | int] = []
        for step in location:
            found = self._child(node, step)
            if found is None:
                break
            key, node = found
            mark = key.start_mark if at_key and len(known) == len(location) - 1 else node.start_mark
            known.append(step)
        # The key of a mistake at a key is in the text already.
        shown = location[:-1] if at_key else tuple(known)
        return _place(mark, f"{render_location(shown)}: {text}")

    def _child(self, node: yaml.Node, step: str | int) -> tuple[yaml.Node, yaml.Node] | None:
        """Find the node at a key or an index, after the node that names it."""
        if isinstance(step, str):
            return self.entries.get(id(node), {}).get(step)
        if isinstance(node, yaml.SequenceNode) and step < len(node.value):
            return node.value[step], node.value[step]
        return None


def render_location(location: Location) -> str:
    """Write a location as people do, e.g. ``gemms[3].layout[0]``."""
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(parts).removeprefix(".") or "top level"


def report_mistakes(path: Path, mistakes: Iterable[Mistake]) -> NoReturn:
    """Raise every mistake at once, a line each, by position, and their count.

    Raises:
        ManifestError: Always.

    """
    ordered = sorted(set(mistakes))
    lines = [f"{path}:{found.line}:{found.column}: {found.text}" for found in ordered]
    count = "1 mistake" if len(ordered) == 1 else f"{len(ordered)} mistakes"
    raise ManifestError("\n".join([*lines, f"{count} in {path}; nothing was built"]))


def read_source(path: Path) -> Source:
    """Read and parse a YAML file whose top level is a mapping.

    Raises:
        ManifestError: If the file cannot be read, is empty, too long, not UTF-8, not one YAML
            document, nested too deeply or endlessly, or has another top level.

    """
    text = _read_text(path)
    root = _compose(path, text)
    if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
        raise ManifestError(
            f"{path}: the file is empty; allowed: a mapping that starts with 'version: 1'"
        )
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        _fail(
            path,
            root.start_mark,
            f"top level: found {kind}; allowed: a mapping that starts with 'version: 1'",
        )
    converter = _Converter(path)
    data = converter.convert(root, (), 0)
    return Source(
        path=path,
        root=root,
        data=data,
        entries=converter.entries,
        mistakes=tuple(converter.mistakes),
    )


def _fail(path: Path, mark: yaml.Mark, text: str) -> NoReturn:
    report_mistakes(path, [_place(mark, text)])


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ManifestError(f"{path}: there is no such file; check the path") from None
    except IsADirectoryError:
        raise ManifestError(f"{path}: this is a directory; name a manifest file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(f"{path}: cannot read it: {reason}; check the path") from error
    if len(data) > MAX_FILE_BYTES:
        raise ManifestError(
            f"{path}: the file is over {MAX_FILE_BYTES} bytes; allowed: at most that; "
            "split it into several manifests"
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


class _Loader(yaml.SafeLoader):
    """Composes nodes, and refuses nesting that would exhaust Python's stack."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem=f"found more than {MAX_DEPTH} levels of nesting",
                problem_mark=event.start_mark,
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(path: Path, text: str) -> yaml.Node | None:
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
            _fail(path, mark, "found a second YAML document; allowed: one a file")
        advice = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
        context = f"{error.context}, " if error.context else ""
        _fail(path, mark, f"not valid YAML: {context}{error.problem}{advice}")
    except (ValueError, OverflowError) as error:
        # PyYAML lets these through from escapes like "\UFFFFFFFF" and from huge version numbers.
        _fail(path, loader.get_mark(), f"not valid YAML: {error}")
    finally:
        loader.dispose()


class _Converter:
    """Turns nodes into data, collecting what a mapping may not hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mistakes: list[Mistake] = []
        self.entries: _Entries = {}
        self.values = 0

    def convert(self, node: yaml.Node, location: Location, depth: int) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            _fail(
                self.path,
                node.start_mark,
                f"found over {MAX_VALUES} values once aliases are expanded; "
                "allowed: at most that; use fewer aliases or split the file",
            )
        # An alias inside what it stands for has no end; one that only nests too deep is refused
        # with it, since neither can be a manifest.
        if depth > MAX_DEPTH:
            _fail(
                self.path,
                node.start_mark,
                f"found over {MAX_DEPTH} levels of nesting, or an alias inside the value that it "
                "stands for; write the value out",
            )
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if node.tag not in (f"{_TAG_PREFIX}map", f"{_TAG_PREFIX}seq"):
            return Foreign(kind="a tagged value", text=_tag(node))
        if isinstance(node, yaml.SequenceNode):
            return [
                self.convert(item, (*location, index), depth + 1)
                for index, item in enumerate(node.value)
            ]
        return self.mapping(node, location, depth)

    def mapping(self, node: yaml.Node, location: Location, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        nodes = self.entries[id(node)] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if isinstance(key, Foreign):
                text = f"found key {key.shown}; allowed: a plain word"
                self.add(key_node, location, text)
            elif key in nodes:
                text = f"found key {key!r} again (first on line {_line(nodes[key][0])})"
                self.add(key_node, location, f"{text}; allowed: once; merge or remove one of them")
            else:
                nodes[key] = key_node, value_node
                data[key] = self.convert(value_node, (*location, key), depth + 1)
        return data

    def key(self, node: yaml.Node) -> str | Foreign:
        if not isinstance(node, yaml.ScalarNode):
            return Foreign(
                kind="not a scalar",
                text="[...]" if isinstance(node, yaml.SequenceNode) else "{...}",
            )
        if node.tag == f"{_TAG_PREFIX}merge":
            return str(node.value)
        value = _scalar(node)
        if isinstance(value, int):
            return Foreign(kind="a number", text=str(value))
        return value

    def add(self, node: yaml.Node, location: Location, text: str) -> None:
        self.mistakes.append(_place(node.start_mark, f"{render_location(location)}: {text}"))


def _place(mark: yaml.Mark, text: str) -> Mistake:
    return Mistake(line=mark.line + 1, column=mark.column + 1, text=text)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _tag(node: yaml.Node) -> str:
    # %-escapes can put any character into a tag.
    tag = str(node.tag).encode("unicode_escape").decode("ascii")
    return f"!!{tag.removeprefix(_TAG_PREFIX)}" if tag.startswith(_TAG_PREFIX) else tag


def _scalar(node: yaml.ScalarNode) -> str | int | Foreign:
    text = str(node.value)
    tag = str(node.tag).removeprefix(_TAG_PREFIX)
    if tag == "str" and all(part.isprintable() for part in text.split()):
        return text
    if tag == "int" and _DECIMAL.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else Foreign(kind="too long", text=text)
    return Foreign(kind=_FOREIGN_KINDS.get(tag, f"tag {_tag(node)}"), text=text)
