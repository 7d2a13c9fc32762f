"""How a mistake in a manifest is worded: what was found, what is allowed, what was likely meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal

from pydantic_core import ErrorDetails

from nvgemm_runtime.gemm.element_types import DType

from .schema import (
    ARCHITECTURES,
    SIZE_KEYS,
    VERSION,
    Rule,
    SharedEntry,
    allowed_keys,
)
from .source import Foreign, Location

_VALUE_ALIASES = {
    **{dtype.torch_name: (dtype.value,) for dtype in DType},
    "half": ("fp16",),
    "fp4": ("fp4_e2m1",),
    "e2m1": ("fp4_e2m1",),
    "f16": ("fp16",),
    "fp8": ("fp8_e4m3", "fp8_e5m2"),
    "e4m3": ("fp8_e4m3",),
    "e5m2": ("fp8_e5m2",),
    "float": ("fp32",),
    "f32": ("fp32",),
    "s8": ("int8",),
    "i8": ("int8",),
    "u8": ("uint8",),
    "int": ("int32",),
    "i32": ("int32",),
    "linear": ("tn",),
    "rc": ("tn",),
    "rcr": ("tn",),
    "rr": ("tt",),
    "rrr": ("tt",),
    "cc": ("nn",),
    "ccr": ("nn",),
    "cr": ("nt",),
    "crr": ("nt",),
    "gemm": ("mm",),
    "matmul": ("mm",),
    "linear_mm": ("mm",),
    "_int_mm": ("mm",),
    "batched": ("bmm",),
    "_grouped_mm": ("grouped_mm",),
    "grouped": ("grouped_mm",),
    "moe": ("grouped_mm",),
    "mxfp8": ("e8m0_1x32",),
    "mxfp4": ("e8m0_1x32",),
    "mx": ("e8m0_1x32",),
    "1x32": ("e8m0_1x32",),
    "nvfp4": ("e4m3_1x16",),
    "1x16": ("e4m3_1x16", "e8m0_1x16"),
    "tensor": ("fp32_tensor",),
    "tensorwise": ("fp32_tensor",),
    "per_tensor": ("fp32_tensor",),
    "row": ("fp32_row",),
    "rowwise": ("fp32_row",),
    "per_row": ("fp32_row",),
    "per_channel": ("fp32_row",),
    "relu": ("bias_relu",),
    "gelu": ("bias_gelu_tanh",),
    "gelu_tanh": ("bias_gelu_tanh",),
    "bias_gelu": ("bias_gelu_tanh",),
    "silu": ("bias_silu",),
    "swish": ("bias_silu",),
    "residual": ("add",),
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
    "shape": ("gemms", "mnk", "nk"),
    "shapes": ("gemms", "mnk", "nk"),
    "problems": ("gemms", "mnk"),
    "matmuls": ("gemms",),
    "size": ("mnk", "nk"),
    "sizes": ("mnk", "nk"),
    "weights": ("nk",),
    "dtypes": ("dtype",),
    "type": ("dtype",),
    "out_dtype": ("out",),
    "output": ("out",),
    "layouts": ("layout",),
    "scale": ("scales",),
    "scaling": ("scales",),
    "recipe": ("scales",),
    "bias": ("epilogue",),
    "activation": ("epilogue",),
    "experts": ("groups",),
    "num_experts": ("groups",),
    "g": ("groups",),
    "batch_size": ("batch",),
    "batches": ("batch",),
    "b": ("batch",),
    "top_k": ("candidates",),
    "topk": ("candidates",),
    "note": ("comment",),
    "arch": ("targets",),
    "archs": ("targets",),
    "architectures": ("targets",),
    "gpu": ("device", "targets"),
    "gpus": ("targets",),
}

_CLEAR_RATIO = 0.75
"""How alike, by `difflib`, a misspelt key and what it means must be to read one as the other."""

_SUMS_HELP = "there is no such key: sums are fp32 for floating inputs and int32 for integers"
_SUMS_KEYS = ("acc", "accum", "accumulate", "accumulator", "acc_dtype", "accumulator_dtype")
_KEY_HELP = {
    "<<": "merge keys are not read: put what gemms share under 'defaults'",
    **dict.fromkeys(_SUMS_KEYS, _SUMS_HELP),
}

_BIAS_HELP = "write 'op: {}' with an epilogue: bias adds a row, add a matrix"
_SCALED_HELP = "write 'op: mm' with scales"
_OTHER_ACTIVATIONS = (
    "sigmoid", "tanh", "gelu_erf", "gelu_none", "elu", "selu", "celu", "leaky_relu", "prelu",
    "relu6", "mish", "hardswish", "hardtanh", "softplus", "swiglu", "geglu",
)  # fmt: skip
"""Activations that no kernel applies, though their names are like those of some that kernels do."""
_ACTIVATION_HELP = "no kernel applies it: write 'epilogue: bias' and apply it apart"
_VALUE_HELP = {
    **{
        ("epilogue", f"{prefix}{name}"): _ACTIVATION_HELP
        for prefix in ("", "bias_")
        for name in _OTHER_ACTIVATIONS
    },
    ("dtype", "mxfp8"): "write 'dtype: fp8_e4m3' with 'scales: e8m0_1x32'",
    ("dtype", "mxfp4"): "write 'dtype: fp4_e2m1' with 'scales: e8m0_1x32'",
    ("dtype", "nvfp4"): "write 'dtype: fp4_e2m1' with 'scales: e4m3_1x16'",
    ("op", "addmm"): _BIAS_HELP.format("mm"),
    ("op", "baddbmm"): _BIAS_HELP.format("bmm"),
    ("op", "_scaled_mm"): _SCALED_HELP,
    ("op", "scaled_mm"): _SCALED_HELP,
    ("op", "_scaled_mm_v2"): _SCALED_HELP,
}
"""By field and what was found: what to write instead, where that is more than another value."""


def similar(text: str, allowed: Iterable[str], aliases: dict[str, tuple[str, ...]]) -> list[str]:
    """Find the allowed texts that someone who wrote ``text`` likely meant, best first."""
    listed = list(allowed)
    word = _word(text)
    meant = [choice for choice in (word, *_aliased(word, aliases)) if choice in listed]
    if not meant and len(word) <= 40:
        # max() keeps the first of equals, and allowed texts are listed commonest first.
        ratios = {c: difflib.SequenceMatcher(None, word, c.lower()).ratio() for c in listed}
        nearest = max(listed, key=ratios.__getitem__)
        meant = [nearest] if ratios[nearest] >= 0.5 else []
    return meant


def _word(text: str) -> str:
    return text.strip().lower().removeprefix("torch.").replace("-", "_")


def _aliased(word: str, aliases: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    # "sm_100" and "sm100" are the same mistake.
    return aliases.get(word) or aliases.get(word.replace("_", "", 1)) or ()


def meant_keys(key: str, location: Location) -> list[str]:
    """Find the keys that someone who wrote the unknown ``key`` likely meant in that mapping."""
    if _word(key) in _KEY_HELP:
        return []
    return similar(key, allowed_keys(location), _KEY_ALIASES)


def clear_meaning(key: str) -> str | None:
    """Find the one key that a misspelt key of the top level cannot but mean."""
    allowed = allowed_keys(())
    if key in allowed or key in SharedEntry.model_fields:
        return None
    word = _word(key)
    known = [meant for meant in _aliased(word, _KEY_ALIASES) if meant in allowed]
    close = difflib.get_close_matches(word[:40], allowed, n=1, cutoff=_CLEAR_RATIO)
    return next(iter(known or close), None)


def explain_error(error: ErrorDetails) -> str:
    """Word one of pydantic's errors: what was found, what is allowed, what was likely meant."""
    kind, value, location = error["type"], error["input"], error["loc"]
    fields = [step for step in location if isinstance(step, str)]
    if kind == "rule":
        rule: Rule = error["ctx"]["rule"]
        return f"found {show(value)}; allowed: {rule.allowed}{_value_hint(rule, value, fields[-1])}"
    if kind == "extra_forbidden":
        return explain_key(fields[-1], location[:-1], value)
    if kind == "missing":
        example = f"; add 'version: {VERSION}'" if location == ("version",) else ""
        return f"found no key {fields[-1]!r}, which is required{example}"
    if kind == "flat":
        return _explain_flat(value, _INNER_LISTS[fields[-1]])
    # An index ends the location of an inner list, and only of one.
    form = _LIST_FORMS.get(fields[-1]) if isinstance(location[-1], int) else None
    if kind in ("too_short", "too_long"):
        found = f"a list of {len(value)}" if value else "an empty list"
        return f"found {found}; allowed: {form or 'at least one entry'}"
    if kind == "list_type":
        hint = f"; did you mean [{value}]?" if isinstance(value, (str, int)) and not form else ""
        if isinstance(value, dict) and not form:
            hint = '; start each entry with "- "'
        return f"found {show(value)}; allowed: {form or 'a list'}{hint}"
    allowed = f"a mapping with keys out of {', '.join(allowed_keys(location[:1]))}"
    if location[0] == "targets":
        allowed = f"{', '.join(ARCHITECTURES)} or {allowed}"
    return f"found {show(value)}; allowed: {allowed}"


