"""Writes a model config's manifest as YAML, with comments on each GEMM's origin."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import yaml

from nvgemm_runtime.gemm.epilogues import GateForm
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.recording.text import target_entry

from .config_manifest import ConfigEntry, ConfigManifest, ManifestOptions, RankGemm
from .models.gemm import TOKENS
from .models.training import Product
from .schema import VERSION

_WIDTH = 98


def manifest_yaml(manifest: ConfigManifest) -> str:
    """Writes a manifest that `load_manifest` reads."""
    entries = _entry_lines(manifest.entries, manifest.options)
    return "\n".join([*_head_lines(manifest), "gemms:", *entries, *left_out_lines(manifest), ""])


def _head_lines(manifest: ConfigManifest) -> Iterator[str]:
    options = manifest.options
    gradients = " and their gradients in a training step" if options.training else ""
    yield from _comment_lines(
        f"All layer and head GEMMs in a {manifest.model.model_type} model{gradients}, by "
        "nvgemm-aot manifest from-config. Attention itself is not declared. Sizes from its config: "
        f"{', '.join(manifest.model.sizes)}."
    )
    yield from _comment_lines(
        "Pairs are [out features, in features] on each of tp GPUs; x2 means two calls per forward "
        "pass."
    )
    if manifest.model.source:
        yield from _comment_lines(manifest.model.source)
    for remark in manifest.model.remarks:
        yield from _comment_lines(f"Left out: {remark}.")
    if any(count > 1 for count in options.expert_ranks):
        yield from _comment_lines(
            "With ep GPUs, each expert is on one of them; m and k count one GPU's rows for even "
            "routing, with different tokens on each group of tp GPUs."
        )
    if options.training:
        yield from _comment_lines(
            "Input gradients swap pairs. Weight and bias gradients sum over tokens, which are "
            "their k."
        )
    quantization = manifest.model.quantization
    if quantization is not None:
        yield from _comment_lines(
            f"Its checkpoint is quantized by {json.dumps(quantization.method[:60])}: these are "
            "the GEMMs that engines run; those that no kernel can serve are listed at the end. A "
            "GEMM with two types is quantized in some layers only; its count covers all. To "
            "declare the unquantized model, remove quantization_config from a copy of its config."
        )
    if any(_lacks_its_bias(entry) for entry in manifest.entries):
        yield from _comment_lines(
            "+bias: the model adds a bias, and torch.compile computes both as addmm, for which "
            "a target has no operator. Only the product is declared, in fp32; the torch.compile "
            "plug-in adds the bias."
        )
    if any(_is_of_one_expert(entry) for entry in manifest.entries):
        yield from _comment_lines(
            "Experts run in a loop, counted as if each has tokens. Most programs compute all in "
            "one grouped GEMM, for which no operator exists here."
        )
    yield f"version: {VERSION}"
    yield f"name: {_quoted_if_needed(manifest.name)}"
    least, most = options.tokens[0], options.tokens[-1]
    tokens = f"{least} to {most}" if least < most else str(most)
    experts = f", ep {_joined(options.expert_ranks)}" if options.expert_ranks != (1,) else ""
    steps = ", with those of gradients" if options.training else ""
    yield (
        f"description: GEMMs of a {manifest.model.model_type} model, tokens {tokens}, "
        f"tp {_joined(options.ranks)}{experts}{steps}."
    )
    yield f"targets: [{', '.join(map(target_entry, options.targets))}]"
    yield ""
    yield "defaults:"
    yield f"  dtype: [{', '.join(dtype.value for dtype in options.dtypes)}]"
    yield ""


def _is_of_one_expert(entry: ConfigEntry) -> bool:
    return bool(entry.routing) and entry.groups is None and not entry.product.is_gathered


def _entry_lines(entries: Iterable[ConfigEntry], options: ManifestOptions) -> Iterator[str]:
    for position, entry in enumerate(entries):
        if position:
            yield ""
        if entry.product.sums_over_tokens:
            yield from _summing_lines(entry)
            continue
        yield f"  - comment: {_entry_comment(entry)}"
        if entry.signature.op is not Op.MM:
            yield f"    op: {entry.signature.op.value}"
        if entry.groups is not None:
            yield f"    groups: {entry.groups}"
        if entry.batch > 1:
            yield f"    batch: {entry.batch}"
        if entry.signature.scales is not None:
            yield f"    dtype: {entry.signature.a.value}"
            yield f"    scales: {entry.signature.scales.value}"
            yield f"    out: [{', '.join(dtype.value for dtype in options.dtypes)}]"
        elif entry.signature.out is not entry.signature.dtype:
            yield f"    out: {entry.signature.out.value}"
        if entry.signature.epilogue is not None:
            yield f"    epilogue: {entry.signature.epilogue.name}"
        yield f"    layout: {entry.signature.layout.value}"
        yield f"    m: {list(entry.rows)}"
        yield "    nk:"
        yield from (
            f"      - {list(nk)} # {_pair_comment(uses, entry)}" for nk, uses in entry.uses.items()
        )


def _summing_lines(entry: ConfigEntry) -> Iterator[str]:
    """Writes an entry for each product that sums over tokens: the schema cannot pair m with n."""
    yield f"  # {_entry_comment(entry)}"
    lead = f"op: {entry.signature.op.value}, layout: {entry.signature.layout.value}"
    if entry.groups is not None:
        lead += f", groups: {entry.groups}"
    if entry.batch > 1:
        lead += f", batch: {entry.batch}"
    for (m, n), uses in entry.uses.items():
        yield f"  # {_pair_comment(uses, entry)}"
        yield f"  - {{{lead}, m: {m}, n: {n}, k: {list(entry.rows)}}}"


def _entry_comment(entry: ConfigEntry) -> str:
    routing = entry.routing
    lead = _LEADS[entry.product]
    if routing is None:
        passes = "GEMMs that every token uses"
        if entry.rule != TOKENS:
            extent = "k" if entry.product.sums_over_tokens else "m"
            passes = f"GEMMs on rows other than tokens ({extent} = {entry.rule.text})"
        if entry.batch > 1:
            passes = f"{entry.batch} matrices in one call, each for all tokens"
        if entry.signature.is_gated:
            return f"{passes}, with its gate (n counts gates and ups)"
        added = ", with a bias" if entry.signature.epilogue is not None else ""
        return f"{lead}{passes}{added}"
    per_token = routing.experts_per_token
    if entry.product.is_gathered:
        extent = f"tokens * {per_token}" if entry.product is Product.WEIGHTED_ROW else "tokens"
        return f"{lead}all of {routing.experts} experts, {per_token} per token (m = {extent})"
    if entry.groups is not None:
        gate = _GATES[entry.signature.form]
        extent = "k" if entry.product.sums_over_tokens else "m"
        shared = f" / {routing.sharing_ranks}, rounded up" if routing.sharing_ranks > 1 else ""
        one_gpu = f" on one GPU, ep {entry.expert_ranks}" if entry.expert_ranks > 1 else ""
        return (
            f"{lead}all of {routing.experts} experts{one_gpu}, {per_token} per token "
            f"({extent} = tokens * {per_token}{shared}){gate}"
        )
    return (
        f"{lead}each of {routing.experts} experts, {per_token} per token, tokens spread "
        f"evenly (m = tokens * {per_token} / {routing.experts}, rounded up)"
    )


_LEADS = {
    Product.FORWARD: "",
    Product.BIASED_FORWARD: "with their biases, ",
    Product.GATHERED_FORWARD: "gathering token rows, ",
    Product.INPUT_GRADIENT: "input gradients for ",
    Product.ADDED_INPUT_GRADIENT: "input gradients, added to the other weight's, for ",
    Product.WEIGHT_GRADIENT: "weight gradients for ",
    Product.BIAS_GRADIENT: "bias gradients for ",
    Product.ROW_SUM: "sums of each token's rows, for results and gradients of ",
    Product.WEIGHTED_ROW: "rows times routing weights, in the backward of ",
}


_GATES = {
    None: "",
    GateForm.JOINED: ", with its gate (n counts gates and ups)",
    GateForm.KEPT: ", with its gate, storing the product (n counts gates and ups)",
    GateForm.GRADIENT: ", and for the gate before them (the result has 2 n columns)",
    GateForm.GRADIENT_SUMS: (
        ", for the gate before them, and for routing weights (the result has 2 n columns)"
    ),
    GateForm.UPS: ", as ups that read the gate's product (the result has 2 n columns)",
}


def _lacks_its_bias(entry: ConfigEntry) -> bool:
    """Returns True if only the product is declared, and torch adds the model's bias."""
    if entry.product is not Product.FORWARD or entry.signature.epilogue is not None:
        return False
    return any(use.gemm.biased for uses in entry.uses.values() for use in uses)


