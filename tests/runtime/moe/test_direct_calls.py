"""Where products and sums are operators that others see, and where what those run is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from expert_kernels import Installed, assert_same, gradients, operands_for_kernels
from nvgemm_runtime.errors import SettingError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS
from nvgemm_runtime.moe import experts, products, sort_by_expert
from nvgemm_runtime.moe.kernels import grouped_operands, launch
from nvgemm_runtime.moe.operators import is_direct, is_watched
from nvgemm_runtime.moe.routing import gathered_rows

pytestmark = pytest.mark.usefixtures("new_process")

NAMESPACE = "nvgemm_moe::"
OPERANDS = {
    "rows": ("a", "b", "ends", "bias"),
    "added_rows": ("a", "b", "ends", "other", "b"),
    "columns": ("a", "other", "ends"),
    "gathered_rows": ("a", "numbers", "weights"),
}
"""The operands of each function, by their names in `operands`."""

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "rows": products.rows,
    "added_rows": products.added_rows,
    "columns": products.columns,
    "gathered_rows": gathered_rows,
}
PLACES = [(name, place) for name, given in OPERANDS.items() for place in range(len(given))]

each = pytest.mark.parametrize("name", FUNCTIONS)
each_operand = pytest.mark.parametrize(("name", "place"), PLACES)


def operands(name: str) -> list[torch.Tensor]:
    """Operands of a function, of sizes that kernels serve, at addresses that one lookup serves."""
    torch.manual_seed(0)
    made = {
        "a": torch.randn(18, 32).bfloat16(),
        "other": torch.randn(18, 32).bfloat16(),
        "b": torch.randn(4, 32, 32).bfloat16(),
        "bias": torch.randn(4, 32).bfloat16(),
        "ends": torch.tensor([5, 5, 6, 18], dtype=torch.int32),
        "numbers": torch.randint(18, (9, 3), dtype=torch.int32),
        "weights": torch.rand(9, 3),
    }
    return [aligned(made[one]) for one in OPERANDS[name]]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at a multiple of 128 bytes, as the null address of tensors without memory is."""
    memory = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 128
    copy = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def install_all(install: Callable[..., Installed]) -> Installed:
    return install("tn tt", None, BIAS, ADD, gathered=True)


class Recorder(TorchDispatchMode):
    """Keeps the names of the package's operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator.name().startswith(NAMESPACE):
            self.names.append(operator.name().removeprefix(NAMESPACE))
        return operator(*args, **(kwargs or {}))


def dispatched(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and the package's operators among those that torch dispatched for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = call()
    names = [event.name for event in profile.events()]
    assert any(name.startswith("aten::") for name in names), "or nothing was recorded"
    ours = [name.removeprefix(NAMESPACE) for name in names if name.startswith(NAMESPACE)]
    return found, ours


@each
def test_a_dispatch_mode_sees_the_operator_and_nothing_is_dispatched_without(
    name: str, install: Callable[..., Installed]
) -> None:
    installed = install_all(install)
    given = operands(name)
    with Recorder() as recorder:
        assert not is_direct(*given)
        seen = FUNCTIONS[name](*given)
    assert recorder.names == [name]
    under_mode = [*installed.launched]
    installed.launched.clear()
    assert is_direct(*given)
    found, names = dispatched(lambda: FUNCTIONS[name](*given))
    assert names == []
    assert installed.launched == under_mode
    assert torch.equal(found, seen)
    operator = getattr(torch.ops.nvgemm_moe, name)
    assert dispatched(lambda: operator(*given))[1] == [name], "which the profiler would have seen"


def routed_operands() -> dict[str, Any]:
    """Operands of `experts` from tokens to tokens, each of which two experts have."""
    made = operands_for_kernels("down_bias")
    routing = sort_by_expert(torch.tensor([[0, 1], [3, 0], [1, 3]] * 3), 4)
    del made["counts"]
    return {
        **made,
        "x": made["x"].detach()[:9].clone().requires_grad_(),
        "offsets": routing.offsets,
        "indices": routing.indices,
        "token_rows": routing.token_rows,
        "routing_weights": (torch.rand(18) + 0.5).requires_grad_(),
        "combine": True,
    }


def test_a_dispatch_mode_sees_the_operators_of_experts(install: Callable[..., Installed]) -> None:
    """Forward and backward; without one, nothing is dispatched, and the same is computed."""
    install_all(install)
    made = routed_operands()
    with Recorder() as recorder:
        seen = gradients(experts, made)
    assert {*recorder.names} == {"rows", "columns", "gathered_rows"}
    found, names = dispatched(lambda: gradients(experts, made))
    assert names == []
    assert_same(found, seen, 0.0)


@each_operand
def test_a_negated_view_gives_what_its_values_give(
    name: str, place: int, install: Callable[..., Installed]
) -> None:
    """Its memory has the other sign, which a kernel would read."""
    installed = install_all(install)
    given = operands(name)
    expected = FUNCTIONS[name](*given)
    launched = len(installed.launched)
    assert bool(launched) is (name != "columns"), "which no kernel for the CPU computes"
    given[place] = torch._neg_view(-given[place])
    assert given[place].is_neg()
    assert not is_watched(*given)
    assert not is_direct(*given)
    assert torch.equal(FUNCTIONS[name](*given), expected)
    assert len(installed.launched) == 2 * launched


class Following(torch.Tensor):
    """A tensor that keeps the names of the functions it is given to."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.names.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


