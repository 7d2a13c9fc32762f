"""What code that torch.compile generated calls."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"\bnvgemm_(?:mm|bmm)_([0-9a-f]{12})\(")
_ATEN_CALL = re.compile(r"\bextern_kernels\.\w*mm\w*\(")


def modules(directory: Path) -> list[str]:
    """Generated code that calls kernels."""
    texts = [path.read_text() for path in sorted(directory.glob("**/*.py"))]
    return [text for text in texts if "AsyncCompile()" in text]


def bundled_calls(directory: Path) -> list[str]:
    """First digits of the kernels' ids, a call each."""
    return [call for text in modules(directory) for call in _CALL.findall(text)]


def aten_calls(directory: Path) -> list[str]:
    return [call for text in modules(directory) for call in _ATEN_CALL.findall(text)]
