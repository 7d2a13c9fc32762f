"""Runs a model's parts once, on inputs made from its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvgemm_runtime.errors import one_line

from .known_values import KnownValues
from .weight_products import WeightProduct, WeightProducts


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Sizes in one run: ``inputs`` sequences, images or clips; ``length`` tokens per sequence."""

    inputs: int
    length: int


@dataclass(frozen=True, kw_only=True)
class FailedPass:
    """Model part that could not run, with the reason."""

    part: str
    reason: str


def run_passes(
    model: Any, values: KnownValues, names: Mapping[torch.Tensor, str], sizes: PassSizes
) -> tuple[list[WeightProduct], list[FailedPass]]:
    """Runs all parts; returns their weight products and the parts that could not run."""
    products: list[WeightProduct] = []
    failed = []
    features: dict[str, Any] = {}
    for part, call in _passes(model):
        try:
            arguments = _arguments(call, model, values, sizes)
        except Exception as error:  # sizes of images or sounds that no tensor can have
            failed.append(_failure(part, error))
            continue
        recorded, result = _run(call, arguments, values, names)
        products += recorded
        if isinstance(result, Exception):
            failed.append(_failure(part, result))
        else:
            features[part] = result
    reached = {product.weight for product in products}
    whole = _with_images(model, values, sizes, features.get(f"{_IMAGE} features"))
    if whole and any(name not in reached for name in _linears(model)):
        # Some models have layers between images and text that no separate function runs.
        recorded, _ = _run(model.forward, whole, values, names)
        products += (product for product in recorded if product.weight not in reached)
    return products, failed


def _run(
    call: Callable[..., Any],
    arguments: Mapping[str, Any],
    values: KnownValues,
    names: Mapping[torch.Tensor, str],
) -> tuple[list[WeightProduct], Any]:
    """Runs a call; returns its products and its result, or the exception that ended it."""
    with torch.no_grad(), WeightProducts(values, names) as recorded:
        try:
            result = call(**arguments)
        except Exception as error:
            result = error
    return recorded.products, result


def _failure(part: str, error: Exception) -> FailedPass:
    reason = f"{type(error).__name__}: {one_line(str(error))[:200]}{_error_location(error)}"
    return FailedPass(part=part, reason=reason)


def _linears(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield f"{name}.weight"


def _with_images(
    model: Any, values: KnownValues, sizes: PassSizes, features: Any
) -> dict[str, Any] | None:
    """Builds forward inputs with images whose features the text contains."""
    token = getattr(model.config, "image_token_id", None)
    hidden = getattr(features, "last_hidden_state", features)
    if not isinstance(token, int) or not isinstance(hidden, torch.Tensor):
        return None
    count = hidden.numel() // hidden.shape[-1] // sizes.inputs
    call = _features_of(model, _IMAGE)
    assert call is not None
    arguments = _arguments(call, model, values, sizes)
    return {**arguments, "input_ids": torch.full((sizes.inputs, count), token), "use_cache": False}


def longest_sequence(model: Any) -> int:
    """Returns the smallest maximum sequence length in a model's configs."""
    configs = [model.config, *_inner_configs(model.config)]
    limits = [
        getattr(config, key, None)
        for config in configs
        for key in ("max_position_embeddings", "n_positions", "max_target_positions")
    ]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=1 << 20)


def _inner_configs(config: Any) -> Iterator[Any]:
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            yield inner


_IMAGE = "image"
_FEATURES = (_IMAGE, "audio", "video")


