"""Sums, integers, scales and groups under torch.compile on a GPU: each is served, or says why not.

ATen is slowed down where Inductor times it, so that a bundled kernel wins whenever one is offered.
Needs the wheel of every_kind.yaml. What it has decides what is asked: without that of
hopper_rows.yaml, nothing on Hopper adds a bias, so a sum there is a product into fp32 with torch's
sum behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import installed_kernels
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from user_program import ATEN_GEMMS, relative_error, slow_down_aten

DEVICE = "cuda"
ERROR_FACTOR = 1.5
"""How much further from fp32 than eager a compiled result may be: another order of summation."""

_CALL = re.compile(r"\bnvgemm_(\w+)_([0-9a-f]{12})\(")


@pytest.fixture(scope="module")
def signatures() -> set[str]:
    """Of the installed kernels."""
    return {kernel.signature.key for _, kernel in installed_kernels()}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Compile from nothing, over ATen and bundled kernels; where the code goes."""
    from torch._inductor.kernel import bmm, mm, mm_grouped  # noqa: F401  they name ATen's functions
    from torch._inductor.select_algorithm import extern_kernels

    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(tmp_path / "events"))
    before = {name: getattr(extern_kernels, name) for name in ATEN_GEMMS}
    slow_down_aten(DEVICE)
    code = tmp_path / "inductor"
    code.mkdir()
    with (
        fresh_cache(dir=str(code), delete=False),
        config.patch(max_autotune_gemm_backends="ATEN"),
    ):
        yield code
    for name, function in before.items():
        setattr(extern_kernels, name, function)
    torch._dynamo.reset()


