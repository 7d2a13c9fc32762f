"""Reads YAML as plain data with line and column for each value.

PyYAML's constructor would silently keep the last of two equal keys, read ``010`` as eight and
``1:30`` as ninety, and drop positions. So only its parser is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.composer import Composer
from yaml.reader import Reader

from nvgemm_runtime.errors import ManifestError, count_text

from ..storage.files import IrregularFileError, read_start

MAX_FILE_BYTES = 4 << 20
"""Largest file size."""

MAX_DEPTH = 32
"""Deepest nesting; a manifest needs five levels."""

_TOO_DEEP = f"found far more than {MAX_DEPTH} levels of nesting; write out the values"


@dataclass(frozen=True, kw_only=True, order=True)
class Mistake:
    """Mistake in a file; line and column count from 1."""

    line: int
    column: int
    text: str


def mistake_at(mark: yaml.Mark, text: str) -> Mistake:
    """Creates a mistake at a mark, whose line and column count from 0."""
    return Mistake(line=mark.line + 1, column=mark.column + 1, text=text)


def _mistake_after(before: str, text: str) -> Mistake:
    """Creates a mistake just after the text ``before``."""
    return Mistake(line=before.count("\n") + 1, column=len(before) - before.rfind("\n"), text=text)


def report_mistakes(path: Path, mistakes: Iterable[Mistake]) -> NoReturn:
    """Raises all mistakes at once, one per line, sorted by position, with their count.

    Raises:
        ManifestError: Always.
    """
    ordered = sorted(set(mistakes))
    lines = [f"{path}:{mistake.line}:{mistake.column}: {mistake.text}" for mistake in ordered]
    count = count_text(len(ordered), "mistake")
    raise ManifestError("\n".join([*lines, f"{count} in {path}"]))


def fail(path: Path, mark: yaml.Mark, text: str) -> NoReturn:
    """Raises one mistake in the format of `report_mistakes`."""
    report_mistakes(path, [mistake_at(mark, text)])


def read_bytes(path: Path, *, if_absent: str, if_too_long: str) -> bytes:
    """Reads a file with at most `MAX_FILE_BYTES`.

    ``if_absent`` and ``if_too_long`` are the next steps in messages.

    Raises:
        ManifestError: If the file cannot be read or is too long.
    """
    try:
        data = read_start(path, MAX_FILE_BYTES + 1)
    except IrregularFileError as error:
        raise ManifestError(str(error)) from None
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; {if_absent}") from None
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
    """Reads a text file.

    Raises:
        ManifestError: If it cannot be read, is too long, or is not UTF-8.
    """
    data = read_bytes(
        path, if_absent="check the path", if_too_long="split it into several manifests"
    )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = f"found byte 0x{data[error.start]:02x}; allowed: UTF-8; save the file as UTF-8"
        report_mistakes(path, [_mistake_after(data[: error.start].decode("utf-8"), text)])


def _make_loader(text: str) -> Any:
    """Creates libyaml's parser, which is several times faster than PyYAML's, or else PyYAML's."""
    if not yaml.__with_libyaml__:
        return yaml.SafeLoader(text)
    from yaml._yaml import CParser
    from yaml.resolver import Resolver

    # Only libyaml's events: its own composer recurses in C, without a limit.
    class FastLoader(Composer, CParser, Resolver):
        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            Resolver.__init__(self)

    return FastLoader(text)


def compose(path: Path, text: str) -> yaml.Node | None:
    """Parses YAML; returns None if there is no document.

    Raises:
        ManifestError: If the text is not one YAML document, or is nested too deeply.
    """
    foreign = Reader.NON_PRINTABLE.search(text)
    if foreign is not None:
        message = f"found character {foreign[0]!r}, which YAML does not allow; remove it"
        report_mistakes(path, [_mistake_after(text[: foreign.start()], message)])
    loader = _make_loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None  # every parser error has one
        if error.problem == "but found another document":
            fail(path, mark, "found a second YAML document; allowed: one per file")
        remainder = "".join(text.split("\n")[mark.line : mark.line + 1])[mark.column :]
        advice = "; indent with spaces" if remainder.startswith("\t") else ""
        if error.problem == "exceeded maximum nesting depth":  # libyaml since 0.2.6: 1000 levels
            fail(path, mark, _TOO_DEEP)
        context = f"{error.context}, " if error.context else ""
        fail(path, mark, f"not valid YAML: {context}{error.problem}{advice}")
    except RecursionError:  # PyYAML and older libyaml recurse instead
        report_mistakes(path, [Mistake(line=1, column=1, text=_TOO_DEEP)])
    except (ValueError, OverflowError) as error:
        # PyYAML does not catch these, from escapes like "\UFFFFFFFF" and huge version numbers.
        report_mistakes(path, [Mistake(line=1, column=1, text=f"not valid YAML: {error}")])
    finally:
        loader.dispose()
    return node


MAX_VALUES = 1_000_000
"""Largest number of values after alias expansion: nested aliases can expand to billions."""

