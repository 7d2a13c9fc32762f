"""Gated epilogues: any m, NaN as in torch, one result for both orders of the weights, and joining.

Needs the wheel of gated.yaml, whose kernels `test_kernels` looks at as at all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from edges import problem_of
from gemm_arguments import exact_arguments, random_arguments
from gemm_reference import assert_close
from installed import installed_kernels, launch
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from user_program import ATEN_GEMMS, slow_down_aten

import nvgemm_runtime
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.epilogues import Gate, WeightOrder, find_gated
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.launch.select import load_kernel

DEVICE = "cuda"

ROWS = (
    1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 511, 777,
    1024, 2047, 2049, 3000, 4095, 4096,
)  # fmt: skip
"""Values of m: about every extent of a tile, and far from any."""

SHORT = Signature.parse("mm/tn/bf16xbf16/fp32/bf16/swiglu_halves")


def kernels_by_signature() -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    for _, kernel in installed_kernels():
        if kernel.signature.is_gated:
            found.setdefault(kernel.signature.key, []).append(kernel)
    return found


GATED = kernels_by_signature()


def test_every_epilogue_is_installed() -> None:
    served = {Signature.parse(key).epilogue for key in GATED}
    assert served == {find_gated(gate, order) for gate in Gate for order in WeightOrder}


@pytest.mark.parametrize("key", GATED)
def test_any_m_is_right(key: str) -> None:
    """Where A is contiguous along m, those that its alignment allows."""
    signature = Signature.parse(key)
    kernels = GATED[key]
    for number, m in enumerate(ROWS):
        rows = m if signature.layout.a_row_major else -(-m // 8) * 8
        arguments = exact_arguments(problem_of(signature, rows, 1040, 320))
        assert_close(launch(kernels[number % len(kernels)], arguments), arguments)


@pytest.mark.parametrize("half", [8, 24, 1000, 1432])
def test_halves_that_end_within_a_tile_are_right(half: int) -> None:
    """A tile past the last gate must not read the first ups as gates."""
    for kernel in GATED[SHORT.key]:
        arguments = random_arguments(problem_of(SHORT, 130, 2 * half, 136))
        assert_close(launch(kernel, arguments), arguments)


@pytest.mark.parametrize("gate", Gate)
def test_both_orders_give_the_same_result(gate: Gate) -> None:
    """Sums are exact, so that they do not depend on the tile."""
    results = {}
    for order in WeightOrder:
        key = f"mm/tn/bf16xbf16/fp32/bf16/{find_gated(gate, order).name}"
        torch.manual_seed(3)
        arguments = exact_arguments(problem_of(Signature.parse(key), 300, 2080, 512))
        if order is WeightOrder.INTERLEAVED:
            for role in (Role.B, Role.ADDEND):
                if role in arguments.tensors:
                    gates, ups = arguments.tensors[role].chunk(2, -1)
                    woven = torch.stack([gates, ups], -1).flatten(-2)
                    arguments.tensors[role] = woven.mT.contiguous().mT if role is Role.B else woven
        results[order] = [launch(kernel, arguments).clone() for kernel in GATED[key]]
    first, *others = (out for some in results.values() for out in some)
    for out in others:
        assert torch.equal(first, out)


@pytest.mark.parametrize("key", GATED)
def test_nan_is_as_in_torch(key: str) -> None:
    """A NaN in one column of B reaches the result through its gate or its up, and nothing else."""
    signature = Signature.parse(key)
    arguments = exact_arguments(problem_of(signature, 64, 256, 128))
    arguments.b[0, 5] = arguments.b[0, 200] = float("nan")
    arguments.a[9, 7] = float("nan")
    for kernel in GATED[key]:
        assert_close(launch(kernel, arguments), arguments)


def test_mm_refuses_a_gated_kernel() -> None:
    kernel = GATED[SHORT.key][0]
    arguments = exact_arguments(problem_of(SHORT, 64, 256, 128))
    out = arguments.out.new_empty(64, 256)  # as the product has them, so that it is not its shape
    for named in (kernel.id, load_kernel(kernel.id)):
        with pytest.raises(ValueError, match=f"kernel {kernel.id[:12]} computes {SHORT.key}"):
            nvgemm_runtime.mm(arguments.a, arguments.b, out, kernel=named)


def test_two_streams_at_once() -> None:
    kernel = GATED[SHORT.key][0]
    some = [random_arguments(problem_of(SHORT, 512, 4096, 2048)) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in some]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, arguments in zip(streams, some):
            with torch.cuda.stream(stream):
                launch(kernel, arguments)
    torch.cuda.synchronize()
    for arguments in some:
        assert_close(arguments.out, arguments)


def test_a_captured_launch_is_right() -> None:
    kernel = GATED[SHORT.key][0]
    arguments = random_arguments(problem_of(SHORT, 200, 2048, 512))
    launch(kernel, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kernel, arguments)
    arguments.a.mul_(0.5)
    arguments.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(arguments.out, arguments)


_CALL = re.compile(r"\bnvgemm_(\w+)_([0-9a-f]{12})\(")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Compile from nothing, where ATen's products are slow; where the code goes."""
    from torch._inductor.kernel import bmm, mm, mm_grouped  # noqa: F401  they name ATen's functions
    from torch._inductor.select_algorithm import extern_kernels

    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(tmp_path / "events"))
    before = {name: getattr(extern_kernels, name) for name in ATEN_GEMMS}
    slow_down_aten(DEVICE)
    code = tmp_path / "inductor"
    code.mkdir()
    with fresh_cache(dir=str(code), delete=False):
        yield code
    for name, function in before.items():
        setattr(extern_kernels, name, function)
    torch._dynamo.reset()


