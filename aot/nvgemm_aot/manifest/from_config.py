"""Makes a manifest from a model's Hugging Face config."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, GateForm, find_gated
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import misalignment_reason
from nvgemm_runtime.gemm.support import unavailable, unsupported
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES

from .config_json import find_config, read_model
from .config_manifest import ConfigEntry, ConfigManifest, ManifestOptions, RankGemm
from .models.expert_weights import in_library_layout
from .models.gemm import ModelGemm, Projection
from .models.model import Model
from .models.quantization import QuantizedTypes
from .models.tensor_parallel import share, undivided_heads
from .models.training import (
    Product,
    gathers_rows,
    layout_of,
    op_of,
    products_of,
    sizes_of,
)
from .rules import MAX_PROBLEMS
from .schema import NAME_ALLOWED, NAME_PATTERN


def make_manifest(
    config: Path, options: ManifestOptions, *, name: str | None = None
) -> ConfigManifest:
    """Makes a manifest from a config.json, or from a model directory that has one.

    The default name is the directory's, or the file's.

    Raises:
        ManifestError: If the config is invalid, heads or experts do not divide among the ranks in
            ``options``, training is requested for a quantized model, the name is invalid, or the
            manifest would have no problems or too many.
    """
    path = find_config(config)
    name = _check_name(path, name)
    model = read_model(path)
    _check_heads(path, model.projections, options.ranks)
    _check_expert_ranks(path, model, options)
    _check_trainable(path, model, options)
    entries: dict[tuple[object, ...], ConfigEntry] = {}
    left_out = []
    for use in _uses(path, model, options):
        gemm, types = use.gemm, use.types
        if isinstance(types, str):
            left_out.append((use, types))
            continue
        signature = _gated(use, use.form, options) if use.form else _signature(use, options)
        reason = gemm.unserved or _unserved_reason(use, signature, options)
        if reason:
            if use.product is not Product.GATHERED_FORWARD:  # that of the product with copied rows
                left_out.append((use, reason))
            continue
        entry = entries.setdefault(
            (use.product, gemm.routing, gemm.rows, gemm.batch, signature),
            ConfigEntry(
                product=use.product,
                routing=gemm.routing,
                rule=gemm.rows,
                batch=gemm.batch,
                signature=signature,
                rows=_row_counts(gemm, signature.op, use.product, options),
                uses={},
            ),
        )
        entry.uses.setdefault(use.pair, []).append(use)
    ordered = sorted(entries.values(), key=lambda entry: list(Product).index(entry.product))
    manifest = ConfigManifest(
        name=name,
        model=model,
        options=options,
        entries=tuple(ordered),
        left_out=tuple(left_out),
    )
    _check_problem_count(path, manifest)
    return manifest


def _check_heads(path: Path, projections: Sequence[Projection], ranks: Iterable[int]) -> None:
    mistakes = [
        f"{path}: {heads.key}: found {heads.count}; allowed with tp {count}: "
        f"a multiple{' or a divisor' if heads.copied else ''} of {count}"
        for count in ranks
        for heads in undivided_heads(projections, count)
    ]
    if mistakes:
        raise ManifestError("\n".join(dict.fromkeys(mistakes)))


def _check_expert_ranks(path: Path, model: Model, options: ManifestOptions) -> None:
    several = [count for count in options.expert_ranks if count > 1]
    numbers = sorted(set(filter(None, map(_expert_count, model.projections))))
    if several and not numbers:
        raise ManifestError(
            f"{path}: ep: found {several[0]}; allowed: 1, because {model.model_type} has no "
            "experts; omit --ep"
        )
    mistakes = [
        f"{path}: {model.expert_keys.get(experts, 'experts')}: found {experts}; allowed with ep "
        f"{count}: a multiple of {count}"
        for count in several
        for experts in numbers
        if experts % count
    ]
    mistakes += [
        f"{path}: ep: found {count}; allowed with tp {ranks}: 1 or a multiple of {ranks}, so that "
        "each rank has whole experts"
        for count in several
        for ranks in options.ranks
        if count % ranks
    ]
    if mistakes:
        raise ManifestError("\n".join(mistakes))


def _expert_count(projection: Projection) -> int:
    """Returns the number of experts whose weights a projection holds, else 0."""
    if not isinstance(projection, ModelGemm):
        return 0
    if projection.routing is not None:
        return projection.routing.experts
    return projection.batch if projection.batch > 1 else 0


def _check_trainable(path: Path, model: Model, options: ManifestOptions) -> None:
    if options.training and model.quantization is not None:
        raise ManifestError(
            f"{path}: quantization_config: found {model.quantization.method[:60]}; allowed with "
            "--training: no such key, because no operator computes gradients of quantized "
            "weights; to declare training without quantization, remove the key from a copy of the "
            "config"
        )


def _uses(path: Path, model: Model, options: ManifestOptions) -> Iterator[RankGemm]:
    def types_of(gemm: ModelGemm) -> tuple[QuantizedTypes | str | None, ...]:
        if model.quantization is None:
            return (None,)
        try:
            return model.quantization.forms(gemm, model.modules(gemm.role))
        except ValueError as error:
            raise ManifestError(f"{path}: {error}") from None

    forms = [form for form in (False, True) if (options.fused if form else options.separate)]
    libraries = [list(in_library_layout(weights, model.projections)) for weights in options.experts]
    splits = [
        (ranks, expert_ranks, projections)
        for ranks in options.ranks
        for expert_ranks in options.expert_ranks
        for projections in libraries
    ]
    uses = (
        RankGemm(
            ranks=ranks,
            expert_ranks=expert_ranks if _expert_count(gemm) else 1,
            gemm=gemm,
            types=types,
            product=product,
        )
        for ranks, expert_ranks, projections in splits
        for fused in forms
        for gemm in share(projections, ranks, fused=fused, expert_ranks=expert_ranks)
        for types in types_of(gemm)
        for product in (products_of(gemm) if options.training else (Product.FORWARD,))
    )
    yield from dict.fromkeys(uses)  # some have several forms, or as many tp ranks
    if options.gated:
        gated = (
            RankGemm(
                ranks=ranks,
                expert_ranks=expert_ranks if _expert_count(gemm) else 1,
                gemm=gemm,
                types=types,
                product=product,
                form=form,
            )
            for ranks, expert_ranks, projections in splits
            for gemm in share(projections, ranks, fused=True, expert_ranks=expert_ranks)
            if not gemm.unserved  # else reported without its gate
            for product, form in _gated_products(gemm, options)
            for types in types_of(gemm)
            if types is None or product is not Product.GATHERED_FORWARD
        )
        yield from dict.fromkeys(gated)


def _gated_products(
    gemm: ModelGemm, options: ManifestOptions
) -> Iterator[tuple[Product, GateForm | None]]:
    """Returns a GEMM's products with a gate, those in training only for experts.

    If kernels gather rows, the gate projection has a form without a gate: the up projection reads
    its result.
    """
    forward = (Product.FORWARD, *([Product.GATHERED_FORWARD] if gathers_rows(gemm) else ()))
    of_experts_in_training = options.training and gemm.routing is not None
    if gemm.gated is not None:
        forms = [GateForm.JOINED, *([GateForm.KEPT] if of_experts_in_training else ())]
        yield from itertools.product(forward, forms)
    if gemm.gate_before is not None and of_experts_in_training:
        yield Product.INPUT_GRADIENT, GateForm.GRADIENT
        if (
            gemm.routing is not None and gemm.routing.sharing_ranks == 1
        ):  # rows get their weights here
            yield Product.INPUT_GRADIENT, GateForm.GRADIENT_SUMS
    if gemm.multiplying_gate is not None and gemm.routing is not None:
        yield from itertools.product(forward, [GateForm.UPS])
    if gemm.is_read_by_gate and gathers_rows(gemm):
        yield Product.GATHERED_FORWARD, None


def _gated(use: RankGemm, form: GateForm, options: ManifestOptions) -> Signature:
    """Returns the signature with a gate, even if no kernel supports it."""
    gemm, types, dtype = use.gemm, use.types, options.dtypes[0]
    assert not isinstance(types, str)
    gate = gemm.gate_before if form.is_gradient else gemm.gated
    if form is GateForm.UPS:
        gate = gemm.multiplying_gate
    assert gate is not None
    assert gate.gate is not None
    assert gate.order is not None
    operand = dtype if types is None else types.dtype
    return Signature(
        op=op_of(gemm, use.product),
        layout=layout_of(gemm, use.product),
        a=operand,
        b=operand,
        accumulator=DType.FP32,
        out=dtype,
        scales=None if types is None else types.scales,
        epilogue=find_gated(gate.gate, gate.order, form),
    )


_EPILOGUES = {
    Product.BIASED_FORWARD: BIAS,
    Product.ADDED_INPUT_GRADIENT: ADD,
}


def _signature(use: RankGemm, options: ManifestOptions) -> Signature:
    """Returns the signature to declare, with bias and all experts in one GEMM if possible.

    If torch adds the bias, the product is fp32, so that the sum is rounded once.
    """
    gemm, types, dtype = use.gemm, use.types, options.dtypes[0]
    assert not isinstance(types, str)
    product = Signature(
        op=Op.MM,
        layout=layout_of(gemm, use.product),
        a=dtype,
        b=dtype,
        accumulator=DType.FP32,
        out=dtype,
    )
    if use.product is not Product.FORWARD:
        if use.product.is_gathered:
            product = replace(product, a=DType.FP32)
        epilogue = _EPILOGUES.get(use.product)
        return replace(product, op=op_of(gemm, use.product), epilogue=epilogue)
    whole = replace(
        product,
        op=op_of(gemm, use.product),
        epilogue=BIAS if gemm.biased else None,
    )
    if types is not None:
        return replace(whole, a=types.dtype, b=types.dtype, scales=types.scales)
    if unsupported(whole) is None and not any(
        unavailable(whole, arch) for arch in options.architectures
    ):
        return whole
    return replace(product, out=DType.FP32) if gemm.biased else product


def _unserved_reason(use: RankGemm, signature: Signature, options: ManifestOptions) -> str:
    gemm = use.gemm
    if signature.epilogue is not None and signature.epilogue.gate is not None:
        reason = unsupported(signature)
        if reason is None and gemm.biased and signature.epilogue.addend is None:
            reason = f"{signature.epilogue.name} adds no bias, but the model does"
        if reason is not None:
            return f"with its gate: {reason}"
    if signature.scales is not None and (reason := unsupported(signature)):
        return f"it is quantized to {signature.a.value}: {reason}"
    if signature.scales is not None and all(
        unavailable(signature, arch) for arch in options.architectures
    ):
        return (
            f"it is quantized to {signature.a.value} with scales {signature.scales.value}, and "
            f"{', '.join(options.architectures)} has no operator with block scales"
        )
    try:
        m, n, k = sizes_of(use.product, 1, use.pair)
        problem = Problem(signature=signature, m=m, n=n, k=k)
    except ValueError as error:
        return str(error)
    return misalignment_reason(problem, ALIGNMENT_BYTES) or ""


def _row_counts(
    gemm: ModelGemm, op: Op, product: Product, options: ManifestOptions
) -> tuple[int, ...]:
    routing = gemm.routing
    if routing is None:
        counts = {
            gemm.rows.count(tokens, inputs)
            for tokens in options.tokens
            for inputs in options.inputs
        }
    elif product is Product.ROW_SUM:
        counts = set(options.tokens)
    elif op.has_groups or product is Product.WEIGHTED_ROW:
        counts = {routing.rows(count) for count in options.tokens}
    else:
        counts = {routing.tokens_of_one(count) for count in options.tokens}
    return tuple(sorted(counts))


def _check_name(path: Path, name_option: str | None) -> str:
    name = name_option
    if name is None:
        stem = path.resolve().parent.name if path.name == "config.json" else path.stem
        name = re.sub(r"[^a-z0-9.]+", "-", stem.lower())[:64].strip("-.")
    if not re.fullmatch(NAME_PATTERN, name):
        advice = "" if name_option is not None else "; set one with --name"
        raise ManifestError(f"{path}: name: found {name!r}; allowed: {NAME_ALLOWED}{advice}")
    return name


def _check_problem_count(path: Path, manifest: ConfigManifest) -> None:
    if not manifest.entries:
        reasons = "\n".join(
            f"  {use.gemm.role} [{use.gemm.n}, {use.gemm.k}], tp {use.ranks}: {reason}"
            for use, reason in manifest.left_out
        )
        raise ManifestError(f"{path}: no GEMM can be declared:\n{reasons}")
    # Counts as `load_manifest` does: a problem in two entries counts twice.
    count = sum(len(entry.sizes) for entry in manifest.entries)
    count *= len(manifest.options.dtypes)
    if count > MAX_PROBLEMS:
        raise ManifestError(
            f"{path}: found {count} problems; allowed: at most {MAX_PROBLEMS} in a manifest; "
            "use fewer values for tokens or ranks"
        )
