"""transformers' ``generate`` with a static cache: decode is compiled, prefill is eager."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.engines import Tokens
from benchmarks.serving.workload import Workload, fill

if TYPE_CHECKING:
    import torch

_JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Weights that vLLM joins."""


class TransformersEngine:
    """An `Engine` over ``AutoModelForCausalLM``.

    Every batch has a cache of its own, so that torch's CUDA graphs find it where it was.
    """

    def __init__(self, workload: Workload, directory: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch._dynamo.config.recompile_limit = 64  # a batch each
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        config = AutoConfig.from_pretrained(workload.write_config(directory / "model"))
        with torch.device(self._device):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model.eval()
        fill(self._model.named_parameters())
        self._longest = workload.longest
        self._caches: dict[tuple[int, int], Any] = {}

    def weight(self, name: str) -> torch.Tensor:
        """Returns a weight; see `Engine`."""
        import torch

        for joined, parts in _JOINED.items():
            if joined in name:
                return torch.cat([self.weight(name.replace(joined, part)) for part in parts])
        path = name if name.startswith("lm_head") else f"model.{name}"
        found: torch.Tensor = self._model.get_parameter(path).detach()
        return found

    def generate(self, prompts: Tokens, count: int) -> Tokens:
        """Generates tokens; see `Engine`."""
        return self._new_tokens(self._generate(prompts, count), prompts)

    def log_probabilities(self, prompts: Tokens, count: int) -> tuple[Tokens, list[list[float]]]:
        """Generates tokens with log probabilities; see `Engine`."""
        import torch

        found = self._generate(prompts, count, output_logits=True, return_dict_in_generate=True)
        tokens = self._new_tokens(found.sequences, prompts)
        every = torch.log_softmax(torch.stack(found.logits, dim=1).float(), -1)
        chosen = torch.tensor(tokens, device=every.device)[..., None]
        values: list[list[float]] = every.gather(-1, chosen).squeeze(-1).tolist()
        return tokens, values

    @staticmethod
    def _new_tokens(sequences: torch.Tensor, prompts: Tokens) -> Tokens:
        tokens: Tokens = sequences[:, len(prompts[0]) :].tolist()
        return tokens

    def _generate(self, prompts: Tokens, count: int, **options: Any) -> Any:
        import torch
        from transformers import StaticCache

        # A long prompt's cache is not that of a batch that decodes.
        length = len(prompts[0]) + count
        most = min(self._longest, 64 * -(-max(length, 256) // 64))
        cache = self._caches.get((len(prompts), most))
        if cache is None:
            cache = StaticCache(config=self._model.config, max_cache_len=most)
            self._caches[len(prompts), most] = cache
        else:
            cache.reset()
        inputs = torch.tensor(prompts, device=self._device)
        return self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=cache,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
