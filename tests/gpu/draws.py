"""Random numbers for operands: torch's own, or some that are equal on every machine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class Draws(Protocol):
    """Draws tensors of random numbers."""

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns fp32 numbers from 0 to 1."""

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns normally distributed fp32 numbers."""

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns int64 numbers from ``low`` to ``high - 1``."""


class TorchDraws:
    """Draws by torch's generator for a device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, device=self._device)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=self._device)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, device=self._device)


class SeededDraws:
    """Draws by numpy, so that a seed gives the same operands wherever they are needed."""

    def __init__(self, seed: int, device: str) -> None:
        self._random = np.random.default_rng(seed)
        self._device = device

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._on_device(self._random.random(shape, np.float32))

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._on_device(self._random.standard_normal(shape, np.float32))

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._on_device(self._random.integers(low, high, shape))

    def _on_device(self, made: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(made)).to(self._device)
