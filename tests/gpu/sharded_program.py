"""A user's program that shards a model with FSDP2, over one process, and compiles its layers.

It prints relative errors of the result and of the weights' gradients to eager fp32, and those of
eager bf16, as one line of JSON; or why FSDP2 cannot be had.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from typing import Any

import torch
from user_program import GatedMlp, relative_error, slow_down_aten


def gradients(model: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    result = model(x)
    result.backward(grad)
    found = [result.detach()]
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
        parameter.grad = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    try:
        from torch import distributed
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))  # noqa: T201
        return
    if not distributed.is_available():
        print(json.dumps({"missing": "torch.distributed"}))  # noqa: T201
        return
    slow_down_aten(args.device)
    torch.manual_seed(0)
    with torch.device(args.device):
        exact = torch.nn.Sequential(*(GatedMlp(args.hidden, 2 * args.hidden) for _ in range(2)))
        x, grad = (torch.randn(256, args.hidden) for _ in range(2))
    eager = copy.deepcopy(exact).bfloat16()
    sharded = copy.deepcopy(exact)
    right = gradients(exact, x.bfloat16().float(), grad.bfloat16().float())
    usual = gradients(eager, x.bfloat16(), grad.bfloat16())
    with tempfile.TemporaryDirectory() as directory:
        if args.device == "cuda":
            torch.cuda.set_device(0)
        distributed.init_process_group(
            "nccl" if args.device == "cuda" else "gloo",
            init_method=f"file://{directory}/group",
            rank=0,
            world_size=1,
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in sharded:
            layer.compile(mode="max-autotune-no-cudagraphs")
            fully_shard(layer, mp_policy=policy)
        fully_shard(sharded, mp_policy=policy)
        results = gradients(sharded, x.bfloat16(), grad.bfloat16())
        again = gradients(sharded, x.bfloat16(), grad.bfloat16())[0]
        distributed.destroy_process_group()
    report = {
        "errors": [relative_error(*pair) for pair in zip(results, right)],
        "eager_errors": [relative_error(*pair) for pair in zip(usual, right)],
        "repeats": torch.equal(again, results[0]),
    }
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