def _pair_comment(uses: Sequence[RankGemm], entry: ConfigEntry) -> str:
    """Builds the comment for a pair, e.g. ``tp 1, 2: router x32; tp 4: attention k_proj x32``."""
    lacks_bias = _lacks_its_bias(entry)
    by_ranks: dict[tuple[int, int], list[str]] = {}
    for use in uses:
        added = " +bias" if use.gemm.biased and lacks_bias else ""
        role = f"{use.gemm.role} x{use.gemm.calls // entry.experts_at_once}{added}"
        by_ranks.setdefault((use.expert_ranks, use.ranks), []).append(role)
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for (expert_ranks, ranks), roles in by_ranks.items():
        text = ", ".join(dict.fromkeys(roles))
        ranks_of.setdefault((expert_ranks, text), []).append(ranks)
    return "; ".join(
        f"{_ranks_text(expert_ranks, ranks)}: {roles}"
        for (expert_ranks, roles), ranks in ranks_of.items()
    )


def _ranks_text(expert_ranks: int, ranks: Iterable[int]) -> str:
    experts = f"ep {expert_ranks}, " if expert_ranks > 1 else ""
    return f"{experts}tp {_joined(ranks)}"


def left_out_lines(manifest: ConfigManifest) -> Iterator[str]:
    """Builds the closing comments, with a line for each GEMM that is left out."""
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for use, reason in manifest.left_out:
        gemm = use.gemm
        part = "" if use.product is Product.FORWARD else f", {use.product.value}"
        text = f"{gemm.role}{part} x{gemm.calls} {list(use.pair)}: {reason}"
        ranks_of.setdefault((use.expert_ranks, text), []).append(use.ranks)
    if ranks_of:
        yield ""
        yield "# Left out, because no kernel can serve it:"
        for (expert_ranks, text), ranks in ranks_of.items():
            # The same GEMM may be left out both with and without a gate.
            yield f"#   {_ranks_text(expert_ranks, dict.fromkeys(ranks))}: {text}"


def _comment_lines(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))


def _joined(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _quoted_if_needed(name: str) -> str:
    """Quotes a name that YAML would not read as text, such as ``1.5``."""
    return name if yaml.safe_load(name) == name else json.dumps(name)
