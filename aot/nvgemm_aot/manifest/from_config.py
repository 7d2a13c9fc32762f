"""Makes a manifest from a model's Hugging Face config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import misalignment
from nvgemm_runtime.gemm.support import unavailable, unsupported
from nvgemm_runtime.gemm.target import DEFAULT_ARCHITECTURE
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES

from .models.config import find_config, read_config
from .models.decoder import DecoderConfig
from .models.gemm import ModelGemm, Projection, Routing
from .models.quantization import QuantizedTypes
from .models.tensor_parallel import share, undivided_heads
from .rules import MAX_PROBLEMS
from .schema import NAME_ALLOWED, NAME_PATTERN


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