MAX_DIGITS = 20
"""Longest integer to convert: Python refuses to convert or print thousands of digits."""

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
}
_REMOVE_TAG = "remove the tag"


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Value with a YAML type that manifests do not use.

    Attributes:
        kind: Type name.
        text: Spelling in the file.
        advice: Next step, whatever the allowed values; possibly empty.
    """

    kind: str
    text: str
    advice: str = ""

    @property
    def shown(self) -> str:
        """Spelling, short and on one line, with the kind if that adds information."""
        if not self.text:
            return "nothing"
        text = self.text if len(self.text) <= 40 else f"{self.text[:37]}..."
        text = text.encode("unicode_escape").decode("ascii")
        return text if text == self.kind else f"{text} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Parsed file.

    Attributes:
        root: Top-level YAML node.
        data: Values: str, int, list, dict with text keys, and `Foreign` for anything else.
        entries: Mapping entries' nodes by key, by the mapping node's id.
        mistakes: YAML-level mistakes; ``data`` lacks those parts.
    """

    root: yaml.MappingNode
    data: dict[str, Any]
    entries: _Entries
    mistakes: tuple[Mistake, ...]

    def mistake(self, location: Location, text: str, *, at_key: bool = False) -> Mistake:
        """Creates a mistake at a value, or at its key.

        A location below a scalar is the scalar's: checks treat ``m: 16`` as ``m: [16]``.
        """
        node: yaml.Node = self.root
        mark = node.start_mark
        known: list[str | int] = []
        for step in location:
            child = self._child(node, step)
            if child is None:
                break
            key, node = child
            mark = key.start_mark if at_key and len(known) == len(location) - 1 else node.start_mark
            known.append(step)
        # For a mistake at a key, the text already names the key.
        shown = location[:-1] if at_key else tuple(known)
        return mistake_at(mark, f"{render_location(shown)}: {text}")

    def rename(self, old: str, new: str) -> Source:
        """Returns a copy with a top-level key renamed to an unused one."""
        data = {new if key == old else key: value for key, value in self.data.items()}
        nodes = self.entries[id(self.root)]
        renamed = {new if key == old else key: key_nodes for key, key_nodes in nodes.items()}
        return replace(self, data=data, entries={**self.entries, id(self.root): renamed})

    def _child(self, node: yaml.Node, step: str | int) -> tuple[yaml.Node, yaml.Node] | None:
        """Returns the naming node and the child node at a key or an index."""
        if isinstance(step, str):
            return self.entries.get(id(node), {}).get(step)
        if isinstance(node, yaml.SequenceNode) and step < len(node.value):
            return node.value[step], node.value[step]
        return None


def render_location(location: Location) -> str:
    """Formats a location for messages, e.g. ``gemms[3].layout[0]``."""
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(parts).removeprefix(".") or "top level"


def make_source(path: Path, root: yaml.Node | None) -> Source:
    """Converts YAML nodes, whose top level must be a mapping, into data.

    Raises:
        ManifestError: If the file is empty, has another top level, or aliases expand too far.
    """
    if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
        raise ManifestError(
            f"{path}: the file is empty; allowed: a mapping that starts with 'version: 1'"
        )
    if not isinstance(root, yaml.MappingNode):
        observed = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
    elif root.tag != f"{_TAG_PREFIX}map":
        observed = f"{_tag(root)} (a tagged value)"
    else:
        converter = _Converter(path)
        data = converter.convert(root, (), 0)
        return Source(
            root=root,
            data=data,
            entries=converter.entries,
            mistakes=tuple(converter.mistakes),
        )
    text = f"top level: found {observed}; allowed: a mapping that starts with 'version: 1'"
    fail(path, root.start_mark, text)


class _Converter:
    """Converts nodes into data and collects mapping mistakes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mistakes: list[Mistake] = []
        self.entries: _Entries = {}
        self.values = 0

    def convert(self, node: yaml.Node, location: Location, depth: int) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            text = (
                f"found over {MAX_VALUES} values after alias expansion; "
                "allowed: at most that; use fewer aliases or split the file"
            )
            fail(self.path, node.start_mark, text)
        # A recursive alias never ends. One that only nests too deep is refused as well; neither can
        # be a manifest.
        if depth > MAX_DEPTH:
            fail(
                self.path,
                node.start_mark,
                f"found over {MAX_DEPTH} levels of nesting, or a recursive alias; write out the "
                "value",
            )
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if node.tag not in (f"{_TAG_PREFIX}map", f"{_TAG_PREFIX}seq"):
            return Foreign(kind="a tagged value", text=_tag(node), advice=_REMOVE_TAG)
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
                advice = f"; {key.advice}" if key.advice else ""
                text = f"found key {key.shown}; allowed: a plain word{advice}"
                self.add(key_node, location, text)
            elif key in nodes:
                text = (
                    f"found key {key!r} again (first on line {nodes[key][0].start_mark.line + 1})"
                )
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
        self.mistakes.append(mistake_at(node.start_mark, f"{render_location(location)}: {text}"))


def _tag(node: yaml.Node) -> str:
    # %-escapes can put any character into a tag.
    tag = str(node.tag).encode("unicode_escape").decode("ascii")
    return f"!!{tag.removeprefix(_TAG_PREFIX)}" if tag.startswith(_TAG_PREFIX) else tag


def _scalar(node: yaml.ScalarNode) -> str | int | Foreign:
    text = str(node.value)
    tag = str(node.tag).removeprefix(_TAG_PREFIX)
    if tag == "str":
        return _printable(text)
    if tag == "int" and _DECIMAL.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else Foreign(kind="too long", text=text)
    if tag in _FOREIGN_KINDS:
        return Foreign(kind=_FOREIGN_KINDS[tag], text=text)
    return Foreign(kind=f"tag {_tag(node)}", text=text, advice=_REMOVE_TAG)


def _printable(text: str) -> str | Foreign:
    wrong = next((char for char in text if not (char.isprintable() or char.isspace())), None)
    if wrong is None:
        return text
    kind = f"text with the unprintable character U+{ord(wrong):04X}"
    return Foreign(kind=kind, text=text, advice="remove that character")
