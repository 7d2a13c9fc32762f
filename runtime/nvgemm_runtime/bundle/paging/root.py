"""Root of a header in pages: the facts, and where the pages are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..decode import FACTS, HeaderDecoder
from ..format import PAGED_VERSION, Header, Span
from ..header_rules import Parts
from ..unknown_parts import separate_unknown_entries
from .tables import ROWS, Tables, TablesDecoder

_ROOT = FACTS | {"imports", "pages", "signatures"}


@dataclass(frozen=True, kw_only=True)
class Root:
    """Checked root.

    Attributes:
        facts: Header without entries.
        parts: The root's dictionary and sources; its lists of entries are empty.
        tables: Pages.
        decoder: Decoder for entries.
        file_bytes: File length.
    """

    facts: Header
    parts: Parts
    tables: Tables
    decoder: HeaderDecoder
    file_bytes: int

    @property
    def body_offset(self) -> int:
        """First byte behind the pages."""
        return self.tables.tables[ROWS].offsets[-1]


def decode_root(data: bytes, *, where: str, root_end: int, file_bytes: int) -> Root:
    """Reads a root and checks every rule that needs no page.

    Args:
        data: Root, whose digest was already checked.
        where: File name, for messages.
        root_end: First byte behind it.
        file_bytes: File length.

    Raises:
        BundleFormatError: Naming the broken rule, the observed value and the allowed one.
    """
    decoder = HeaderDecoder(where, PAGED_VERSION)
    top = decoder.document(data)
    decoder.fields(top, "header", _ROOT)
    tables = TablesDecoder(where).tables(top, root_end)
    body_offset = tables.tables[ROWS].offsets[-1]
    if body_offset > file_bytes:
        decoder.fail("spans-tile", f"pages end at byte {body_offset}, the file at {file_bytes}")
    decoder = HeaderDecoder(where, PAGED_VERSION, spans_from=body_offset)
    lists: dict[str, Any] = {"kernels": [], "rankings": [], "unserved": [], "failures": []}
    parts = decoder.parts({**top, **lists})
    if parts.dictionary is not None:
        require_in_file(decoder, "dictionary", parts.dictionary.span, file_bytes)
    facts = separate_unknown_entries(decoder.facts(top, parts), parts)
    return Root(
        facts=replace(facts, ranked_products=tables.products),
        parts=parts,
        tables=tables,
        decoder=decoder,
        file_bytes=file_bytes,
    )


def require_in_file(decoder: HeaderDecoder, name: str, span: Span, file_bytes: int) -> None:
    """Requires a span to end within the file.

    Raises:
        BundleFormatError: If it does not.
    """
    if span.end > file_bytes:
        decoder.fail("spans-tile", f"{name} ends at byte {span.end}, the file at {file_bytes}")
