"""The GEMMs of models, from their Hugging Face config.json: one module a family.

May import `targets`, `storage` and the rest of `manifest`. Start at `decoder`, what families share.
To add a family, write a module with a class like `llama.LlamaConfig`, name it in `FAMILIES`, and
give it a small model in ``tests/aot/manifest/test_model_gemms.py``, which compares it with
transformers.
"""

from __future__ import annotations

from .decoder import DecoderConfig
from .deepseek_v3 import DeepseekV3Config
from .gpt_oss import GptOssConfig
from .llama import LlamaConfig
from .mixtral import MixtralConfig
from .qwen3 import Qwen3Config
from .qwen3_moe import Qwen3MoeConfig

FAMILIES: dict[str, type[DecoderConfig]] = {
    "deepseek_v3": DeepseekV3Config,
    "gpt_oss": GptOssConfig,
    "llama": LlamaConfig,
    "mixtral": MixtralConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
"""By ``model_type`` of a config.json: how to read it."""
