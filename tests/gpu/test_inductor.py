"""torch.compile in this process: the choices really win, and really run.

ATen is slowed down where Inductor times it, so that a bundled kernel wins whenever one is offered.
Needs kernels for bf16 in the layouts tn, tt and nt and for batches in tn, and for fp16 in tn:
manifests/quickstart.yaml and manifests/llama-3.1-8b.yaml, built for the GPU.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_code import aten_calls, bundled_calls, modules
from torch import nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from user_program import ATEN_GEMMS, ERROR_FACTOR, GatedMlp, relative_error, slow_down_aten

from nvgemm_runtime.bundle.format import Kernel

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(
    os.environ.get("NVGEMM_AOT") == "off", reason="NVGEMM_AOT=off keeps the plug-in out"
)


@pytest.fixture
def cache(tmp_path: Path, kernels: dict[str, Kernel]) -> Iterator[Path]:
    """Compile in this process from nothing, over ATen and bundled kernels; where code goes."""
    directory = tmp_path / "inductor"
    directory.mkdir()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with (
        fresh_cache(dir=str(directory), delete=False),
        config.patch(max_autotune_gemm_backends="ATEN"),
    ):
        yield directory
    torch._dynamo.reset()


@pytest.fixture
def slow_aten() -> Iterator[None]:
    """Bundled kernels win wherever they are offered."""
    from torch._inductor.kernel import bmm, mm, mm_grouped  # noqa: F401  they name ATen's functions
    from torch._inductor.select_algorithm import extern_kernels

    before = {name: getattr(extern_kernels, name) for name in ATEN_GEMMS}
    slow_down_aten(DEVICE)
    yield
    for name, function in before.items():
        setattr(extern_kernels, name, function)


def compiled(function: Any, mode: str | None = None, dynamic: bool | None = None) -> Any:
    """Compile; without a mode as quickly as GEMMs can be chosen."""
    options = {"max_autotune_gemm": True} if mode is None else None
    return torch.compile(function, fullgraph=True, mode=mode, options=options, dynamic=dynamic)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def gemms_by_aten(call: Callable[[], Any]) -> int:
    """How many GEMMs ATen computes in a call: those of bundled kernels are none of its."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    gemms = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
    return sum(event.count for event in profile.key_averages() if event.key in gemms)


def exact(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]


def assert_like_eager(
    result: torch.Tensor, function: Callable[..., torch.Tensor], *operands: torch.Tensor
) -> None:
    """Not further from fp32 than eager is."""
    right = function(*exact(*operands))
    usual = relative_error(function(*operands), right)
    assert relative_error(result, right) <= ERROR_FACTOR * usual + 1e-4
    assert result.dtype == operands[0].dtype


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight.T)


