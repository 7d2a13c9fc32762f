"""What mkdocs calls while it builds the site: fills in what is made from code, and mends links.

A page asks for a part by ``<!-- generated: NAME -->``, or for a file of the repository by
``<!-- included: PATH -->``. Pages link to files of the repository as on a code host, relative to
themselves; a linked file that is no page is published under ``repository/``.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pages_from_code import ROOT, SECTIONS

DOCS = "docs"
INCLUDED = {
    "FORMAT.md": "reference/bundle-format.md",
    "manifests/README.md": "guide/manifests.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "CONTRIBUTING.md": "develop/index.md",
}
"""Documents outside docs/, and the pages that include them."""

_MARKER = re.compile(r"^<!-- (generated|included): (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Fill in a page's markers, and turn links to the repository into links of the site."""
    where = page.file.src_uri

    def fill(found: re.Match[str]) -> str:
        kind, name = found.groups()
        if kind == "included":
            text = (ROOT / name).read_text("utf-8")
            text = re.sub(r"\A# .*\n", "", text)  # the page has a title of its own
            return _with_links(text, posixpath.dirname(name), where, config, files)
        if name not in SECTIONS:
            raise PluginError(f"{where}: nothing makes the part {name!r}")
        text = SECTIONS[name]()
        return _with_links(text, f"{DOCS}/{posixpath.dirname(where)}", where, config, files)

    filled = _with_links(markdown, f"{DOCS}/{posixpath.dirname(where)}", where, config, files)
    return _MARKER.sub(fill, filled)


def _with_links(text: str, origin: str, where: str, config: Any, files: Files) -> str:
    """A text whose links, relative to a folder of the repository, lead to pages and files."""

    def link(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = posixpath.normpath(posixpath.join(origin, target))
        if path in INCLUDED:
            uri = INCLUDED[path]
        elif path.startswith(f"{DOCS}/"):
            uri = path.removeprefix(f"{DOCS}/")
        elif (ROOT / path).is_file():
            uri = f"repository/{path}" + (".txt" if path.endswith(".md") else "")
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        else:
            return found[0]  # mkdocs reports it
        return before + posixpath.relpath(uri, posixpath.dirname(where) or ".") + after

    parts = []
    end = 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(link, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(link, text[end:])])
