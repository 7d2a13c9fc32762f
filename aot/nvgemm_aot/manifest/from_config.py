"""A manifest of every GEMM that a model computes, from its Hugging Face config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import misalignment
from nvgemm_runtime.gemm.support import unavailable, unsupported
from nvgemm_runtime.gemm.target import DEFAULT_ARCHITECTURE
from nvgemm_runtime.gemm.types import Epilogue
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES

from .models.config import find_config, read_config
from .models.decoder import DecoderConfig
from .models.gemm import Gemm, Projection, Routing
from .models.quantization import Recipe
from .models.tensor_parallel import share, undivided_heads
from .rules import MAX_PROBLEMS
from .schema import NAME_ALLOWED, NAME_PATTERN


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a manifest shall be for; each list is sorted and has each value once.

    Attributes:
        tokens: Tokens of a forward pass, at least one number.
        ranks: Numbers of GPUs that tensor parallelism divides the model over, at least one.
        dtypes: Element types, of 2 bytes each, at least one.
        targets: Architectures to build for, at least one.
        separate: Whether to declare projections apart that can be fused.
        fused: Whether to declare them fused.

    """

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[DType, ...] = (DType.BF16,)
    targets: tuple[str, ...] = (DEFAULT_ARCHITECTURE,)
    separate: bool = True
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class Use:
    """A GEMM as one of ``ranks`` ranks computes it.

    Attributes:
        recipe: What it multiplies where it is quantized, or why no kernel computes that; None where
            it is not.
    """

    ranks: int
    gemm: Gemm
    recipe: Recipe | str | None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """GEMMs of one signature that see the same numbers of tokens.

    Attributes:
        routing: How tokens reach the experts; None for what sees all of them.
        signature: What they are, in the first of the wanted types.
        m: Rows: sorted, each once. Those of one expert, or of all where they are grouped.
        uses: By n and k, each pair once: where a model has it.

    """

    routing: Routing | None
    signature: Signature
    m: tuple[int, ...]
    uses: dict[tuple[int, int], list[Use]]

    @property
    def groups(self) -> int | None:
        """How many experts one GEMM computes; None where they are not grouped."""
        if self.routing is None or self.signature.op is not Op.GROUPED_MM:
            return None
        return self.routing.experts


@dataclass(frozen=True, kw_only=True)
class ConfigManifest:
    """A manifest made from a config.

    Attributes:
        name: Its name.
        config: What it was made from.
        model_type: The model's family.
        wanted: What it is for.
        entries: What it declares, at least one.
        left_out: What it cannot declare, each with the reason.

    """

    name: str
    config: DecoderConfig
    model_type: str
    wanted: Wanted
    entries: tuple[Entry, ...]
    left_out: tuple[tuple[Use, str], ...]

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


def make_manifest(given: Path, wanted: Wanted, *, name: str | None = None) -> ConfigManifest:
    """Make a manifest from a model's config.

    Args:
        given: A config.json, or a model's directory with one.
        wanted: What the manifest shall be for.
        name: The manifest's name; None for the model's directory's, or the file's.

    Raises:
        ManifestError: If the config is wrong, ``wanted`` has ranks that cannot share its heads,
            the name is not allowed, no GEMM can be declared, or there are too many.

    """
    path = find_config(given)
    model_type, config = read_config(path)
    projections = tuple(config.projections())
    _check_heads(path, projections, wanted.ranks)
    entries: dict[tuple[Routing | None, Signature], Entry] = {}
    left_out = []
    for use in _uses(path, config, projections, wanted):
        gemm, recipe = use.gemm, use.recipe
        if isinstance(recipe, str):
            left_out.append((use, recipe))
            continue
        signature = _signature(gemm, recipe, wanted)
        reason = gemm.unserved or _refusal(gemm, signature, wanted)
        if reason:
            left_out.append((use, reason))
            continue
        entry = entries.setdefault(
            (gemm.routing, signature),
            Entry(
                routing=gemm.routing,
                signature=signature,
                m=_rows(gemm.routing, signature.op, wanted.tokens),
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
    path: Path, config: DecoderConfig, projections: Sequence[Projection], wanted: Wanted
) -> Iterator[Use]:
    def recipes(gemm: Gemm) -> tuple[Recipe | str | None, ...]:
        if config.quantization is None:
            return (None,)
        try:
            return config.quantization.forms(gemm.role, config.num_hidden_layers)
        except ValueError as error:
            raise ManifestError(f"{path}: {error}") from None

    forms = [form for form in (False, True) if (wanted.fused if form else wanted.separate)]
    uses = (
        Use(ranks=ranks, gemm=gemm, recipe=recipe)
        for ranks in wanted.ranks
        for fused in forms
        for gemm in share(projections, ranks, fused=fused)
        for recipe in recipes(gemm)
    )
    yield from dict.fromkeys(uses)  # what cannot be fused is in both forms


def _signature(gemm: Gemm, recipe: Recipe | None, wanted: Wanted) -> Signature:
    """What a GEMM is declared as: with its bias, and all experts in one, where operators can.

    A product whose bias is added apart is wanted in fp32, so that the sum is rounded once.
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
    if recipe is not None:
        return replace(whole, a=recipe.dtype, b=recipe.dtype, scales=recipe.scales)
    if unsupported(whole) is None and not any(unavailable(whole, arch) for arch in wanted.targets):
        return whole
    return replace(product, out=DType.FP32) if gemm.biased else product


def _refusal(gemm: Gemm, signature: Signature, wanted: Wanted) -> str:
    if signature.scales is not None and (reason := unsupported(signature)):
        return f"it is quantized to {signature.a.value}: {reason}"
    if signature.scales is not None and all(unavailable(signature, one) for one in wanted.targets):
        return (
            f"it is quantized to {signature.a.value} with scales {signature.scales.value}, and "
            f"{', '.join(wanted.targets)} has no operator with scales"
        )
    try:
        problem = Problem(signature=signature, m=1, n=gemm.n, k=gemm.k)
    except ValueError as error:
        return str(error)
    return misalignment(problem, ALIGNMENT_BYTES) or ""


def _rows(routing: Routing | None, op: Op, tokens: Iterable[int]) -> tuple[int, ...]:
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