@each_operand
def test_a_subclass_sees_the_operator(
    name: str, place: int, install: Callable[..., Installed]
) -> None:
    install_all(install)
    given = operands(name)
    expected = FUNCTIONS[name](*given)
    given[place] = given[place].as_subclass(Following)
    assert is_watched(*given)
    assert not is_direct(*given)
    Following.names.clear()
    found = FUNCTIONS[name](*given)
    assert f"nvgemm_moe.{name}" in Following.names
    assert isinstance(found, Following)
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


def test_plain_tensors_and_parameters_are_not_watched() -> None:
    plain = torch.ones(2)
    assert not is_watched(plain, None, torch.nn.Parameter(plain))
    assert is_watched(plain, None, plain.to("meta"))


@each
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_a_trace_holds_the_operator(name: str, install: Callable[..., Installed]) -> None:
    """And so computes other values than those that it was traced with."""
    install_all(install)
    given = operands(name)

    def function(*given: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS[name](*given)

    traced = torch.jit.trace(function, tuple(given))
    kinds = [node.kind() for node in traced.graph.nodes()]
    assert kinds.count(f"{NAMESPACE}{name}") == 1
    assert not any(kind.startswith("aten::") for kind in kinds)
    given[0] = -2 * given[0]
    assert torch.equal(traced(*given), FUNCTIONS[name](*given))


@each
def test_a_graph_of_make_fx_before_dispatch_holds_the_operator(
    name: str, install: Callable[..., Installed]
) -> None:
    install_all(install)
    given = operands(name)
    traced = make_fx(FUNCTIONS[name], pre_dispatch=True)(*given)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert calls == [f"{NAMESPACE[:-2]}.{name}.default"]
    given[0] = -2 * given[0]
    assert torch.equal(traced(*given), FUNCTIONS[name](*given))


@pytest.mark.parametrize("before_dispatch", [False, True])
def test_a_graph_of_experts_holds_their_products(
    before_dispatch: bool, install: Callable[..., Installed]
) -> None:
    install_all(install)
    made = {name: one.detach() for name, one in operands_for_kernels().items()}
    x = made.pop("x")
    traced = make_fx(lambda rows: experts(rows, **made), pre_dispatch=before_dispatch)(x)
    calls = [str(node.target) for node in traced.graph.nodes]
    assert calls.count("nvgemm_moe.rows.default") == 2
    assert torch.equal(traced(-2 * x), experts(-2 * x, **made))


@each_operand
def test_an_operand_without_memory_is_not_launched_where_a_kernel_was_found(
    name: str, place: int, install: Callable[..., Installed]
) -> None:
    installed = install_all(install)
    given = operands(name)
    FUNCTIONS[name](*given)
    installed.launched.clear()
    given[place] = given[place].to("meta")
    assert not is_direct(*given)
    FUNCTIONS[name](*given)
    assert not installed.launched


@pytest.mark.parametrize("place", range(5))
def test_a_kernel_that_was_found_refuses_an_operand_on_another_device(
    place: int, install: Callable[..., Installed]
) -> None:
    """Where no operator stands between: kernels are found by the device of one operand."""
    install_all(install)
    given = [torch.zeros(18, 32).bfloat16(), *operands("rows")]
    out = given[0] = aligned(given[0])
    assert not launch(*grouped_operands(*given, None))
    assert out.any()
    out.zero_()
    given[place] = given[place].to("meta")
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        launch(*grouped_operands(*given, None))
    assert not out.any()


@each
def test_a_misspelt_mode_ends_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "requird")
    with pytest.raises(SettingError, match="NVGEMM_AOT=requird: allowed are"):
        FUNCTIONS[name](*operands(name))
