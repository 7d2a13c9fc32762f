"""Reads a Hugging Face config.json and reports its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nvgemm_runtime.errors import ManifestError

from .messages import show
from .models import FAMILIES
from .models.decoder import QUANTIZATION_KEYS, DecoderConfig, quantization_of
from .models.model import Model
from .models.quantization import Quantization
from .source import read_bytes

_ALLOWED = {
    "int_type": "an integer",
    "greater_than_equal": "an integer of at least {ge}",
    "less_than_equal": "an integer of at most {le}",
    "bool_type": "true or false",
    "list_type": "a list",
}
"""Allowed values by pydantic error name."""


def find_config(path: Path) -> Path:
    """Resolves a user's argument: a config, or a model directory with a config.json."""
    return path / "config.json" if path.is_dir() else path


def read_model(path: Path) -> Model:
    """Reads a config.json and finds its model's GEMMs.

    A family in `FAMILIES` is read from the config alone; transformers builds and runs any other
    model, without weights.

    Raises:
        ManifestError: If the config cannot be read, a key is missing or invalid, or transformers
            cannot build or run the model. The message has one line per mistake:
            ``file: key: found; allowed``.
        ToolchainError: If the model needs transformers, which is missing or has another version.
    """
    text = read_bytes(
        path,
        if_absent="name a model's config.json or its directory",
        if_too_long="name a model's config.json",
    )
    data = _parse(path, text)
    model_type = data.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return _read_family(path, model_type, data).to_model(model_type)
    if not isinstance(model_type, str):
        observed = _json_text(model_type) if "model_type" in data else "no such key"
        raise ManifestError(
            f"{path}: model_type: found {observed}; allowed: the name of an architecture, such as "
            "llama; record a model without one with nvgemm-aot record"
        )
    from .traced.building import require_transformers

    version = require_transformers(path, model_type, ", ".join(sorted(FAMILIES)))
    quantization = _read_quantization(path, data)

    from .traced import traced_model

    return traced_model.read_model(path, data, version, quantization)


def _read_family(path: Path, model_type: str, data: dict[str, Any]) -> DecoderConfig:
    try:
        return FAMILIES[model_type].model_validate(data)
    except ValidationError as error:
        lines = [
            f"{path}: {_explain_error(detail, model_type)}"
            for detail in error.errors(include_url=False)
        ]
        raise ManifestError("\n".join(lines)) from None


def _read_quantization(path: Path, data: dict[str, Any]) -> Quantization | None:
    """Reads quantization for a model without a family; a part's applies to the whole model."""
    inner = (value for value in data.values() if isinstance(value, dict))
    for config in (data, *inner):
        for key in QUANTIZATION_KEYS:
            if config.get(key) is not None:
                try:
                    return quantization_of(config[key])
                except ValueError as error:
                    raise ManifestError(f"{path}: {error}") from None
    return None


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
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        observed = ascii(error.object[error.start])
        raise ManifestError(
            f"{path}: found {observed} in a string, half of a surrogate pair; allowed: Unicode text"
        ) from None
    return parsed


def _explain_error(error: ErrorDetails, model_type: str) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{key}: found no such key, which {model_type} requires"
    allowed = _ALLOWED.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    return f"{key}: found {_json_text(error['input'])}; allowed: {allowed}"


def _json_text(value: object) -> str:
    return show(value) if isinstance(value, (str, list, dict)) else json.dumps(value)
