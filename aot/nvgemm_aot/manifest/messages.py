"""Explains manifest mistakes: found and allowed values, and the likely intended one."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable
from decimal import Decimal

from pydantic_core import ErrorDetails

from nvgemm_runtime.gemm import target
from nvgemm_runtime.gemm.aten import OPERATORS
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.types import DType, ScaleRecipe

from .schema import ARCHITECTURES, SIZE_KEYS, VERSION, Rule, SharedEntry, allowed_keys
from .source import Foreign, Location

_WORDS = {
    **{member.value: member.row.aliases for member in (*DType, *ScaleRecipe)},
    **{epilogue.name: epilogue.aliases for epilogue in ALL_EPILOGUES},
    **{arch: row.aliases for arch, row in target.ARCHITECTURES.items()},
    **{
        meaning: tuple(words.split())
        for meaning, words in {
            "tn": "linear rc rcr",
            "tt": "rr rrr",
            "nn": "cc ccr",
            "nt": "cr crr",
            "mm": "gemm matmul linear_mm _int_mm",
            "bmm": "batched",
            "grouped_mm": "_grouped_mm grouped moe",
            "k_grouped_mm": "wgrad grouped_wgrad",
            "gathered_mm": "embedding_bag combine unpermute gather_sum",
            "gathered_grouped_mm": "gather_grouped_mm grouped_gather permute",
            "gemms": "shape shapes problems matmuls",
            "mnk": "shape shapes problems size sizes",
            "nk": "shape shapes size sizes weights",
            "dtype": "dtypes type dtype_a a_dtype",
            "dtype_b": "b_dtype",
            "out": "out_dtype output",
            "layout": "layouts",
            "scales": "scale scaling recipe",
            "epilogue": "bias activation",
            "add": "residual",
            "groups": "experts num_experts g",
            "batch": "batch_size batches b",
            "candidates": "top_k topk",
            "comment": "note",
            "device": "gpu",
            "devices": "gpus products",
            "platform": "host os cpu",
            "linux_aarch64": "aarch64 arm64 arm grace manylinux_2_28_aarch64",
            "linux_x86_64": "x86_64 amd64 x86 linux manylinux_2_28_x86_64",
            "cuda": "cuda_version toolkit",
            "cu12": "12 12.6 12.8 12.9 cu126 cu128 cu129 cuda12",
            "cu13": "13 13.0 cu130 cuda13",
            "targets": "arch archs architectures gpu gpus",
        }.items()
    },
}
"""Other spellings that people write, by manifest value or key."""

_MEANINGS: dict[str, tuple[str, ...]] = {dtype.torch_name: (dtype.value,) for dtype in DType}
for _meaning, _words in _WORDS.items():
    for _one in _words:
        _MEANINGS[_one] = (*_MEANINGS.get(_one, ()), _meaning)
"""Intended manifest values or keys, by lower-case spelling."""

_SUMS_HELP = "there is no such key: sums are fp32 for floating inputs and int32 for integers"
_KEY_HELP = {
    "<<": "merge keys are not supported: put shared keys under 'defaults'",
    **dict.fromkeys(
        ("acc", "accum", "accumulate", "accumulator", "acc_dtype", "accumulator_dtype"), _SUMS_HELP
    ),
}
"""Help for unknown keys that resemble no other."""

_OTHER_ACTIVATIONS = (
    "sigmoid", "tanh", "gelu_erf", "gelu_none", "elu", "selu", "celu", "leaky_relu", "prelu",
    "relu6", "mish", "hardswish", "hardtanh", "softplus",
)  # fmt: skip
"""Activations that no kernel applies, although their names resemble supported ones."""

_ADD_HELP = "write 'op: {}' with an epilogue: bias adds a row, add a matrix"
_SCALED_HELP = "write 'op: mm' with scales"
_VALUE_HELP = {
    **dict.fromkeys(
        [f"{prefix}{name}" for prefix in ("", "bias_") for name in _OTHER_ACTIVATIONS],
        "no kernel applies it: write 'epilogue: bias' and apply it separately",
    ),
    "mxfp8": "write 'dtype: fp8_e4m3' with 'scales: e8m0_1x32'",
    "mxfp4": "write 'dtype: fp4_e2m1' with 'scales: e8m0_1x32'",
    "nvfp4": "write 'dtype: fp4_e2m1' with 'scales: e4m3_1x16'",
    "scaled_mm": _SCALED_HELP,
    **{
        name: _SCALED_HELP if row.product is None else _ADD_HELP.format(row.op.value)
        for name, row in OPERATORS.items()
        if Role.ADDEND in row.tensors.values() and Role.OFFSETS not in row.tensors.values()
    },
}
"""Help for unknown values whose replacement needs more than another value."""


def _word(text: str) -> str:
    return text.strip().lower().removeprefix("torch.").replace("-", "_")


def _known_meanings(word: str, allowed: Iterable[str]) -> list[str]:
    # "sm_100" and "sm100" are the same mistake.
    known = _MEANINGS.get(word) or _MEANINGS.get(word.replace("_", "", 1), ())
    return [choice for choice in (word, *known) if choice in allowed]


def _most_similar(word: str, allowed: Iterable[str]) -> list[str]:
    """Returns the allowed text most similar to ``word``, or nothing if none is close."""
    ratios = {text: difflib.SequenceMatcher(None, word[:40], text.lower()) for text in allowed}
    nearest = max(ratios, key=lambda text: ratios[text].ratio())  # ties: the first
    return [nearest] if ratios[nearest].ratio() >= 0.5 else []


def meant_keys(key: str, location: Location) -> list[str]:
    """Returns likely intended keys for an unknown ``key`` in the mapping at ``location``."""
    word, allowed = _word(key), allowed_keys(location)
    return (
        [] if word in _KEY_HELP else _known_meanings(word, allowed) or _most_similar(word, allowed)
    )


def _did_you_mean(texts: Iterable[str]) -> str:
    listed = " or ".join(repr(text) for text in texts)
    return f"; did you mean {listed}?" if listed else ""


def explain_key(key: str, location: Location) -> str:
    """Explains an unknown key."""
    if _word(key) in _KEY_HELP:
        hint = f"; {_KEY_HELP[_word(key)]}"
    elif key in (*SIZE_KEYS, "batch", "groups"):
        hint = "; sizes belong in the entries of 'gemms'"
    elif not location and key in SharedEntry.model_fields:
        hint = "; it belongs under 'defaults' or in the entries of 'gemms'"
    else:
        hint = _did_you_mean(meant_keys(key, location))
    return f"found key {key!r}; allowed: {', '.join(allowed_keys(location))}{hint}"


_ITEMS = {"nk": "a pair [n, k]", "mnk": "a triple [m, n, k]"}
"""Item descriptions for keys that hold lists of lists."""


def explain_error(error: ErrorDetails) -> str:
    """Explains a pydantic error."""
    kind, value, location = error["type"], error["input"], error["loc"]
    field = next(step for step in reversed(location) if isinstance(step, str))
    if kind == "extra_forbidden":
        return explain_key(field, location[:-1])
    if kind == "missing":
        example = f"; add 'version: {VERSION}'" if location == ("version",) else ""
        return f"found no key {field!r}, which is required{example}"
    hint = ""
    if kind == "rule":
        rule: Rule = error["ctx"]["rule"]
        allowed, hint = rule.allowed, _value_hint(rule, value)
    elif field in _ITEMS and isinstance(location[-1], int):
        allowed = _ITEMS[field]
    elif kind in ("too_short", "too_long"):
        allowed = "at least one entry"
    elif kind == "list_type":
        allowed = "a list"
        if field in _ITEMS:
            allowed = f"a list, each entry {_ITEMS[field]}"
        elif isinstance(value, (str, int)):
            hint = f"; did you mean [{value}]?"
        elif isinstance(value, dict):
            hint = '; start each entry with "- "'
    else:
        allowed = f"a mapping with keys from {', '.join(allowed_keys(location[:1]))}"
        if location[0] == "targets":
            allowed = f"{', '.join(ARCHITECTURES)} or {allowed}"
    return f"found {show(value)}; allowed: {allowed}{hint}"


def show(value: object) -> str:
    """Formats a value briefly, as the file spells it."""
    if isinstance(value, Foreign):
        return value.shown
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return "a mapping" if isinstance(value, dict) else str(value)


def _value_hint(rule: Rule, value: object) -> str:
    """Returns a message's ending: the likely intended value, or another hint."""
    if isinstance(value, Foreign) and value.advice:
        return f"; {value.advice}"
    text = value.text if isinstance(value, Foreign) else value
    help = f"; {rule.help}" if rule.help else ""
    if rule.schema["type"] == "integer":
        number = _meant_integer(text) if isinstance(text, str) else None
        if rule.accepts(number):
            # Digits need quotes to be text.
            return f"; did you mean {number}{', without quotes' * (value == str(number))}?"
        return help if isinstance(value, dict) or _SEVERAL.fullmatch(str(text).strip()) else ""
    if rule.choices:
        if type(text) in (int, float):  # such as 12 for cu12
            text = str(text)
        if not isinstance(text, str):
            return help
        word = _word(text)
        meant = _known_meanings(word, rule.choices)
        if not meant and word in _VALUE_HELP:
            return f"; {_VALUE_HELP[word]}"
        return _did_you_mean(meant or _most_similar(word, rule.choices)) or help
    if not text or (isinstance(value, Foreign) and value.kind == "null"):
        return help
    if isinstance(value, (Foreign, int)):
        return "; put text in quotes" if rule.accepts(str(text)) else ""
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") if isinstance(text, str) else ""
    return _did_you_mean([name] if rule.accepts(name) else [])


_SEVERAL = re.compile(r"range\b.*|\d+ *(\.\.+|-|:|to) *\d+|\d+([, ]+\d+)+")


def _meant_integer(text: str) -> int | None:
    """Reads an integer in notations from other languages or everyday use."""
    word = re.sub(r"(?<=\d)[_ ,](?=\d{3}(\D|$))", "", text.strip().lower())
    if re.fullmatch(r"0[xob][0-9a-f]{1,16}", word):
        with contextlib.suppress(ValueError):
            return int(word, 0)
    if re.fullmatch(r"\+?\d{1,20}(\.\d{0,20})?(e\+?\d{1,2})?", word):
        number = Decimal(word)
        return int(number) if number == number.to_integral_value() else None
    return None