def run(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    compiled = torch.compile(function, fullgraph=True, options={"max_autotune_gemm": True})
    with torch.no_grad():
        compiled(*operands)
        return compiled(*operands)


def calls(directory: Path) -> list[str]:
    """What generated code calls bundled kernels for."""
    texts = [path.read_text() for path in sorted(directory.glob("**/*.py"))]
    modules = [text for text in texts if "AsyncCompile()" in text]
    return [name for text in modules for name, _ in _CALL.findall(text)]


def met(directory: Path) -> list[dict[str, Any]]:
    """The GEMMs that came up."""
    events = map(json.loads, directory.with_name("events").open())
    return [event for event in events if event["event"] == "met"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def assert_served_or_missed(
    directory: Path, signatures: set[str], expected: dict[str, str]
) -> None:
    """By what is called in the code: the signature that serves it, the best first."""
    for name, signature in expected.items():
        if signature in signatures:
            assert calls(directory) == [name]
            return
    (event,) = met(directory)
    assert event["basis"] == "miss"
    assert "no bundled kernel computes" in " ".join(event["reasons"])
    assert not calls(directory)


SUMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], dict[str, str]]] = {
    "a linear layer": (
        lambda c, a, b: functional.linear(a, b, c),
        ((512,), (256, 1024), (512, 1024)),
        {"addmm": "mm/tn/bf16xbf16/fp32/bf16/bias", "addmm_split": "mm/tn/bf16xbf16/fp32/fp32"},
    ),
    "a residual": (
        lambda c, a, b: torch.addmm(c, a, b.T),
        ((256, 512), (256, 1024), (512, 1024)),
        {"addmm": "mm/tn/bf16xbf16/fp32/bf16/add", "addmm_split": "mm/tn/bf16xbf16/fp32/fp32"},
    ),
    "batches": (
        lambda c, a, b: torch.baddbmm(c, a, b.mT),
        ((4, 256, 512), (4, 256, 128), (4, 512, 128)),
        {
            "baddbmm": "bmm/tn/bf16xbf16/fp32/bf16/add",
            "baddbmm_split": "bmm/tn/bf16xbf16/fp32/fp32",
        },
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, directory: Path, signatures: set[str]) -> None:
    function, shapes, expected = SUMS[name]
    operands = [random(*shape) for shape in shapes]
    result = run(function, *operands)
    right = function(*(operand.float() for operand in operands))
    usual = relative_error(function(*operands), right)
    assert relative_error(result, right) <= ERROR_FACTOR * usual + 1e-4
    assert_served_or_missed(directory, signatures, expected)


def test_a_sum_with_an_activation_is_right(directory: Path, signatures: set[str]) -> None:
    weight, bias, x = random(512, 1024), random(512), random(256, 1024)

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.relu(functional.linear(x, weight, bias))

    result = run(layer, x, weight, bias)
    right = layer(x.float(), weight.float(), bias.float())
    usual = relative_error(layer(x, weight, bias), right)
    assert relative_error(result, right) <= ERROR_FACTOR * usual + 1e-4
    fused = "mm/tn/bf16xbf16/fp32/bf16/bias_relu" in signatures
    assert ("addmm_relu" in calls(directory)) == fused


def test_integers_are_exact(directory: Path, signatures: set[str]) -> None:
    a = torch.randint(-128, 128, (256, 512), device=DEVICE, dtype=torch.int8)
    b = torch.randint(-128, 128, (512, 512), device=DEVICE, dtype=torch.int8).T
    result = run(torch._int_mm, a, b)
    assert torch.equal(result.double(), a.double() @ b.double())
    assert_served_or_missed(directory, signatures, {"int_mm": "mm/tn/int8xint8/int32/int32"})


FP8 = torch.float8_e4m3fn
SCALED = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/"


@pytest.mark.parametrize("biased", [False, True], ids=["product", "bias"])
@pytest.mark.parametrize("of_rows", [False, True], ids=["tensors", "rows"])
def test_a_linear_layer_in_fp8(
    of_rows: bool, biased: bool, directory: Path, signatures: set[str]
) -> None:
    """As torchao has it: weights in fp8, activations made fp8 on the way, scales in fp32."""
    kind = "fp32_row" if of_rows else "fp32_tensor"
    wanted = f"{SCALED}{kind}{'/bias' if biased else ''}"
    if wanted not in signatures:
        pytest.skip(f"no installed kernel for {wanted}; install the wheel of hopper_rows.yaml")

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.abs().amax(-1, keepdim=True) if of_rows else x.abs().max()
        scale = largest.float().clamp(min=1e-12) / 448
        return (x.float() / scale).clamp(-448, 448).to(FP8), scale

    x, bias = random(256, 1024), random(512) if biased else None
    weight, scale_w = quantise(random(512, 1024))

    def layer(x: torch.Tensor, weight: torch.Tensor, scale_w: torch.Tensor) -> torch.Tensor:
        quantised, scale = quantise(x)
        return torch._scaled_mm(
            quantised,
            weight.T,
            scale,
            scale_w.T if of_rows else scale_w,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    result = run(layer, x, weight, scale_w)
    quantised, scale = quantise(x)
    right = (quantised.float() * scale) @ (weight.float() * scale_w).T
    right = right + bias.float() if bias is not None else right
    assert relative_error(result, right) < 5e-3
    assert calls(directory) == ["scaled_mm"]


def test_a_gradient_in_fp8(directory: Path, signatures: set[str]) -> None:
    """As in training: a gradient in e5m2 by a weight in e4m3, which is laid out along its rows."""
    wanted = "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor"
    if wanted not in signatures:
        pytest.skip(f"no installed kernel for {wanted}; install the wheel of hopper_rows.yaml")
    gradient, weight = random(256, 1024).to(torch.float8_e5m2), random(1024, 512).to(FP8)
    weight = weight.t().contiguous().t()
    scales = torch.tensor(0.25, device=DEVICE), torch.tensor(2.0, device=DEVICE)

    def backward(gradient: torch.Tensor, weight: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(gradient, weight, *of, out_dtype=torch.bfloat16)

    result = run(backward, gradient, weight, *scales)
    assert relative_error(result, gradient.float() @ weight.float() * 0.5) < 5e-3
    assert calls(directory) == ["scaled_mm"]


def test_scaled_fp8(directory: Path, signatures: set[str]) -> None:
    a = random(256, 512).to(torch.float8_e4m3fn)
    b = random(512, 512).to(torch.float8_e4m3fn).T
    one = torch.ones((), device=DEVICE)

    def scaled(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    result = run(scaled, a, b, one)
    assert relative_error(result, a.float() @ b.float()) < 1e-2
    expected = {"scaled_mm": "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor"}
    assert_served_or_missed(directory, signatures, expected)