@pytest.mark.usefixtures("slow_aten")
def test_generated_code_calls_a_kernel_by_its_id(cache: Path, kernels: dict[str, Kernel]) -> None:
    x, weight = random(64, 4096), random(6144, 4096)
    run = compiled(linear)
    with torch.no_grad():
        assert_like_eager(run(x, weight), linear, x, weight)
        assert gemms_by_aten(lambda: run(x, weight)) == 0
    (text,) = modules(cache)
    (call,) = bundled_calls(cache)
    assert kernels[call].id in text
    assert "from nvgemm_runtime" in text
    assert not aten_calls(cache)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], str]] = {
    "linear": (lambda x, w: x @ w.T, ((256, 1024), (512, 1024)), "mm/tn"),
    "row-major": (lambda x, w: x @ w, ((256, 1024), (1024, 512)), "mm/tt"),
    "weight gradient": (lambda x, w: x.T @ w, ((256, 1024), (256, 512)), "mm/nt"),
    "batched": (lambda q, k: torch.bmm(q, k.mT), ((4, 256, 128), (4, 512, 128)), "bmm/tn"),
    "columns of a wider matrix": (
        lambda x, w: x[:, 64:1088] @ w.T, ((256, 2048), (512, 1024)), "mm/tn",
    ),
    "every other row": (lambda x, w: x[::2] @ w.T, ((512, 1024), (512, 1024)), "mm/tn"),
    "half of a weight": (lambda x, w: x @ w[512:].T, ((256, 1024), (1024, 1024)), "mm/tn"),
    "computed operand": (
        lambda x, w: torch.relu(x) @ (w * 2).T, ((256, 1024), (512, 1024)), "mm/tn",
    ),
    "three dimensions": (lambda x, w: x @ w.T, ((2, 128, 1024), (512, 1024)), "mm/tn"),
    "heads out of a projection": (
        lambda x, k: torch.bmm(x.view(256, 8, 128).transpose(0, 1), k.mT),
        ((256, 1024), (8, 512, 128)), "bmm/tn",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("slow_aten")
@pytest.mark.parametrize("name", CASES)
def test_views_and_layouts(name: str, cache: Path, kernels: dict[str, Kernel]) -> None:
    function, shapes, layout = CASES[name]
    run = compiled(function)
    with torch.no_grad():
        for _ in range(2):
            operands = [random(*shape) for shape in shapes]
            assert_like_eager(run(*operands), function, *operands)
        assert gemms_by_aten(lambda: run(*operands)) == 0
    (call,) = bundled_calls(cache)
    assert kernels[call].signature.key.startswith(f"{layout}/bf16")


def unaligned(rows: int, columns: int) -> torch.Tensor:
    """A matrix that starts 2 bytes behind an aligned address."""
    return random(rows * columns + 8)[1 : rows * columns + 1].view(rows, columns)


@pytest.mark.usefixtures("slow_aten")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_wider_than_its_operands(
    dtype: torch.dtype, cache: Path, kernels: dict[str, Kernel]
) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    key = f"mm/tn/{name}x{name}/fp32/fp32"
    if all(kernel.signature.key != key for kernel in kernels.values()):
        pytest.skip(f"no installed kernel for {key}; install the wheel of every_kind.yaml")
    x, weight = random(96, 512, dtype=dtype), random(512, 512, dtype=dtype)
    with torch.no_grad():
        result = compiled(lambda x, w: torch.mm(x, w.T, out_dtype=torch.float32))(x, weight)
    assert result.dtype == torch.float32
    assert relative_error(result, x.float() @ weight.float().T) < 1e-4
    assert [kernels[call].signature.key for call in bundled_calls(cache)] == [key]
    assert not aten_calls(cache)


@pytest.mark.usefixtures("slow_aten")
@pytest.mark.parametrize("first", [random, unaligned], ids=["aligned first", "unaligned first"])
@pytest.mark.parametrize("where", ["input", "weight"])
def test_unaligned_inputs_come_out_right(
    first: Callable[[int, int], torch.Tensor], where: str, cache: Path
) -> None:
    run = compiled(linear)
    with torch.no_grad():
        for make in (first, unaligned, random, unaligned):
            x = make(256, 1024) if where == "input" else random(256, 1024)
            weight = make(512, 1024) if where == "weight" else random(512, 1024)
            assert_like_eager(run(x, weight), linear, x, weight)


@pytest.mark.usefixtures("slow_aten", "cache")
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_views_that_start_anywhere_come_out_right(offset: int) -> None:
    def window(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x[:, offset : offset + 512] @ weight.T

    x, weight = random(256, 1024), random(512, 512)
    with torch.no_grad():
        assert_like_eager(compiled(window)(x, weight), window, x, weight)


@pytest.mark.usefixtures("slow_aten")
def test_training_has_a_kernel_for_each_gemm(cache: Path, kernels: dict[str, Kernel]) -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.T).square().sum()

    def gradients(function: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [operand.detach().requires_grad_() for operand in operands]
        return torch.autograd.grad(function(*leaves), leaves)

    x, weight = random(256, 1024), random(512, 1024, scale=0.03)
    run = compiled(loss)
    results = gradients(run, x, weight)
    right, usual = gradients(loss, *exact(x, weight)), gradients(loss, x, weight)
    for result, precise, eager in zip(results, right, usual):
        bound = ERROR_FACTOR * relative_error(eager, precise) + 1e-4
        assert relative_error(result, precise) <= bound
    layouts = sorted(kernels[call].signature.layout.value for call in bundled_calls(cache))
    assert layouts == ["nt", "tn", "tt"]
    assert not aten_calls(cache)
    assert gemms_by_aten(lambda: gradients(run, x, weight)) == 0


@pytest.mark.usefixtures("slow_aten")
def test_autocast(cache: Path) -> None:
    model = GatedMlp(1024, 2048).to(DEVICE)

    def run(function: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            return function(x)

    x = random(256, 1024, dtype=torch.float32)
    result = run(compiled(model), x)
    with torch.no_grad():
        right = model(x)
    assert relative_error(result, right) <= ERROR_FACTOR * relative_error(run(model, x), right)
    assert result.dtype == torch.bfloat16
    assert len(bundled_calls(cache)) == 2


@pytest.mark.usefixtures("slow_aten", "cache")
def test_many_threads_call_one_compiled_function() -> None:
    weight = random(512, 1024)
    run = compiled(linear)
    inputs = [random(256, 1024) for _ in range(16)]
    with torch.no_grad():
        expected = [run(x, weight).clone() for x in inputs]
    barrier, failures = threading.Barrier(len(inputs)), []

    def work(x: torch.Tensor, right: torch.Tensor) -> None:
        stream = torch.cuda.Stream() if DEVICE == "cuda" else None
        barrier.wait()
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(50):
                    result = run(x, weight)
                if stream is not None:
                    stream.synchronize()
                assert torch.equal(result, right)
        except BaseException as error:
            failures.append(error)

    if DEVICE == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.usefixtures("slow_aten")
@pytest.mark.parametrize("dynamic", [None, True], ids=["m is free", "everything is free"])
def test_a_change_of_m_compiles_nothing(dynamic: bool | None, cache: Path) -> None:
    weight = random(512, 1024)
    run = compiled(linear, dynamic=dynamic)
    with torch.no_grad():
        for m in (16, 33, 48, 7, 1000):
            x = random(m, 1024)
            torch._dynamo.mark_dynamic(x, 0)  # an error where anything fixes m
            assert_like_eager(run(x, weight), linear, x, weight)
            assert gemms_by_aten(lambda x=x: run(x, weight)) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(bundled_calls(cache)) == 1


@pytest.mark.usefixtures("slow_aten")
def test_choices_survive_autotuning_in_a_subprocess(cache: Path) -> None:
    x, weight = random(256, 1024), random(512, 1024)
    with torch.no_grad(), config.patch(autotune_in_subproc=True):
        assert_like_eager(compiled(linear)(x, weight), linear, x, weight)
    assert bundled_calls(cache)


@pytest.mark.usefixtures("slow_aten")
def test_a_user_captures_compiled_code_in_a_graph(cache: Path) -> None:
    x, weight = random(256, 1024), random(512, 1024)
    run = compiled(linear)
    with torch.no_grad():
        run(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(x, weight)
        for _ in range(3):
            x.copy_(random(256, 1024))
            result.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert_like_eager(result, linear, x, weight)
    assert bundled_calls(cache)


@pytest.mark.usefixtures("slow_aten", "cache")
def test_two_streams_use_one_compiled_function() -> None:
    x, weight = random(256, 1024), random(512, 1024)
    run = compiled(linear)
    with torch.no_grad():
        run(x, weight)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            x.zero_()  # seen only by what runs behind it on this stream
            result = run(x, weight)
        stream.synchronize()
    assert not result.any()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_whatever_wins_is_right(dtype: torch.dtype) -> None:
    """Nothing slowed down, CUDA graphs, biases, and sizes that fit no kernel."""
    for hidden in (1024, 513):
        model = nn.Sequential(nn.Linear(hidden, 512), nn.GELU(), nn.Linear(512, hidden)).to(DEVICE)
        typed = copy.deepcopy(model).to(dtype)
        run = compiled(typed, mode="max-autotune")
        with torch.no_grad():
            for _ in range(4):
                x = random(128, hidden, dtype=dtype)
                right = copy.deepcopy(typed).float()(x.float())
                bound = ERROR_FACTOR * relative_error(typed(x), right) + 1e-4
                assert relative_error(run(x), right) <= bound
