"""Reads a Hugging Face config.json and reports all of its mistakes at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nvgemm_runtime.errors import ManifestError

from ..messages import show
from ..source import read_bytes
from . import FAMILIES
from .decoder import DecoderConfig

_ALLOWED = {
    "int_type": "an integer",
    "greater_than_equal": "an integer of at least {ge}",
    "less_than_equal": "an integer of at most {le}",
    "bool_type": "true or false",
    "list_type": "a list",
}
"""By pydantic's name of an error: what is allowed."""


def find_config(given: Path) -> Path:
    """Resolve what a user named: a config, or a model's directory with a config.json."""
    return given / "config.json" if given.is_dir() else given


def read_config(path: Path) -> tuple[str, DecoderConfig]:
    """Read a config.json.

    Returns:
        Its ``model_type``, and the keys that its family reads.

    Raises:
        ManifestError: If it cannot be read, is of no known family, or a key that the family needs
            is missing or wrong. The message has one line for each mistake:
            ``file: key: found; allowed``.
    """
    text = read_bytes(
        path,
        if_absent="name a model's config.json or its directory",
        if_too_long="name a model's config.json",
    )
    data = _parse(path, text)
    known = ", ".join(sorted(FAMILIES))
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        found = _json_text(model_type) if "model_type" in data else "no such key"
        raise ManifestError(
            f"{path}: model_type: found {found}; allowed: {known}; "
            "record another model with nvgemm-aot record, or write its manifest by hand"
        )
    try:
        return model_type, FAMILIES[model_type].model_validate(data)
    except ValidationError as error:
        lines = [
            f"{path}: {_explain(detail, model_type)}" for detail in error.errors(include_url=False)
        ]
        raise ManifestError("\n".join(lines)) from None


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    allowed = "allowed: the JSON object of a model's config.json"
    try:
        parsed = json.loads(data)
    except json.JSONDecodeError as error:
        raise ManifestError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}; {allowed}"
        ) from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ManifestError(f"{path}: not JSON: {reason}; {allowed}") from None
    if not isinstance(parsed, dict):
        raise ManifestError(f"{path}: found {_json_text(parsed)}; {allowed}")
    return parsed


def _explain(error: ErrorDetails, model_type: str) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{key}: found no such key, which {model_type} requires"
    allowed = _ALLOWED.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    return f"{key}: found {_json_text(error['input'])}; allowed: {allowed}"


def _json_text(value: object) -> str:
    return show(value) if isinstance(value, (str, list, dict)) else json.dumps(value)
