"""Gated products without max-autotune: fused by measurements alone, and only if the user allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.nn import functional

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import tuning_bench
from fresh_processes import Home, pip_install
from inductor_session import Compiled, InductorSession
from kernels_by_m import ONE, SQUARE, WIDE
from measured_bundles import ATEN, write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.problem import DType

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("counted_anew", "default_mode")

HALF, K = 32, 64
N = 2 * HALF

FUSED = {
    8: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    16: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    32: {SQUARE: 900, WIDE: 950, ONE: 990, ATEN: 500},
}
"""By m, nanoseconds of gated kernels, and of the separate operations as ATEN."""

PLAIN = {m: {SQUARE: 900, WIDE: 950, ONE: 990, ATEN: 500} for m in FUSED}
"""By m, nanoseconds of the product alone: ATen is the fastest."""


class Bundles:
    """Bundles of recording kernels, gated or plain, with measurements made up."""

    def __init__(self, gated: Path, plain: Path, directory: Path) -> None:
        self._built = {"gated": gated, "plain": plain}
        self._directory = directory

    def measured(self, kind: str, times: Mapping[int, Mapping[str, int]], **how: Any) -> Path:
        name = f"{kind}-{len(list(self._directory.iterdir()))}.nvgemm"
        return write_measured(self._built[kind], self._directory / name, times, **how)

    def gated(self, times: Mapping[int, Mapping[str, int]] = FUSED, **how: Any) -> Path:
        return self.measured("gated", times, **how)

    def plain(self, times: Mapping[int, Mapping[str, int]] = PLAIN, **how: Any) -> Path:
        return self.measured("plain", times, **how)


@pytest.fixture(scope="module")
def bundles(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    directory = tmp_path_factory.mktemp("measured-gates")
    directory.chmod(0o755)
    paths = []
    for name in ("swiglu_halves", None):
        epilogue = None if name is None else Epilogue.parse(name)
        signature = cpu_kernels.signature("tn", operand=DType.BF16, epilogue=epilogue)
        problems = [cpu_provider.problem_of(signature, (m, N, K)) for m in FUSED]
        paths.append(tuning_bench.build(problems, directory / str(name), kernel_cache))
    measured = directory / "measured"
    measured.mkdir(mode=0o755)
    return Bundles(*paths, measured)


@pytest.fixture
def default_mode(inductor: InductorSession) -> Iterator[None]:
    torch.manual_seed(0)
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    with config.patch(max_autotune=False, max_autotune_gemm=False):
        yield


@pytest.fixture
def fusing(default_mode: None) -> Iterator[None]:
    with config.patch(nvgemm_aot_fuse=True):
        yield


def gated(x: Tensor, w: Tensor) -> Tensor:
    """As vLLM's SiluAndMul after a Linear."""
    both = functional.linear(x, w)
    half = both.shape[-1] // 2
    return functional.silu(both[..., :half]) * both[..., half:]


