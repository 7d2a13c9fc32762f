"""Experts of the sizes that kernels for the CPU serve, and what is launched of those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from edges import problem_of

import cpu_provider
from cpu_kernels import signature
from installed_bundles import use
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.launch.loading.loader import LoadedKernel


class Installed:
    """Grouped kernels for the CPU, and what has been launched of them since."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.monkeypatch = monkeypatch
        self.launched: list[Signature] = []
        attribute = LoadedKernel.__getattribute__

        def watched(kernel: LoadedKernel, name: str) -> Any:
            if name == "launch":
                self.launched.append(attribute(kernel, "kernel").signature)
            return attribute(kernel, name)

        monkeypatch.setattr(LoadedKernel, "__getattribute__", watched)
        use(monkeypatch, path)

    def remove(self) -> None:
        use(self.monkeypatch)

    def epilogues(self) -> list[Epilogue | None]:
        """Of what was launched since this was last asked for."""
        found = [one.epilogue for one in self.launched]
        self.launched.clear()
        return found


def build_kernels(
    layouts: str | dict[str, Sequence[Epilogue | None]],
    epilogues: Sequence[Epilogue | None],
    directory: Path,
    cache: Cache,
    *,
    candidates: int = len(cpu_provider.TILES),
    provider: cpu_provider.CpuProvider | None = None,
    gathered: bool = False,
    gathering: Sequence[Epilogue | None] = (),
) -> Path:
    """Build a bundle of grouped kernels in bf16: of epilogues by layout, or of some for several.

    With ``gathered``, also of those that weigh and add rows; of the epilogues ``gathering``, those
    in layout tn that take rows of A by their numbers.
    The only candidate, where there is one, demands operands that are aligned to 16 bytes.
    """
    by_layout = dict.fromkeys(layouts.split(), epilogues) if isinstance(layouts, str) else layouts
    served = [
        signature(layout, op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)
        for layout, of_layout in by_layout.items()
        for epilogue in of_layout
    ]
    served += [
        signature("tn", op=Op.GATHERED_GROUPED_MM, operand=DType.BF16, epilogue=epilogue)
        for epilogue in gathering
    ]
    if gathered:
        served.append(signature("tt", op=Op.GATHERED_MM, operand=DType.BF16))
    problems = [problem_of(one, 18, 32, 32) for one in served]
    built = cpu_provider.build_bundle(
        problems, directory, cache, candidates=candidates,
        provider=provider or cpu_provider.TwoTiles(),
    )  # fmt: skip
    return built.path


def operands_for_kernels(*biases: str) -> dict[str, Any]:
    """Operands in bf16 that require gradients, of sizes that kernels serve."""
    torch.manual_seed(0)
    made: dict[str, Any] = {"counts": torch.tensor([5, 0, 1, 12])}
    shapes = {"x": (18, 32), "w_up": (4, 64, 32), "w_down": (4, 32, 32)}
    shapes |= {name: (4, 64 if name == "up_bias" else 32) for name in biases}
    for name, shape in shapes.items():
        made[name] = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
    return made


def leaves(made: dict[str, Any]) -> list[torch.Tensor]:
    flat = [one for each in made.values() for one in (each if isinstance(each, tuple) else (each,))]
    return [one for one in flat if isinstance(one, torch.Tensor) and one.requires_grad]


def gradients(function: Any, made: dict[str, Any]) -> list[torch.Tensor]:
    out = function(**made)
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, leaves(made), torch.randn_like(out))
    return [out.detach(), *grads]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], rtol: float) -> None:
    """Each tensor's error is small beside the tensor's largest value."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.shape == other.shape
        if one.numel():
            bound = rtol * float(other.abs().max())
            assert float((one.double() - other.double()).abs().max()) <= bound