def _passes(model: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields image and sound towers first, then the text part or the whole model."""
    kinds = [kind for kind in _FEATURES if _features_of(model, kind)]
    if "image" in kinds and "video" in kinds:
        kinds.remove("video")  # uses the same tower
    for kind in kinds:
        call = _features_of(model, kind)
        assert call is not None
        yield f"{kind} features", call
    if hasattr(model, "get_text_features") and not model.can_generate():
        yield "text features", model.get_text_features
    else:
        yield "forward", model.forward


def _features_of(model: Any, kind: str) -> Callable[..., Any] | None:
    """Returns the function that runs a tower, from the model or from the one inside its head."""
    for owner in (model, model.base_model):
        call = getattr(owner, f"get_{kind}_features", None)
        if callable(call):
            return call  # type: ignore[no-any-return]
    return None


def _arguments(
    call: Callable[..., Any], model: Any, values: KnownValues, sizes: PassSizes
) -> dict[str, Any]:
    """Builds inputs for a call's supported parameters."""
    parameters = inspect.signature(inspect.unwrap(call)).parameters
    makers = {name: _MAKERS[name] for name in parameters if name in _MAKERS}
    is_text = "input_ids" in parameters
    if is_text:  # images and sounds are then optional: they have passes of their own
        for kind, inputs in _INPUTS_OF_TOWERS.items():
            if _features_of(model, kind):
                makers = {name: make for name, make in makers.items() if name not in inputs}
    if not getattr(model.config, "is_encoder_decoder", False):
        makers.pop("decoder_input_ids", None)
    if is_text and "image_grid_thw" not in makers:
        makers.pop("image_sizes", None)
    makers = {
        name: make
        for name, make in makers.items()
        if name not in _ONLY_IF_REQUIRED or parameters[name].default is inspect.Parameter.empty
    }
    arguments = {
        name: make(model.config, values, sizes, parameters) for name, make in makers.items()
    }
    if "use_cache" in parameters:
        arguments["use_cache"] = False
    return arguments


_ONLY_IF_REQUIRED = frozenset({"attention_mask", "feature_attention_mask", "input_features_mask"})

_INPUTS_OF_TOWERS = {
    "image": ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask"),
    "audio": ("input_features", "input_values", "feature_attention_mask", "input_features_mask"),
}


def _text(config: Any, values: KnownValues, sizes: PassSizes, _: Any) -> torch.Tensor:
    return torch.zeros(sizes.inputs, sizes.length, dtype=torch.long)


def _mask(config: Any, values: KnownValues, sizes: PassSizes, _: Any) -> torch.Tensor:
    return torch.ones(sizes.inputs, sizes.length, dtype=torch.long)


_GRID = 32
"""Patches per image side, for models that accept any image size."""


def _images(
    config: Any, values: KnownValues, sizes: PassSizes, parameters: Mapping[str, Any]
) -> torch.Tensor:
    vision = _vision(config)
    channels = _first_int(vision, ("num_channels", "in_channels", "in_chans"), 3)
    if any(name in parameters for name in ("image_grid_thw", "grid_thw")):
        patch = _first_int(vision, ("patch_size", "spatial_patch_size"), 14)
        frames = _first_int(vision, ("temporal_patch_size",), 1)
        shape = [sizes.inputs * _GRID * _GRID, channels * frames * patch * patch]
    else:
        shape = [sizes.inputs, channels, *_image_size(vision)]
    with values.mode:
        return torch.zeros(shape, dtype=torch.bfloat16)


def _image_sizes(config: Any, values: KnownValues, sizes: PassSizes, _: Any) -> torch.Tensor:
    return torch.tensor([_image_size(_vision(config))] * sizes.inputs)


def _grids(config: Any, values: KnownValues, sizes: PassSizes, _: Any) -> torch.Tensor:
    return torch.tensor([[1, _GRID, _GRID]] * sizes.inputs)


def _spectra(config: Any, values: KnownValues, sizes: PassSizes, _: Any) -> torch.Tensor:
    audio = getattr(config, "audio_config", None) or config
    bins = _first_int(audio, ("num_mel_bins", "n_mels", "input_feat_size"), 80)
    frames = 2 * _first_int(audio, ("max_source_positions",), 1500)
    with values.mode:
        return torch.zeros(sizes.inputs, bins, frames, dtype=torch.bfloat16)


def _frames_mask(
    config: Any, values: KnownValues, sizes: PassSizes, parameters: Any
) -> torch.Tensor:
    frames = _spectra(config, values, sizes, parameters).shape[-1]
    return torch.ones(sizes.inputs, frames, dtype=torch.long)


_SAMPLES = 16_000
"""Samples in a clip: one second at the usual rate."""


def _samples(config: Any, values: KnownValues, sizes: PassSizes, _: Any) -> torch.Tensor:
    with values.mode:
        return torch.zeros(sizes.inputs, _SAMPLES, dtype=torch.bfloat16)


_MAKERS: dict[str, Callable[[Any, KnownValues, PassSizes, Mapping[str, Any]], torch.Tensor]] = {
    "input_ids": _text,
    "decoder_input_ids": _text,
    "attention_mask": _mask,
    "pixel_values": _images,
    "image_sizes": _image_sizes,
    "image_grid_thw": _grids,
    "grid_thw": _grids,
    "input_features": _spectra,
    "input_features_mask": _frames_mask,
    "feature_attention_mask": _frames_mask,
    "input_values": _samples,
}
"""Input makers by parameter name."""


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None) or config


def _image_size(vision: Any) -> list[int]:
    size = getattr(vision, "image_size", None)
    if isinstance(size, (list, tuple)) and len(size) >= 2:
        return [int(size[0]), int(size[1])]
    return [size, size] if isinstance(size, int) else [224, 224]


def _first_int(config: Any, keys: tuple[str, ...], default: int) -> int:
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), default)


def _error_location(error: BaseException) -> str:
    """Formats the model class and line in transformers that raised an exception."""
    location = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/transformers/models/" in code.co_filename.replace("\\", "/"):
            owner = type(trace.tb_frame.f_locals.get("self")).__name__
            location = f" ({owner}, line {trace.tb_lineno} of its file)"
        trace = trace.tb_next
    return location
