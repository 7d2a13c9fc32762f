"""One of several equal parts of a build or a tuning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One of several equal parts of a list.

    Attributes:
        number: Its number, from 1.
        count: Number of parts.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads a text such as ``2/8``.

        Raises:
            ValueError: If it is no such text, or there is no such shard.
        """
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count:
            raise ValueError(f"{text[:20]!r} is not a shard such as 2/8, between 1/8 and 8/8")
        return cls(number=number, count=count)

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Returns this shard's items; each item is in one, and lengths differ by one at most."""
        return items[self.number - 1 :: self.count]
