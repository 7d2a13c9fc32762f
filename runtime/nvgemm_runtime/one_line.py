"""Squeezes third-party messages into one printable line."""

from __future__ import annotations


def one_line(text: str) -> str:
    """A text as one line, whatever is in it, as headers and comments may hold it."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
