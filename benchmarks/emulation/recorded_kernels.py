"""Launches of real kernels, recorded on an emulated B200, for mutants and removed fences.

A directory holds a bundle for sm_100f, and for each kernel in it the PTX as ``<kernel id>.ptx``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvgemm_aot.emulator.driver.caught_launch import CaughtLaunch
from nvgemm_aot.emulator.emulation_errors import EmulationError
from nvgemm_aot.emulator.machine.global_memory import Region
from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch, record
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.session import emulated_device
from nvgemm_aot.emulator.session.ptx_runner import emulated_launch
from nvgemm_aot.targets.profile import load_profile
from nvgemm_aot.verify.device.cubin import Cubin, read_cubins
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType, ScaleRecipe

M, N, K = 152, 96, 200
"""Rows, columns and depth: several tiles of most designs, each with a tail."""

_FP4_K = 320
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, kw_only=True)
class RecordedKernel:
    """A kernel, a launch of it whose results were checked, and what keeps its memory."""

    kernel: Kernel
    launch: RecordedLaunch
    tensors: tuple[torch.Tensor, ...]


def record_kernels(directory: Path) -> Iterator[RecordedKernel | tuple[Kernel, str]]:
    """Records a launch of each kernel in a directory; yields the reason if one does not succeed."""
    path = directory / "sm_100f.nvgemm"
    os.environ["NVGEMM_AOT_BUNDLES"] = str(path)
    launches: list[RecordedLaunch] = []
    bundle = Bundle(path)
    texts = {
        cubin.content: (directory / f"{kernel.id}.ptx").read_text()
        for kernel in bundle.header.kernels
        for cubin in read_cubins(bundle.payload(kernel))
    }

    def run(launch: CaughtLaunch, cubin: Cubin, regions: tuple[Region, ...]) -> None:
        program = parse(texts[cubin.content])
        launches.append(record(program, emulated_launch(launch, program), regions))

    emulated_device.start(load_profile("B200"), run)
    for kernel in bundle.header.kernels:
        torch.manual_seed(1)
        launches.clear()
        try:
            tensors, out, wanted = _call(kernel)
        except (EmulationError, ValueError, RuntimeError) as error:
            yield kernel, str(error)
            continue
        if len(launches) != 1:
            yield kernel, f"it made {len(launches)} launches"
        elif not torch.allclose(out.float(), wanted.float(), rtol=2e-2, atol=2e-2):
            yield kernel, "its results differ from the reference"
        else:
            yield RecordedKernel(kernel=kernel, launch=launches[0], tensors=(*tensors, out))


def _call(kernel: Kernel) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Calls a kernel on random integers; returns operands, the result, and a reference."""
    import nvgemm_runtime

    signature = kernel.signature
    dtype = torch.bfloat16
    options: dict[str, Any] = {"kernel": kernel.id}
    epilogue = signature.epilogue
    if signature.op is Op.GROUPED_MM:
        a, b = _integers(M, K), _integers(3, N, K).mT
        offsets = torch.tensor([40, 40, M], dtype=torch.int32)
        out = _poison(M, N)
        nvgemm_runtime.grouped_mm(a, b, offsets, out=out, **options)
        wanted = torch.cat([a[:40].float() @ b[0].float(), a[40:].float() @ b[2].float()])
        return (a, b, offsets), out, wanted
    if signature.op is Op.BMM:
        a, b, out = _integers(2, M, K), _integers(2, N, K).mT, _poison(2, M, N)
        nvgemm_runtime.bmm(a, b, out=out, **options)
        return (a, b), out, a.float() @ b.float()
    if signature.scales is not None:
        return _call_scaled(signature, options)
    a, b = _integers(M, K), _integers(N, K).t()
    product = a.float() @ b.float()
    if epilogue is None:
        out = _poison(M, N)
        nvgemm_runtime.mm(a, b, out=out, **options)
        return (a, b), out, product
    if "swiglu" in epilogue.name:
        out = _poison(M, N // 2)
        a = (a / 8).to(dtype)
        nvgemm_runtime.gated_mm(a, b, out=out, **options)
        gates, ups = (product / 8).chunk(2, 1)
        return (a, b), out, torch.nn.functional.silu(gates) * ups
    bias, out = _integers(N), _poison(M, N)
    activation = epilogue.name.removeprefix("bias").strip("_") or None
    nvgemm_runtime.addmm(bias, a, b, out=out, activation=activation, **options)
    functions: dict[str | None, Any] = {
        None: lambda x: x,
        "relu": torch.relu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    return (a, b, bias), out, functions[activation](product + bias.float())


def _call_scaled(
    signature: Signature, options: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    import nvgemm_runtime

    out = _poison(M, N)
    recipe = signature.scales
    assert recipe is not None
    if signature.a is DType.FP4_E2M1:
        assert recipe.block is not None
        codes = [torch.randint(0, 256, (rows, _FP4_K // 2), dtype=torch.uint8) for rows in (M, N)]
        a, b = (
            _E2M1[torch.stack([each & 15, each >> 4], 2).reshape(len(each), -1).long()]
            for each in codes
        )
        columns = _FP4_K // recipe.block
        powers = [torch.randint(-1, 2, (rows, columns)) for rows in (M, N)]
        kind = torch.float8_e4m3fn if recipe is ScaleRecipe.E4M3_1X16 else torch.float8_e8m0fnu
        scales = [_swizzled((2.0**each).to(kind)) for each in powers]
        a, b = (
            values * (2.0**each).repeat_interleave(recipe.block, 1)
            for values, each in zip((a, b), powers)
        )
        packed = [each.view(torch.float4_e2m1fn_x2) for each in codes]
        nvgemm_runtime.scaled_mm(
            packed[0], packed[1].t(), scales[0], scales[1], out=out, recipe=recipe, **options
        )
        return (*packed, *scales), out, a @ b.T
    a, b = (_integers(rows, 208).to(torch.float8_e4m3fn) for rows in (M, N))
    scales = [torch.tensor([2.0]), torch.tensor([0.5])]
    nvgemm_runtime.scaled_mm(a, b.t(), scales[0], scales[1], out=out, **options)
    return (a, b, *scales), out, a.float() @ b.float().T


def _swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales in tiles of 32 x 4 x 4, padded with ones."""
    rows, columns = scales.shape
    padded = torch.ones(-(-rows // 128) * 128, -(-columns // 4) * 4).to(scales.dtype)
    padded.view(torch.uint8)[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(torch.uint8).reshape(len(padded) // 128, 4, 32, -1, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().reshape(-1).view(scales.dtype)


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(torch.bfloat16)


def _poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)
