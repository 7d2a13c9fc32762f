"""Builds a config's model in transformers, without weights or network."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from nvgemm_runtime.errors import ManifestError, ToolchainError, one_line

from ..messages import show

if TYPE_CHECKING:
    import torch

OLDEST, BEFORE = "5.23", "6"
"""Supported transformers releases: from the first, before the second."""

_LEAST_PYTHON = (3, 11)

_MOST_LAYERS = 1024
"""Most layers in a model; no published model has as many."""

_MOST_MODULES = 100_000
"""Most modules in a model. One with 61 layers of 256 experts in separate Linears has half as many.
"""

HOW_ELSE = "record a program that calls the model with nvgemm-aot record --fake"
"""Hint if a model cannot be read from its config."""

_REMOTE_CODE = "auto_map"
"""Config key that names Python files in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """Model whose weights are fake tensors.

    Attributes:
        module: The model.
        config: Its config as transformers reads it.
        transformers: The transformers version.
    """

    module: Any
    config: Any
    transformers: str

    @property
    def class_name(self) -> str:
        """The model's class name."""
        return type(self.module).__name__


def require_transformers(path: Path, model_type: object, families: str) -> str:
    """Checks that transformers can be used, and returns its version.

    Raises:
        ToolchainError: If it is missing, has another version, or needs a newer Python.
    """
    lead = (
        f"{path}: model_type {show(str(model_type))} needs transformers "
        f"(only these do not: {families})"
    )
    requirement = f"transformers>={OLDEST},<{BEFORE}"
    if sys.version_info < _LEAST_PYTHON:
        python = ".".join(map(str, sys.version_info[:2]))
        raise ToolchainError(
            f"{lead}; allowed: {requirement}, which needs Python 3.11 or newer; "
            f"found Python {python}"
        )
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainError(
            f"{lead}; transformers is not installed; "
            f"run: pip install '{requirement}' (the extra [models])"
        ) from None
    if not Version(OLDEST) <= Version(version) < Version(BEFORE):
        raise ToolchainError(
            f"{lead}; allowed: {requirement}; found transformers {version}; "
            f"run: pip install '{requirement}' (the extra [models])"
        )
    return version


