"""Steps around an engine's start-up: compares ranks, loads kernels, and reports what is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..errors import RequiredError
from ..settings import Mode, default_mode
from . import rank_wheels
from .served_products import find_linears, measure_coverage

if TYPE_CHECKING:
    import torch

    from ..installed.registry import FoundBundle
    from .seams import Engine

Result = TypeVar("Result")


def accompany(
    engine: Engine,
    start: Callable[[], Result],
    *,
    load: Callable[[], object],
    model: Callable[[], torch.nn.Module],
    sizes: Callable[[], Sequence[int]],
) -> Result:
    """Runs the engine's step that captures graphs, between the plug-in's own.

    Args:
        engine: Engine.
        start: Its step.
        load: Loads kernels before.
        model: Returns its model.
        sizes: Returns the numbers of rows for which it captured graphs.

    Raises:
        RequiredError: If a kernel cannot be loaded in mode ``required``.
    """
    begin = time.perf_counter()
    engine.guard(rank_wheels.publish, "the comparison of ranks")
    engine.guard(load, "the preload of kernels")
    spent = time.perf_counter() - begin
    result = start()
    engine.guard(lambda: _compare_ranks(engine), "the comparison of ranks")
    engine.guard(lambda: _report(engine, model(), sizes(), spent), "the report")
    return result


def _compare_ranks(engine: Engine) -> None:
    difference = rank_wheels.find_difference()
    if difference is not None:
        engine.warn_once(difference)


def load_kernels(model: torch.nn.Module) -> None:
    """Loads the kernels in the tables for a model's heads, and those in compiled graphs so far."""
    import torch

    from .. import linear, preload

    for weight, bias in find_linears(model, only_heads=True):
        with torch.inference_mode():  # looks up the table
            linear(weight.new_zeros(1, weight.shape[1]), weight, bias)
    preload()


def _report(engine: Engine, model: torch.nn.Module, sizes: Sequence[int], spent_s: float) -> None:
    """Loads what this process may call and is not loaded yet, and logs one line.

    Args:
        engine: Engine that shows the line.
        model: Its model.
        sizes: Numbers of rows for which it captured graphs.
        spent_s: Seconds that the plug-in has taken before.

    Raises:
        RequiredError: If a kernel cannot be loaded in mode ``required``.
    """
    from .. import __version__, bundles, preload

    begin = time.perf_counter()
    found = bundles()
    if not found:
        engine.log.info("nvgemm-aot %s: no kernel wheel is installed", __version__)
        return
    loaded = preload()
    coverage = measure_coverage(model, sizes)
    described = ", ".join(dict.fromkeys(map(_describe, found)))
    engine.log.info(
        "nvgemm-aot %s: %s; %d kernels are loaded; the plug-in took %.2f s; %s%s",
        __version__,
        coverage,
        loaded.kernels,
        spent_s + time.perf_counter() - begin,
        described,
        "" if coverage.served_layers else "; the reason: nvgemm-aot doctor",
    )
    if loaded.failures:
        kernel_id, reason = next(iter(loaded.failures.items()))
        message = f"{len(loaded.failures)} kernels cannot be loaded: {kernel_id[:12]}: {reason}"
        if default_mode() is Mode.REQUIRED:
            raise RequiredError(message, tuple(loaded.failures.values()))
        engine.warn_once(message)


def _describe(bundle: FoundBundle) -> str:
    """Returns a bundle's origin, and why this device cannot use it, if so."""
    from ..launch.compiled import default_device
    from ..matching.device import device_facts

    device = default_device()
    refusal = bundle.refusal(device_facts(device.type, device.index or 0))
    return bundle.origin if refusal is None else f"{bundle.origin} (unusable: {refusal})"
