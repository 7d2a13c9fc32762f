"""Model GEMMs, read from Hugging Face config.json files: one module per family.

May import `targets`, `storage` and the rest of `manifest`. Start at `decoder`, which families
share. To add a family, write a module with a class like `llama.LlamaConfig` and add it to
`FAMILIES`. Then add a small model to ``tests/aot/manifest/test_model_gemms.py``, which compares it
with transformers.
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
"""Config classes by ``model_type``."""