def build_model(path: Path, data: Mapping[str, Any], version: str) -> BuiltModel:
    """Builds a config.json's model with parameters on the meta device, in bf16.

    Never runs code from a checkpoint.

    Raises:
        ManifestError: If transformers does not know the architecture, refuses the config, or cannot
            build it without weights.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    try:
        import transformers
    except Exception as error:
        raise ToolchainError(
            f"transformers {version} cannot be imported: {_short_reason(error)}; "
            f"pip install 'transformers>={OLDEST},<{BEFORE}'"
        ) from None

    model_type = data.get("model_type")
    known = transformers.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in known:
        raise ManifestError(_unknown_architecture(path, data, version))
    _check_layers(path, data)
    with quietly():
        try:
            config = known[model_type].from_dict(_without_ignored(data))
        except Exception as error:
            raise ManifestError(
                f"{path}: transformers {version} refuses it as a config of {model_type}: "
                f"{_short_reason(error)}; allowed: a valid config.json for {model_type}"
            ) from None
        name = "model"
        try:
            name = _class_name(transformers, data, config)
            module = _build(transformers, getattr(transformers, name), config)
        except Exception as error:
            raise ManifestError(
                f"{path}: transformers {version} cannot build its {name} without weights: "
                f"{_short_reason(error)}; allowed: a config that it can build; {HOW_ELSE}"
            ) from None
    return BuiltModel(module=module, config=config, transformers=version)


def _check_layers(path: Path, data: Mapping[str, Any], above: str = "") -> None:
    """Refuses layer counts that would fill the memory, before any module is made."""
    for key, value in data.items():
        if isinstance(value, dict):
            _check_layers(path, value, f"{above}{key}.")
        elif _LAYERS.search(key):
            for count in value if isinstance(value, list) else [value]:
                if isinstance(count, int) and count > _MOST_LAYERS:
                    raise ManifestError(
                        f"{path}: {above}{key}: found {count}; allowed: at most {_MOST_LAYERS}"
                    )


_LAYERS = re.compile(r"(layers?|depths?|blocks)$")
"""Keys for layer counts, or lists of them."""


def _unknown_architecture(path: Path, data: Mapping[str, Any], version: str) -> str:
    model_type = data.get("model_type")
    observed = show(model_type) if isinstance(model_type, str) else repr(model_type)[:60]
    lead = f"{path}: model_type: found {observed if 'model_type' in data else 'no such key'}"
    allowed = f"allowed: an architecture that transformers {version} has"
    if _REMOTE_CODE in data:
        return (
            f"{lead}, whose model is code in the checkpoint ({_REMOTE_CODE}), which never runs "
            f"here; {allowed}; {HOW_ELSE}"
        )
    return f"{lead}; {allowed}; {HOW_ELSE}"


def _without_ignored(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy without keys for quantization, code and output format."""
    left_out = ("quantization_config", "compression_config", "return_dict", _REMOTE_CODE)
    return {
        key: _without_ignored(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if key not in left_out
    }


def _class_name(transformers: Any, data: Mapping[str, Any], config: Any) -> str:
    """Returns the class to build: the config's architecture, or its model_type's usual class."""
    architectures = data.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and re.fullmatch(r"[A-Z]\w*", name):
            kind = getattr(transformers, name, None)
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
                config_class = getattr(kind, "config_class", None)
                if config_class is None or isinstance(config, config_class):
                    return name
    from transformers.models.auto import modeling_auto

    for table in _CLASSES:
        names = getattr(modeling_auto, f"{table}_MAPPING_NAMES", {})
        if config.model_type in names:
            name = names[config.model_type]
            return str(name if isinstance(name, str) else name[0])
    raise ValueError(f"transformers has no automatic class for model_type {config.model_type}")


_CLASSES = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL",
)
"""transformers' automatic class tables; the first with the model_type decides."""


def _build(transformers: Any, kind: Any, config: Any) -> Any:
    import torch
    from transformers.initialization import no_init_weights

    modules = 0

    def count(*_: object) -> None:
        nonlocal modules
        modules += 1
        if modules > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES} modules")

    handle = torch.nn.modules.module.register_module_module_registration_hook(count)
    try:
        with torch.device("meta"), no_init_weights():
            model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
            if model._can_set_experts_implementation():
                model.set_experts_implementation("grouped_mm")
    finally:
        handle.remove()
    return model.eval()


def make_fake(module: Any, mode: Any) -> dict[torch.Tensor, str]:
    """Replaces a model's meta parameters and buffers with fake tensors.

    Returns:
        Its parameters with their names; a shared one has the name of the Linear that uses it.
    """
    import torch

    fakes: dict[int, torch.Tensor] = {}
    names: dict[torch.Tensor, str] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                fakes[id(tensor)] = torch.nn.Parameter(
                    torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype),
                    requires_grad=False,
                )
        return fakes[id(tensor)]

    originals = []  # so that no id is used twice
    for prefix, part in module.named_modules():
        for name, tensor in part._parameters.items():
            if tensor is not None:
                originals.append(tensor)
                parameter = fake(tensor)
                part._parameters[name] = parameter
                full = f"{prefix}.{name}" if prefix else name
                if parameter not in names or isinstance(part, torch.nn.Linear):
                    names[parameter] = full
        for name, tensor in part._buffers.items():
            if tensor is not None and tensor.is_meta:
                originals.append(tensor)
                part._buffers[name] = fake(tensor)
    return names


def _short_reason(error: BaseException) -> str:
    text = one_line(str(error))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppresses transformers' warnings, which concern weights and running."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