def mlp(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    return functional.linear(gated(x, w), down)


def tensors(*lead: int) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16
    return torch.randn(*lead, K, dtype=dtype), torch.randn(N, K, dtype=dtype) / K**0.5


def compile_dynamic(
    inductor: InductorSession, first: int, function: Callable[..., Tensor] = gated, *more: Tensor
) -> Compiled:
    x, w = tensors(first)
    torch._dynamo.mark_dynamic(x, 0)
    return inductor.compile(function, x, w, *more, dynamic=None)


def body(compiled: Compiled) -> str:
    """The generated module, without a graph's number."""
    return compiled.code[0].partition("import torch")[2]


def assert_close(result: Tensor, *arguments: Tensor, function: Any = gated) -> None:
    exact = function(*(argument.float() for argument in arguments))
    torch.testing.assert_close(result.float(), exact, rtol=2**-6, atol=2**-6)


def test_nothing_is_fused_unless_the_user_allows_it(
    inductor: InductorSession, bundles: Bundles
) -> None:
    x, w = tensors(16)
    inductor.use()
    stock = inductor.compile(gated, x, w)
    torch._dynamo.reset()
    inductor.use(bundles.gated(), bundles.plain())
    compiled = inductor.compile(gated, x, w)
    assert compiled.launched == ()
    assert body(compiled) == body(stock)
    assert torch.equal(compiled.result, stock.result)


@pytest.mark.usefixtures("fusing")
def test_a_static_size_gets_the_kernel_that_was_measured_as_faster(
    inductor: InductorSession, bundles: Bundles, timed: list[str], met: Callable[[], list[Any]]
) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    x, w = tensors(16)
    compiled = inductor.compile(gated, x, w)
    assert compiled.launched == (WIDE,)
    assert "extern_kernels" not in compiled.code[0].partition("def call")[2]
    assert timed == []
    once = gated(x.float(), w.float()).to(x.dtype)
    torch.testing.assert_close(compiled.result, once, rtol=2**-7, atol=1e-4)
    (event,) = met()
    assert event["gemm"] == f"mm/tn/bf16xbf16/fp32/bf16/swiglu_halves/m16n{N}k{K}"
    assert event["basis"] == "declared"


@pytest.mark.usefixtures("fusing")
def test_where_fusing_was_measured_as_slower_the_code_is_stock(
    inductor: InductorSession, bundles: Bundles, events: Callable[[], list[dict[str, Any]]]
) -> None:
    x, w = tensors(32)
    inductor.use()
    stock = inductor.compile(gated, x, w)
    torch._dynamo.reset()
    inductor.use(bundles.gated(), bundles.plain())
    compiled = inductor.compile(gated, x, w)
    assert compiled.launched == ()
    assert body(compiled) == body(stock)
    (tried,) = [event for event in events() if event["event"] == "tried"]
    assert tried["gemm"].endswith(f"swiglu_halves/m32n{N}k{K}")
    assert "ATen was measured to be as fast or faster at m 32" in tried["measured"]


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("first", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_one_graph_fuses_at_some_sizes_and_not_at_others(
    inductor: InductorSession, bundles: Bundles, timed: list[str], first: int
) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = compile_dynamic(inductor, first)
        for m, operator in {2: None, 8: WIDE, 12: WIDE, 16: WIDE, 17: None, 64: None}.items():
            x, w = tensors(m)
            expected = () if operator is None else (operator,)
            assert inductor.launched(compiled.function, x, w) == expected, m
            assert_close(compiled.function(x, w), x, w)
    assert timed == []


@pytest.mark.usefixtures("fusing")
def test_sizes_that_are_not_fused_compute_as_stock_torch(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use()
    stock = compile_dynamic(inductor, 12)
    given = {m: tensors(m) for m in (2, 16, 64)}
    results = {m: stock.function(*arguments) for m, arguments in given.items()}
    torch._dynamo.reset()
    inductor.use(bundles.gated(), bundles.plain())
    compiled = compile_dynamic(inductor, 12)
    for m, arguments in given.items():
        equal = torch.equal(compiled.function(*arguments), results[m])
        assert equal is (m != 16), "fused, it rounds once"


@pytest.mark.usefixtures("fusing")
def test_a_batch_and_a_projection_behind_it(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    down = torch.randn(K, HALF, dtype=torch.bfloat16) / HALF**0.5
    x, w = tensors(2, 6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    compiled = inductor.compile(mlp, x, w, down, dynamic=None)
    assert compiled.launched == (WIDE,)
    for lead, launched in {(2, 8): (WIDE,), (3, 30): ()}.items():
        x, w = tensors(*lead)
        assert inductor.launched(compiled.function, x, w, down) == launched
        assert_close(compiled.function(x, w, down), x, w, down, function=mlp)


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    ("plain_ns", "launched"),
    [(450, (WIDE,)), (100, (SQUARE,))],
    ids=["a plain kernel gains little", "a plain kernel gains more than the gate"],
)
def test_a_gated_kernel_must_also_beat_the_bundles_own_plain_kernel(
    inductor: InductorSession, bundles: Bundles, plain_ns: int, launched: tuple[str, ...]
) -> None:
    """Separately it takes 1000 ns, 900 of them ATen's product; fused 300."""
    times = {SQUARE: plain_ns, WIDE: 950, ONE: 990, ATEN: 900}
    inductor.use(bundles.gated(), bundles.plain(dict.fromkeys(FUSED, times)))
    x, w = tensors(16)
    compiled = inductor.compile(gated, x, w)
    assert compiled.launched == launched
    assert_close(compiled.result, x, w)


def test_the_table_for_programs_is_the_one_in_generated_code(
    inductor: InductorSession, bundles: Bundles
) -> None:
    x, w = tensors(16)
    extras = ExtraOperands(gated=Epilogue.parse("swiglu_halves"))

    def text(plain_ns: int) -> str:
        times = {SQUARE: plain_ns, WIDE: 950, ONE: 990, ATEN: 900}
        inductor.use(bundles.gated(), bundles.plain(dict.fromkeys(FUSED, times)))
        return str(nvgemm_runtime.dispatch_table(x, w.t(), extras=extras))

    assert "m 8 to 16:" in text(450)
    assert "ATen 0.6 us" in text(450), "1000 ns without the 450 that the plain kernel saves"
    assert text(100).splitlines()[1] == "  m 1 and more: ATen"


@pytest.mark.usefixtures("fusing")
def test_a_plain_kernel_computes_the_sizes_that_are_not_fused(
    inductor: InductorSession, bundles: Bundles
) -> None:
    plain = {32: {SQUARE: 300, WIDE: 950, ONE: 990, ATEN: 500}}
    inductor.use(bundles.gated(), bundles.plain({**PLAIN, **plain}))
    compiled = compile_dynamic(inductor, 12)
    for m, operator in {8: WIDE, 16: WIDE, 32: SQUARE}.items():
        x, w = tensors(m)
        assert inductor.launched(compiled.function, x, w) == (operator,), m
        assert_close(compiled.function(x, w), x, w)


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    "how",
    [
        {"torch": "2.1.0"},
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ({"doubts": ("a doubt",)}, {"confirmed_by": ()})
        ),
    ],
)
def test_measurements_that_do_not_count_fuse_nothing(
    inductor: InductorSession, bundles: Bundles, how: dict[str, Any]
) -> None:
    inductor.use(bundles.gated(**how), bundles.plain())
    assert inductor.compile(gated, *tensors(16)).launched == ()


@pytest.mark.usefixtures("fusing")
def test_required_refuses_a_declared_gate_whose_measurement_does_not_count(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.gated(torch="2.1.0"), bundles.plain())
    with nvgemm_runtime.mode("required"), pytest.raises(Exception, match="swiglu_halves/m16"):
        inductor.compile(gated, *tensors(16))


@pytest.mark.usefixtures("fusing")
def test_required_accepts_what_was_measured(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    with nvgemm_runtime.mode("required"):
        assert inductor.compile(gated, *tensors(16)).launched == (WIDE,)
        torch._dynamo.reset()
        assert inductor.compile(gated, *tensors(32)).launched == ()


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("emulate_precision_casts", True),
        ("nvgemm_aot_mode", "off"),
        pytest.param("cpp_wrapper", True, marks=pytest.mark.slow),
    ],
)
def test_other_settings_keep_the_roundings(
    inductor: InductorSession, bundles: Bundles, name: str, value: object
) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    with config.patch({name: value}):
        assert inductor.compile(gated, *tensors(16)).launched == ()


@pytest.mark.usefixtures("fusing")
def test_deterministic_mode_fuses(inductor: InductorSession, bundles: Bundles) -> None:
    """Nothing is timed."""
    inductor.use(bundles.gated(), bundles.plain())
    with config.patch(deterministic=True):
        assert inductor.compile(gated, *tensors(16)).launched == (WIDE,)


def adapted(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """As an adapter (LoRA) that adds to the product."""
    both = functional.linear(x, w) + functional.linear(functional.linear(x, down), up)
    gate, up_part = both.chunk(2, dim=-1)
    return functional.silu(gate) * up_part


def used_twice(x: Tensor, w: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    both = functional.linear(x, w)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up, both


def another_activation(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def up_before_gate(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    up, gate = functional.linear(x, w).chunk(2, dim=-1)
    return functional.silu(gate) * up


def normalized(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return functional.rms_norm(gated(x, w), (HALF,))


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    "function",
    [
        another_activation,
        up_before_gate,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (adapted, used_twice, normalized)),
    ],
)
def test_other_graphs_are_not_fused(
    inductor: InductorSession, bundles: Bundles, function: Callable[..., Any]
) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    x, w = tensors(16)
    down, up = torch.randn(4, K, dtype=x.dtype), torch.randn(N, 4, dtype=x.dtype)
    compiled = inductor.compile(function, x, w, down, up)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]


def test_the_setting_is_part_of_keys_for_caches(inductor: InductorSession) -> None:
    """Torch's keys hash its portable options, and so do programs such as vLLM."""
    inductor.use()
    keys = []
    for allowed in (False, True):
        with config.patch(nvgemm_aot_fuse=allowed):
            keys.append((str(config.save_config_portable()), config.get_hash()))
    assert all(first != second for first, second in zip(*keys))


def test_a_cached_graph_serves_only_the_setting_that_it_was_compiled_with(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    x, w = tensors(16)
    launched = []
    for allowed in (False, True, False, True):
        torch._dynamo.reset()
        with config.patch(nvgemm_aot_fuse=allowed, fx_graph_cache=True):
            launched.append(inductor.compile(gated, x, w).launched)
    assert launched == [(), (WIDE,)] * 2


def test_the_option_allows_one_compilation(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    x, w = tensors(16)
    compiled = inductor.compile(gated, x, w, options={"nvgemm_aot_fuse": True})
    assert compiled.launched == (WIDE,)
    torch._dynamo.reset()
    assert inductor.compile(gated, x, w, options={"nvgemm_aot_fuse": False}).launched == ()


PROGRAM = """
from torch._inductor.utils import run_and_get_code
torch.manual_seed(0)
x = torch.randn(12, 64).bfloat16()
w = torch.randn(64, 64).bfloat16()
torch._dynamo.mark_dynamic(x, 0)

def gated(x, w):
    both = torch.nn.functional.linear(x, w)
    return torch.nn.functional.silu(both[..., :32]) * both[..., 32:]

compiled = torch.compile(gated)
result, (code,) = run_and_get_code(compiled, x, w)
calls = sorted(line for line in code.splitlines() if line.startswith("nvgemm_mm_by_m"))
seen = [repr(calls), torch._inductor.config.nvgemm_aot_key, repr(result.float().sum().item())]
print("seen=" + " ".join(seen), file=sys.stderr)
"""
"""What a process of a job compiles; the digest of its choices is in the name of the call."""


@pytest.mark.slow
def test_processes_with_the_variable_choose_alike_and_others_do_not_fuse(
    bundles: Bundles, tmp_path: Path
) -> None:
    site = pip_install(bundles.gated(), "1.0", tmp_path / "site")

    def run(name: str, value: str | None) -> tuple[list[str], str]:
        variables = {} if value is None else {"NVGEMM_AOT_FUSE": value}
        home = Home(tmp_path / name)
        ran = home.run(site, compiles=False, after=PROGRAM, variables=variables)
        (seen,) = [line for line in ran.said.splitlines() if line.startswith("seen=")]
        return ran.launched, seen

    first, second = run("first", "1"), run("second", "1")
    assert first == second
    assert first[0] == [WIDE]
    assert "nvgemm_mm_by_m" in first[1]
    for name, value in (("unset", None), ("zero", "0")):
        launched, seen = run(name, value)
        assert launched == []
        assert "nvgemm_mm_by_m" not in seen


@pytest.mark.slow
def test_a_value_that_is_none_is_said_and_counts_as_not_set(tmp_path: Path) -> None:
    code = "print(f'fuse={torch._inductor.config.nvgemm_aot_fuse}', file=sys.stderr)"
    code = f"import torch._inductor.select_algorithm\n{code}"
    ran = Home(tmp_path / "home").run(
        compiles=False, after=code, variables={"NVGEMM_AOT_FUSE": "yes"}
    )
    assert ran.count("fuse=False") == 1
    assert ran.count("NVGEMM_AOT_FUSE=yes: allowed are 0, 1; taken as 0") == 1


@pytest.mark.usefixtures("fusing")
def test_a_weight_in_another_layout_is_not_fused(
    inductor: InductorSession, bundles: Bundles
) -> None:
    """A weight that is not [n, k] in memory has another signature, which no kernel has."""
    inductor.use(bundles.gated(), bundles.plain())
    x, w = tensors(16)
    transposed = w.t().contiguous().t()
    assert inductor.compile(gated, x, transposed).launched == ()


@pytest.mark.usefixtures("fusing")
def test_where_the_plain_kernel_was_not_measured_nothing_is_fused(
    inductor: InductorSession, bundles: Bundles
) -> None:
    """It runs at m 16, between two measured sizes, and its gain there is unknown."""
    times = {SQUARE: 450, WIDE: 950, ONE: 990, ATEN: 500}
    inductor.use(bundles.gated(), bundles.plain({8: times, 32: times}))
    x, w = tensors(16)
    assert inductor.compile(gated, x, w).launched == (SQUARE,)
    table = nvgemm_runtime.dispatch_table(
        x, w.t(), extras=ExtraOperands(gated=Epilogue.parse("swiglu_halves"))
    )
    assert "not used at m 16: a kernel computes the product alone at this m" in str(table)


@pytest.mark.usefixtures("fusing")
def test_scaled_products_are_not_fused(inductor: InductorSession, bundles: Bundles) -> None:
    """As those of quantized weights."""

    def scaled(x: Tensor, w: Tensor, one: Tensor) -> Tensor:
        both = torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up

    inductor.use(bundles.gated(), bundles.plain())
    x, w = (tensor.to(torch.float8_e4m3fn) for tensor in tensors(16))
    compiled = inductor.compile(scaled, x, w, torch.ones(()))
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]


def stack(x: Tensor, first: Tensor, down: Tensor, second: Tensor) -> Tensor:
    return gated(mlp(x, first, down), second)


@pytest.mark.usefixtures("fusing")
def test_two_layers_in_one_graph(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.gated(), bundles.plain())
    down = torch.randn(K, HALF, dtype=torch.bfloat16) / HALF**0.5
    x, first = tensors(12)
    _, second = tensors(12)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = inductor.compile(stack, x, first, down, second, dynamic=None)
    for m, launched in {12: (WIDE, WIDE), 40: ()}.items():
        x, _ = tensors(m)
        arguments = (x, first, down, second)
        assert inductor.launched(compiled.function, *arguments) == launched
        assert_close(compiled.function(*arguments), *arguments, function=stack)