def in_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_of_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def interleaved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    both = functional.linear(x, weight)
    return functional.silu(both[..., ::2]) * both[..., 1::2]


def two_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = weight.chunk(2, dim=0)
    return functional.silu(functional.linear(x, gate)) * functional.linear(x, up)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "swiglu_halves": in_halves,
    "geglu_halves": gelu_of_halves,
    "swiglu_interleaved": interleaved,
    "two products": two_products,
}


@pytest.mark.parametrize(
    ("name", "lead"), list(zip(FORMS, [(512,), (4, 128), (512,), (4, 128)], strict=True))
)
def test_a_gated_mlp_joins_and_is_right(name: str, lead: tuple[int, ...], directory: Path) -> None:
    """With Triton's choices among the others, as the fusion needs; ATen's are slow."""
    function = FORMS[name]
    x = torch.randn(*lead, 2048, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(4096, 2048, device=DEVICE, dtype=torch.bfloat16) / 2048**0.5
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    compiled = torch.compile(function, fullgraph=True, options=options)
    with torch.no_grad():
        compiled(x, weight)
        result = compiled(x, weight)
        right = function(x.double(), weight.double())
        usual = (function(x, weight).double() - right).norm() / right.norm()
    assert (result.double() - right).norm() / right.norm() <= 1.1 * usual
    events = [json.loads(line) for line in directory.with_name("events").open()]
    joined = {event["gemm"] for event in events if event["event"] in ("met", "tried")}
    epilogue = name if "_" in name else "swiglu_halves"
    assert f"mm/tn/bf16xbf16/fp32/bf16/{epilogue}/m512n4096k2048" in joined


def test_a_kernel_that_wins_is_called(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is among the backends, as the fusion needs, and has no tiles to compete with."""
    from torch._inductor.kernel import mm as products

    monkeypatch.setattr(products, "use_triton_template", lambda *_, **__: False)
    x = torch.randn(512, 2048, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(4096, 2048, device=DEVICE, dtype=torch.bfloat16) / 2048**0.5
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    with torch.no_grad():
        compiled = torch.compile(in_halves, fullgraph=True, options=options)
        result = compiled(x, weight)
        right = in_halves(x.double(), weight.double())
    assert (result.double() - right).norm() / right.norm() < 4e-3
    texts = [path.read_text() for path in sorted(directory.glob("**/*.py"))]
    calls = {name for text in texts for name, _ in _CALL.findall(text)}
    assert "mm_swiglu_halves" in calls
