"""vLLM's own engine, in this process, with nothing configured beyond the model and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.engines import Tokens
from benchmarks.serving.workload import Workload, fill

if TYPE_CHECKING:
    import torch


class VllmEngine:
    """An `Engine` over ``vllm.LLM``."""

    def __init__(self, workload: Workload, directory: Path) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(workload.write_config(directory / "model")),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            seed=0,
            max_model_len=workload.longest,
            max_num_seqs=max(workload.batches, default=1),
            kv_cache_memory_bytes=workload.cache_bytes,
            enable_prefix_caching=False,  # prompts come again
            disable_log_stats=True,
        )
        self._weights: dict[str, torch.Tensor] = {}
        self._llm.apply_model(self._take)

    def _take(self, model: torch.nn.Module) -> None:
        self._weights = {
            name.removeprefix("model."): one.detach() for name, one in model.named_parameters()
        }
        fill(self._weights.items())

    def weight(self, name: str) -> torch.Tensor:
        """Returns a weight; see `Engine`."""
        return self._weights[name]

    def generate(self, prompts: Tokens, count: int) -> Tokens:
        """Generates tokens; see `Engine`."""
        return [list(one.outputs[0].token_ids) for one in self._generate(prompts, count, None)]

    def log_probabilities(self, prompts: Tokens, count: int) -> tuple[Tokens, list[list[float]]]:
        """Generates tokens with log probabilities; see `Engine`."""
        outputs = [one.outputs[0] for one in self._generate(prompts, count, 1)]
        tokens = [list(one.token_ids) for one in outputs]
        found = [
            [step[token].logprob for token, step in zip(row, one.logprobs, strict=True)]
            for row, one in zip(tokens, outputs, strict=True)
        ]
        return tokens, found

    def _generate(self, prompts: Tokens, count: int, logprobs: int | None) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(requests, sampling, use_tqdm=False)
        return outputs
