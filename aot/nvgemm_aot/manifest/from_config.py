"""Makes a manifest from a model's Hugging Face config."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import AliasChoices

from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import misalignment
from nvgemm_runtime.gemm.support import unavailable, unsupported
from nvgemm_runtime.gemm.target import DEFAULT_ARCHITECTURE
from nvgemm_runtime.gemm.types import Epilogue
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES

from .models.config import find_config, read_config
from .models.decoder import DecoderConfig
from .models.gemm import ModelGemm, Projection, Routing
from .models.quantization import QuantizedTypes
from .models.tensor_parallel import share, undivided_heads
from .rules import MAX_PROBLEMS
from .schema import NAME_ALLOWED, NAME_PATTERN, VERSION


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """Options of a manifest from a config; each tuple is sorted, without duplicates, not empty.

    Attributes:
        tokens: Tokens of a forward pass.
        ranks: Numbers of GPUs that tensor parallelism divides the model over.
        dtypes: Element types, of 2 bytes each.
        targets: Architectures to build for.
        separate, fused: In which forms to declare projections that can be fused.
        gated: Whether to declare gate_up projections with their gate, too.
    """

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[DType, ...] = (DType.BF16,)
    targets: tuple[str, ...] = (DEFAULT_ARCHITECTURE,)
    separate: bool = True
    fused: bool = False
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class RankGemm:
    """A GEMM as one of ``ranks`` ranks computes it.

    Attributes:
        with_gate: Whether its gate is part of it.
        types: Types and scales of a quantized GEMM, or why no kernel computes it; None if it is
            not quantized.
    """

    ranks: int
    gemm: ModelGemm
    types: QuantizedTypes | str | None
    with_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """GEMMs of one signature that see the same numbers of tokens.

    Attributes:
        routing: How tokens reach the experts; None for a GEMM of all tokens.
        signature: Their signature, in the first of the wanted types.
        m: Rows, sorted without duplicates: of one expert, or of all experts of a grouped GEMM.
        uses: By n and k: where the model has such a GEMM.
    """

    routing: Routing | None
    signature: Signature
    m: tuple[int, ...]
    uses: dict[tuple[int, int], list[RankGemm]]

    @property
    def groups(self) -> int | None:
        """How many experts one GEMM computes; None where they are not grouped."""
        if self.routing is None or self.signature.op is not Op.GROUPED_MM:
            return None
        return self.routing.experts


@dataclass(frozen=True, kw_only=True)
class ConfigManifest:
    """A manifest made from a config.

    ``left_out`` are the GEMMs that it cannot declare, each with the reason.
    """

    name: str
    config: DecoderConfig
    model_type: str
    wanted: ManifestOptions
    entries: tuple[ConfigEntry, ...]
    left_out: tuple[tuple[RankGemm, str], ...]

    @property
    def problems(self) -> int:
        """Number of problems that it declares."""
        declared = {
            (entry.signature, entry.groups, m, nk)
            for entry in self.entries
            for m in entry.m
            for nk in entry.uses
        }
        return len(declared) * len(self.wanted.dtypes)


def make_manifest(
    given: Path, wanted: ManifestOptions, *, name: str | None = None
) -> ConfigManifest:
    """Make a manifest from a config.json, or from a model's directory with one.

    Without a name, it gets that of the directory, or of the file.

    Raises:
        ManifestError: If the config is wrong, ``wanted`` has ranks that cannot share its heads,
            the name is not allowed, no GEMM can be declared, or there are too many.
    """
    path = find_config(given)
    model_type, config = read_config(path)
    projections = tuple(config.projections())
    _check_heads(path, projections, wanted.ranks)
    entries: dict[tuple[Routing | None, Signature], ConfigEntry] = {}
    left_out = []
    for use in _uses(path, config, projections, wanted):
        gemm, types = use.gemm, use.types
        if isinstance(types, str):
            left_out.append((use, types))
            continue
        signature = _gated(use, wanted) if use.with_gate else _signature(gemm, types, wanted)
        reason = gemm.unserved or _why_unserved(gemm, signature, wanted)
        if reason:
            left_out.append((use, reason))
            continue
        entry = entries.setdefault(
            (gemm.routing, signature),
            ConfigEntry(
                routing=gemm.routing,
                signature=signature,
                m=_row_counts(gemm.routing, signature.op, wanted.tokens),
                uses={},
            ),
        )
        entry.uses.setdefault((gemm.n, gemm.k), []).append(use)
    made = ConfigManifest(
        name=_check_name(path, name),
        config=config,
        model_type=model_type,
        wanted=wanted,
        entries=tuple(entries.values()),
        left_out=tuple(left_out),
    )
    _check_number(path, made)
    return made


def _check_heads(path: Path, projections: Sequence[Projection], ranks: Iterable[int]) -> None:
    mistakes = [
        f"{path}: {heads.key}: found {heads.count}; allowed with tp {count}: "
        f"a multiple{' or a divisor' if heads.copied else ''} of {count}"
        for count in ranks
        for heads in undivided_heads(projections, count)
    ]
    if mistakes:
        raise ManifestError("\n".join(mistakes))


def _uses(
    path: Path, config: DecoderConfig, projections: Sequence[Projection], wanted: ManifestOptions
) -> Iterator[RankGemm]:
    def types_of(gemm: ModelGemm) -> tuple[QuantizedTypes | str | None, ...]:
        if config.quantization is None:
            return (None,)
        try:
            return config.quantization.forms(gemm.role, config.num_hidden_layers)
        except ValueError as error:
            raise ManifestError(f"{path}: {error}") from None

    forms = [form for form in (False, True) if (wanted.fused if form else wanted.separate)]
    uses = (
        RankGemm(ranks=ranks, gemm=gemm, types=types)
        for ranks in wanted.ranks
        for fused in forms
        for gemm in share(projections, ranks, fused=fused)
        for types in types_of(gemm)
    )
    yield from dict.fromkeys(uses)  # what cannot be fused is in both forms
    if wanted.gated:
        yield from (
            RankGemm(ranks=ranks, gemm=gemm, types=types, with_gate=True)
            for ranks in wanted.ranks
            for gemm in share(projections, ranks, fused=True)
            if gemm.gated is not None and not gemm.unserved  # that is said without its gate
            for types in types_of(gemm)
        )


def _gated(use: RankGemm, wanted: ManifestOptions) -> Signature:
    """The signature of a product with its gate, whether kernels compute it or not."""
    gemm, types, dtype = use.gemm, use.types, wanted.dtypes[0]
    assert not isinstance(types, str)
    operand = dtype if types is None else types.dtype
    return Signature(
        op=Op.GROUPED_MM if gemm.routing else Op.MM,
        layout=gemm.layout,
        a=operand,
        b=operand,
        accumulator=DType.FP32,
        out=dtype,
        scales=None if types is None else types.scales,
        epilogue=gemm.gated,
    )


def _signature(gemm: ModelGemm, types: QuantizedTypes | None, wanted: ManifestOptions) -> Signature:
    """The signature to declare for a GEMM: with its bias, and all experts in one, where possible.

    A product whose bias torch adds gets an fp32 result, so that the sum is rounded once.
    """
    dtype = wanted.dtypes[0]
    product = Signature(
        op=Op.MM, layout=gemm.layout, a=dtype, b=dtype, accumulator=DType.FP32, out=dtype
    )
    whole = replace(
        product,
        op=Op.GROUPED_MM if gemm.routing else Op.MM,
        epilogue=Epilogue.BIAS if gemm.biased else None,
    )
    if types is not None:
        return replace(whole, a=types.dtype, b=types.dtype, scales=types.scales)
    if unsupported(whole) is None and not any(unavailable(whole, arch) for arch in wanted.targets):
        return whole
    return replace(product, out=DType.FP32) if gemm.biased else product


def _why_unserved(gemm: ModelGemm, signature: Signature, wanted: ManifestOptions) -> str:
    if signature.epilogue is not None and signature.epilogue.gate is not None:
        reason = unsupported(signature)
        if reason is None and gemm.biased and signature.epilogue.addend is None:
            reason = f"{signature.epilogue.value} adds no bias, and the model does"
        if reason is not None:
            return f"with its gate: {reason}"
    if signature.scales is not None and (reason := unsupported(signature)):
        return f"it is quantized to {signature.a.value}: {reason}"
    if signature.scales is not None and all(unavailable(signature, one) for one in wanted.targets):
        return (
            f"it is quantized to {signature.a.value} with scales {signature.scales.value}, and "
            f"{', '.join(wanted.targets)} has no operator with block scales"
        )
    try:
        problem = Problem(signature=signature, m=1, n=gemm.n, k=gemm.k)
    except ValueError as error:
        return str(error)
    return misalignment(problem, ALIGNMENT_BYTES) or ""


def _row_counts(routing: Routing | None, op: Op, tokens: Iterable[int]) -> tuple[int, ...]:
    if routing is None:
        return tuple(tokens)
    if op is Op.GROUPED_MM:
        return tuple(routing.chosen * count for count in tokens)
    return tuple(sorted({routing.tokens_of_one(count) for count in tokens}))


def _check_name(path: Path, given: str | None) -> str:
    name = given
    if name is None:
        stem = path.resolve().parent.name if path.name == "config.json" else path.stem
        name = re.sub(r"[^a-z0-9.]+", "-", stem.lower())[:64].strip("-.")
    if not re.fullmatch(NAME_PATTERN, name):
        advice = "" if given is not None else "; give one with --name"
        raise ManifestError(f"{path}: name: found {name!r}; allowed: {NAME_ALLOWED}{advice}")
    return name


def _check_number(path: Path, made: ConfigManifest) -> None:
    if not made.entries:
        reasons = "\n".join(
            f"  {use.gemm.role} [{use.gemm.n}, {use.gemm.k}], tp {use.ranks}: {reason}"
            for use, reason in made.left_out
        )
        raise ManifestError(f"{path}: none of its GEMMs can be declared:\n{reasons}")
    # As `load_manifest` counts them: what two entries have is two.
    count = sum(len(entry.m) * len(entry.uses) for entry in made.entries)
    count *= len(made.wanted.dtypes)
    if count > MAX_PROBLEMS:
        raise ManifestError(
            f"{path}: found {count} problems; allowed: at most {MAX_PROBLEMS} in a manifest; "
            "give fewer numbers of tokens or ranks"
        )


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
        return (
            f"all of {routing.experts} experts, {routing.chosen} a token "
            f"(m = tokens * {routing.chosen})"
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
