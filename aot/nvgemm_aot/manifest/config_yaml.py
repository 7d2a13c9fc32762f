"""Writes a manifest of a model's config as YAML; comments say where each GEMM comes from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import yaml
from pydantic import AliasChoices

from .from_config import ConfigEntry, ConfigManifest, ManifestOptions, RankGemm
from .models.decoder import DecoderConfig
from .schema import VERSION

_WIDTH = 98


def manifest_yaml(made: ConfigManifest) -> str:
    """Write a manifest that `load_manifest` reads."""
    entries = _entry_lines(made.entries, made.wanted)
    return "\n".join([*_head_lines(made), "gemms:", *entries, *_left_out_lines(made), ""])


def _head_lines(made: ConfigManifest) -> Iterator[str]:
    wanted = made.wanted
    yield from _comment_lines(
        f"Every GEMM of the layers and the head of a {made.model_type} model, by nvgemm-aot "
        f"manifest from-config. Attention itself is not a GEMM of this kind. Sizes from its "
        f"config: {', '.join(_size_texts(made.config))}."
    )
    yield from _comment_lines(
        "Pairs are [out features, in features] of one of tp GPUs; x2 means that one forward pass "
        "computes it twice."
    )
    quantization = made.config.quantization
    if quantization is not None:
        yield from _comment_lines(
            f"Its checkpoint is quantized by {json.dumps(quantization.method[:60])}: this is what "
            "engines run of it, and the end lists what no kernel can serve. A GEMM that is here in "
            "two types is quantized in some layers only, and its count is that of all. For the "
            "model before it was quantized, take quantization_config out of a copy of its config."
        )
    if any(entry.signature.epilogue is None and _has_bias(entry) for entry in made.entries):
        yield from _comment_lines(
            "+bias: the model adds a bias, and torch.compile computes both as addmm, for which "
            "a target has no operator. This is the product alone, in fp32, to which the plug-in of "
            "torch.compile has the bias added."
        )
    if any(entry.routing and entry.groups is None for entry in made.entries):
        yield from _comment_lines(
            "Experts are those of a loop over them, counted as where each is hit. Most programs "
            "compute all in one grouped GEMM, for which there is no operator here."
        )
    yield f"version: {VERSION}"
    yield f"name: {_quoted_if_needed(made.name)}"
    least, most = wanted.tokens[0], wanted.tokens[-1]
    tokens = f"{least} to {most}" if least < most else str(most)
    yield (
        f"description: GEMMs of a {made.model_type} model, tokens {tokens}, "
        f"tp {_listed(wanted.ranks)}."
    )
    yield f"targets: [{', '.join(wanted.targets)}]"
    if any(entry.signature.is_gated for entry in made.entries):
        yield "providers: [cutlass_operators, quack]"
    yield ""
    yield "defaults:"
    yield f"  dtype: [{', '.join(dtype.value for dtype in wanted.dtypes)}]"
    yield ""


def _entry_lines(entries: Iterable[ConfigEntry], wanted: ManifestOptions) -> Iterator[str]:
    for position, entry in enumerate(entries):
        if position:
            yield ""
        yield f"  - comment: {_entry_comment(entry)}"
        if entry.groups is not None:
            yield f"    op: {entry.signature.op.value}"
            yield f"    groups: {entry.groups}"
        if entry.signature.scales is not None:
            yield f"    dtype: {entry.signature.a.value}"
            yield f"    scales: {entry.signature.scales.value}"
            yield f"    out: [{', '.join(dtype.value for dtype in wanted.dtypes)}]"
        elif entry.signature.out is not entry.signature.a:
            yield f"    out: {entry.signature.out.value}"
        if entry.signature.epilogue is not None:
            yield f"    epilogue: {entry.signature.epilogue.value}"
        yield f"    layout: {entry.signature.layout.value}"
        yield f"    m: {list(entry.m)}"
        yield "    nk:"
        yield from (
            f"      - {list(nk)} # {_pair_comment(uses, entry)}" for nk, uses in entry.uses.items()
        )


def _entry_comment(entry: ConfigEntry) -> str:
    routing = entry.routing
    if routing is None:
        if entry.signature.is_gated:
            return "what every token passes through, with its gate (n counts gates and ups)"
        added = " and has a bias added" if entry.signature.epilogue is not None else ""
        return f"what every token passes through{added}"
    if entry.groups is not None:
        gate = ", with its gate (n counts gates and ups)" if entry.signature.is_gated else ""
        return (
            f"all of {routing.experts} experts, {routing.chosen} a token "
            f"(m = tokens * {routing.chosen}){gate}"
        )
    return (
        f"each of {routing.experts} experts, {routing.chosen} a token, tokens spread evenly "
        f"(m = tokens * {routing.chosen} / {routing.experts}, rounded up)"
    )


def _has_bias(entry: ConfigEntry) -> bool:
    return any(use.gemm.biased for uses in entry.uses.values() for use in uses)


def _pair_comment(uses: Sequence[RankGemm], entry: ConfigEntry) -> str:
    """The comment of a pair, e.g. ``tp 1, 2: router x32; tp 4: attention k_proj x32``."""
    by_ranks: dict[int, list[str]] = {}
    for use in uses:
        added = " +bias" if use.gemm.biased and entry.signature.epilogue is None else ""
        role = f"{use.gemm.role} x{use.gemm.calls // (entry.groups or 1)}{added}"
        by_ranks.setdefault(use.ranks, []).append(role)
    ranks_of: dict[str, list[int]] = {}
    for ranks, roles in by_ranks.items():
        ranks_of.setdefault(", ".join(roles), []).append(ranks)
    return "; ".join(f"tp {_listed(ranks)}: {roles}" for roles, ranks in ranks_of.items())


def _left_out_lines(made: ConfigManifest) -> Iterator[str]:
    ranks_of: dict[str, list[int]] = {}
    for use, reason in made.left_out:
        gemm = use.gemm
        text = f"{gemm.role} x{gemm.calls} [{gemm.n}, {gemm.k}]: {reason}"
        ranks_of.setdefault(text, []).append(use.ranks)
    if ranks_of:
        yield ""
        yield "# Left out, for no kernel can serve it:"
        for text, ranks in ranks_of.items():
            yield f"#   tp {_listed(ranks)}: {text}"


def _size_texts(config: DecoderConfig) -> Iterator[str]:
    """The values read from a config, with their keys."""
    for name, field in type(config).model_fields.items():
        if name in ("quantization", "hidden_act"):
            continue
        alias, value = field.validation_alias, getattr(config, name)
        key = alias.choices[0] if isinstance(alias, AliasChoices) else alias or name
        if value is not None:
            yield f"{key} {json.dumps(value)}"


def _comment_lines(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, _WIDTH))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _quoted_if_needed(name: str) -> str:
    """Write a name so that YAML reads it as text, which ``1.5`` alone is not."""
    return name if yaml.safe_load(name) == name else json.dumps(name)
