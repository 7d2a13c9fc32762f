"""How a mistake in a manifest is worded: what was found, what is allowed, what was likely meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from pydantic_core import ErrorDetails

from .manifest_schema import (
    ARCHITECTURES,
    NAME_PATTERN,
    SIZE_KEYS,
    VERSION,
    SharedEntry,
    allowed_keys,
)
from .yaml_source import Foreign, Location

_VALUE_ALIASES = {
    "bfloat16": ("bf16",),
    "float16": ("fp16",),
    "half": ("fp16",),
    "f16": ("fp16",),
    "fp8": ("fp8_e4m3", "fp8_e5m2"),
    "e4m3": ("fp8_e4m3",),
    "float8_e4m3fn": ("fp8_e4m3",),
    "e5m2": ("fp8_e5m2",),
    "float8_e5m2": ("fp8_e5m2",),
    "float32": ("fp32",),
    "float": ("fp32",),
    "f32": ("fp32",),
    "s8": ("int8",),
    "i8": ("int8",),
    "u8": ("uint8",),
    "int": ("int32",),
    "i32": ("int32",),
    "linear": ("tn",),
    "gemm": ("mm",),
    "matmul": ("mm",),
    "linear_mm": ("mm",),
    "baddbmm": ("bmm",),
    "batched": ("bmm",),
    "sm90": ("sm_90a",),
    "h100": ("sm_90a",),
    "h200": ("sm_90a",),
    "hopper": ("sm_90a",),
    "sm100": ("sm_100f", "sm_100a"),
    "b200": ("sm_100f",),
    "gb200": ("sm_100f",),
    "blackwell": ("sm_100f",),
    "sm103": ("sm_100f", "sm_103a"),
    "b300": ("sm_100f", "sm_103a"),
    "gb300": ("sm_100f", "sm_103a"),
}

_KEY_ALIASES = {
    "shapes": ("gemms", "mnk"),
    "problems": ("gemms", "mnk"),
    "matmuls": ("gemms",),
    "sizes": ("mnk",),
    "weights": ("nk",),
    "dtypes": ("dtype",),
    "type": ("dtype",),
    "out_dtype": ("out",),
    "output": ("out",),
    "layouts": ("layout",),
    "batch_size": ("batch",),
    "batches": ("batch",),
    "b": ("batch",),
    "top_k": ("candidates",),
    "topk": ("candidates",),
    "note": ("comment",),
    "arch": ("targets",),
    "archs": ("targets",),
    "architectures": ("targets",),
    "gpu": ("device",),
}


def similar(text: str, allowed: Iterable[str], aliases: dict[str, tuple[str, ...]]) -> list[str]:
    """Find the allowed texts that someone who wrote ``text`` likely meant, best first."""
    listed = list(allowed)
    word = text.strip().lower().removeprefix("torch.").replace("-", "_")
    # "sm_100" and "sm100" are the same mistake.
    known = aliases.get(word) or aliases.get(word.replace("_", "", 1)) or ()
    meant = [choice for choice in (word, *known) if choice in listed]
    if not meant and len(word) <= 40:
        # max() keeps the first of equals, and allowed texts are listed commonest first.
        ratios = {c: difflib.SequenceMatcher(None, word, c.lower()).ratio() for c in listed}
        nearest = max(listed, key=ratios.__getitem__)
        meant = [nearest] if ratios[nearest] >= 0.5 else []
    return meant


def meant_keys(key: str, location: Location) -> list[str]:
    """Find the keys that someone who wrote the unknown ``key`` likely meant in that mapping."""
    return similar(key, allowed_keys(location), _KEY_ALIASES)


def explain_error(error: ErrorDetails) -> str:
    """Word one of pydantic's errors: what was found, what is allowed, what was likely meant."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "rule":
        allowed, choices = context["allowed"], context["choices"]
        return f"found {show(value)}; allowed: {allowed}{_value_hint(value, choices, allowed)}"
    if kind == "extra_forbidden":
        return _explain_key(str(error["loc"][-1]), error["loc"][:-1])
    if kind == "missing":
        example = f"; add 'version: {VERSION}'" if error["loc"] == ("version",) else ""
        return f"found no key {str(error['loc'][-1])!r}, which is required{example}"
    form = _LIST_FORMS.get(error["loc"][-2]) if len(error["loc"]) > 1 else None
    if kind in ("too_short", "too_long"):
        found = f"a list of {len(value)}" if value else "an empty list"
        return f"found {found}; allowed: {form or 'at least one entry'}"
    if kind == "list_type":
        hint = f"; did you mean [{value}]?" if isinstance(value, (str, int)) and not form else ""
        return f"found {show(value)}; allowed: {form or 'a list'}{hint}"
    allowed = f"a mapping with keys out of {', '.join(allowed_keys(error['loc'][:1]))}"
    if error["loc"][0] == "targets":
        allowed = f"{', '.join(ARCHITECTURES)} or {allowed}"
    return f"found {show(value)}; allowed: {allowed}"


_LIST_FORMS: dict[str | int, str] = {"nk": "a pair [n, k]", "mnk": "a triple [m, n, k]"}


def show(value: object) -> str:
    """Write a found value, short and as the file spells it."""
    if isinstance(value, Foreign):
        return value.shown
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return "a mapping" if isinstance(value, dict) else str(value)


def suggest(texts: Iterable[str]) -> str:
    """Write the end of a message that names what was likely meant, if anything was."""
    listed = " or ".join(repr(text) for text in texts)
    return f"; did you mean {listed}?" if listed else ""


def _value_hint(value: object, choices: tuple[str, ...], allowed: str) -> str:
    text = value.text if isinstance(value, Foreign) else value
    if not isinstance(text, str):
        return ""
    if choices:
        return suggest(similar(text, choices, _VALUE_ALIASES))
    if allowed.startswith("an integer") or allowed.isdecimal():
        number = re.fullmatch(r"0*([1-9][0-9]{0,9})(\.0*)?", re.sub(r"[_, ]", "", text))
        return f"; did you mean {number[1]}?" if number else ""
    if isinstance(value, Foreign):
        return "; put text in quotes"
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return suggest([name] if re.fullmatch(NAME_PATTERN, name) else [])


def _explain_key(key: str, location: Location) -> str:
    allowed = allowed_keys(location)
    hint = suggest(meant_keys(key, location))
    if key == "<<":
        hint = "; merge keys are not read: put what gemms share under 'defaults'"
    elif key in SIZE_KEYS or key == "batch":
        hint = "; sizes belong in the entries of 'gemms'"
    elif not location and key in SharedEntry.model_fields:
        hint = "; it belongs under 'defaults' or in the entries of 'gemms'"
    return f"found key {key!r}; allowed: {', '.join(allowed)}{hint}"