_LIST_FORMS = {"nk": "a pair [n, k]", "mnk": "a triple [m, n, k]"}
_INNER_LISTS = {"nk": "[n, k]", "mnk": "[m, n, k]"}


def _explain_flat(value: object, inner: str) -> str:
    text = f"found {show(value)}; allowed: a list [{inner}, ...]"
    width = inner.count(",") + 1
    if not isinstance(value, list) or [type(item) for item in value] != [int] * width:
        return text
    return f"{text}; did you mean [{value}]?"


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


def _value_hint(rule: Rule, value: object, field: str) -> str:
    text = value.text if isinstance(value, Foreign) else value
    help = f"; {rule.help}" if rule.help else ""
    if isinstance(value, Foreign) and value.advice:
        return f"; {value.advice}"
    if rule.choices:
        if not isinstance(text, str):
            return help
        if (field, _word(text)) in _VALUE_HELP:
            return f"; {_VALUE_HELP[field, _word(text)]}"
        return suggest(similar(text, rule.choices, _VALUE_ALIASES)) or help
    if rule.schema["type"] == "integer":
        return _integer_hint(rule, value, text, help)
    if text == "" or (isinstance(value, Foreign) and value.kind == "null"):
        return help
    if isinstance(value, (Foreign, int)):
        return "; put text in quotes" if rule.accepts(str(text)) else ""
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") if isinstance(text, str) else ""
    return suggest([name] if rule.accepts(name) else [])


