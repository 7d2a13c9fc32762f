"""A YAML file as plain data that remembers where each value stands.

PyYAML's own construction would silently keep the last of two equal keys, read ``010`` as eight and
``1:30`` as ninety, and forget every position. Here only its parser is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from nvgemm_runtime.errors import ManifestError

from .yaml_nodes import MAX_DEPTH, Mistake, fail, place

MAX_VALUES = 1_000_000
"""Most values after aliases are expanded: a few nested aliases can stand for billions."""

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
}
_REMOVE_TAG = "remove the tag"


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A value of a YAML type that has no use here.

    Attributes:
        kind: What it is.
        text: How the file spells it.
        advice: What to do about it, whatever should stand there; possibly empty.

    """

    kind: str
    text: str
    advice: str = ""

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
        return place(mark, f"{render_location(shown)}: {text}")

    def rename(self, old: str, new: str) -> Source:
        """Read what stands under a top-level key as if it stood under another, unused one."""
        data = {new if key == old else key: value for key, value in self.data.items()}
        nodes = self.entries[id(self.root)]
        renamed = {new if key == old else key: found for key, found in nodes.items()}
        return replace(self, data=data, entries={**self.entries, id(self.root): renamed})

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


def make_source(path: Path, root: yaml.Node | None) -> Source:
    """Turn the nodes of a YAML file, whose top level must be a mapping, into data.

    Raises:
        ManifestError: If there is nothing, another top level, or too much through aliases.

    """
    if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
        raise ManifestError(
            f"{path}: the file is empty; allowed: a mapping that starts with 'version: 1'"
        )
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
    elif root.tag != f"{_TAG_PREFIX}map":
        found = f"{_tag(root)} (a tagged value)"
    else:
        converter = _Converter(path)
        data = converter.convert(root, (), 0)
        return Source(
            path=path,
            root=root,
            data=data,
            entries=converter.entries,
            mistakes=tuple(converter.mistakes),
        )
    text = f"top level: found {found}; allowed: a mapping that starts with 'version: 1'"
    fail(path, root.start_mark, text)


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
            fail(
                self.path,
                node.start_mark,
                f"found over {MAX_VALUES} values once aliases are expanded; "
                "allowed: at most that; use fewer aliases or split the file",
            )
        # An alias inside what it stands for has no end; one that only nests too deep is refused
        # with it, since neither can be a manifest.
        if depth > MAX_DEPTH:
            fail(
                self.path,
                node.start_mark,
                f"found over {MAX_DEPTH} levels of nesting, or an alias inside the value that it "
                "stands for; write the value out",
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
        self.mistakes.append(place(node.start_mark, f"{render_location(location)}: {text}"))


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


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
    for character in text:
        if not (character.isprintable() or character.isspace()):
            kind = f"text with the unprintable character U+{ord(character):04X}"
            return Foreign(kind=kind, text=text, advice="remove that character")
    return text