_SEVERAL = re.compile(r"range\b.*|\d+ *(\.\.+|-|:|to) *\d+|\d+([, ]+\d+)+")


def _integer_hint(rule: Rule, value: object, text: object, help: str) -> str:
    if isinstance(value, dict):
        return help
    if not isinstance(text, str):
        return ""
    number = _meant_integer(text)
    if rule.accepts(number):
        # What is digits alone, and text nevertheless, is text because of its quotes.
        quoted = ", without quotes" if value == str(number) else ""
        return f"; did you mean {number}{quoted}?"
    return help if _SEVERAL.fullmatch(text.strip()) else ""


def _meant_integer(text: str) -> int | None:
    """Read an integer as other languages, or people, write it."""
    word = re.sub(r"(?<=\d)[_ ](?=\d{3})|(?<=\d),(?=\d{3}(\D|$))", "", text.strip().lower())
    if re.fullmatch(r"\+?\d{1,20}(\.0*)?", word):
        return int(word.partition(".")[0])
    if re.fullmatch(r"0x[0-9a-f]{1,16}|0o[0-7]{1,22}|0b[01]{1,64}", word):
        return int(word, 0)
    if re.fullmatch(r"\+?\d{1,20}(\.\d{0,20})?e\+?\d{1,2}", word):
        number = Decimal(word)
        return int(number) if number == number.to_integral_value() else None
    return None


def explain_key(key: str, location: Location, value: object = None) -> str:
    """Word an unknown key: what is allowed in its mapping, and what was likely meant."""
    allowed = allowed_keys(location)
    meant = meant_keys(key, location)
    if {"mnk", "nk"} <= {*meant} and isinstance(value, list):
        widths = {len(item) for item in value if isinstance(item, list)}
        if widths in ({2}, {3}):
            meant = ["nk"] if widths == {2} else ["mnk"]
    hint = suggest(meant)
    if _word(key) in _KEY_HELP:
        hint = f"; {_KEY_HELP[_word(key)]}"
    elif key in (*SIZE_KEYS, "batch", "groups"):
        hint = "; sizes belong in the entries of 'gemms'"
    elif not location and key in SharedEntry.model_fields:
        hint = "; it belongs under 'defaults' or in the entries of 'gemms'"
    return f"found key {key!r}; allowed: {', '.join(allowed)}{hint}"
