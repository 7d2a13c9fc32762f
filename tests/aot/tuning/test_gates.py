"""Checks of gated kernels: the right results pass, and what kernels get wrong does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nvgemm_aot.tuning.contenders import aten_run, triton_run
from nvgemm_aot.tuning.correctness import judgement as correctness
from nvgemm_aot.tuning.correctness.exact_operands import (
    FEW_PRODUCTS,
    WHOLE_NUMBERS,
    OperandCheck,
    make_checks,
)
from nvgemm_aot.tuning.correctness.gate_results import pairs, stored, stored_error
from nvgemm_aot.tuning.correctness.judgement import agrees_roughly, find_fault, reference
from nvgemm_aot.tuning.correctness.random_operands import make_sets
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, GateForm, find_gated
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.moe.activations import GatedActivation


def named(form: GateForm) -> list[str]:
    return [epilogue.name for epilogue in ALL_EPILOGUES if epilogue.form is form]


GATED, KEPT, GRADIENTS, SUMMED, UPS = map(named, GateForm)


def problem(name: str, out: str = "bf16", k: int = 512) -> Problem:
    return Problem.parse(f"mm/tn/bf16xbf16/fp32/{out}/{name}/m24n64k{k}")


def checks(posed: Problem) -> list[OperandCheck]:
    return make_checks(posed, "cpu", seed=1)


def product(check: OperandCheck) -> torch.Tensor:
    a, b, _, *extras = check.operands
    value = a.double() @ b.double()
    return value + extras[0].double() if extras else value


@pytest.mark.parametrize("out", ["bf16", "fp16"])
@pytest.mark.parametrize("name", GATED)
def test_a_correctly_rounded_result_is_right(name: str, out: str) -> None:
    posed = problem(name, out)
    found = checks(posed)
    assert [check.name for check in found] == [WHOLE_NUMBERS, FEW_PRODUCTS]
    for check in found:
        assert check.operands[2].shape == (24, 32)
        right = reference(check.operands, posed.signature).to(check.operands[2].dtype)
        assert find_fault(right, check.expected) is None


@pytest.mark.parametrize("name", [*GATED, "bias"])
def test_groups_add_their_own_rows_and_join_pairs(name: str) -> None:
    posed = Problem.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16/{name}/g3m24n64k512")
    for check in checks(posed):
        a, b, out, offsets, *added = check.operands
        right, begin = reference(check.operands, posed.signature), 0
        assert find_fault(right.to(out.dtype), check.expected) is None
        plain = Signature.parse(f"mm/tn/bf16xbf16/fp32/bf16/{name}")
        for group, end in enumerate(offsets.tolist()):
            of_group = (a[begin:end], b[group], out, *(one[group] for one in added))
            torch.testing.assert_close(
                right[begin:end], reference(of_group, plain), equal_nan=True, rtol=1e-12, atol=1e-12
            )
            begin = end
        if added:
            others = (a, b, out, offsets, added[0].roll(1, 0))
            mixed_up = reference(others, posed.signature).to(out.dtype)
            assert find_fault(mixed_up, check.expected) is not None


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


Wrong = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WRONG: dict[str, tuple[str, Wrong]] = {
    "no activation": ("swiglu_halves", lambda g, u: g * u),
    "gate and up exchanged": ("swiglu_interleaved", lambda g, u: g * silu(u)),
    "another activation": ("geglu_halves", lambda g, u: silu(g) * u),
    "no limit of ups": (
        "swiglu_oai_halves",
        lambda g, u: g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)) * (u + 1),
    ),
    "no limit of gates": (
        "swiglu_oai_halves",
        lambda g, u: g * torch.sigmoid(1.702 * g) * (u.clamp(-7, 7) + 1),
    ),
    "gates limited below": (
        "swiglu_oai_interleaved",
        lambda g, u: silu(1.702 * g.clamp(-1, 7)) / 1.702 * (u.clamp(-7, 7) + 1),
    ),
    "no alpha": (
        "swiglu_oai_interleaved", lambda g, u: silu(g.clamp(max=7)) * (u.clamp(-7, 7) + 1)
    ),
    "nothing added to ups": (
        "swiglu_oai_interleaved",
        lambda g, u: silu(1.702 * g.clamp(max=7)) / 1.702 * u.clamp(-7, 7),
    ),
    "rounded in between": (
        "swiglu_halves", lambda g, u: silu(g.bfloat16().double()) * u.bfloat16().double()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_kernels_get_wrong_is_noticed(name: str) -> None:
    epilogue, wrong = WRONG[name]
    posed = problem(epilogue)
    faults = []
    for check in checks(posed):
        gates, ups = pairs(product(check), posed.signature)
        faults.append(find_fault(wrong(gates, ups).bfloat16(), check.expected))
    assert any(fault is not None for fault in faults)


@pytest.mark.parametrize("name", GATED)
def test_the_other_order_of_columns_is_noticed(name: str) -> None:
    posed = problem(name)
    other = name.replace("halves", "X").replace("interleaved", "halves").replace("X", "interleaved")
    for check in checks(posed):
        result = reference(check.operands, problem(other).signature).bfloat16()
        assert find_fault(result, check.expected) is not None


@pytest.mark.parametrize("name", GATED)
def test_a_dropped_nan_is_noticed(name: str) -> None:
    posed = problem(name)
    (_, check) = checks(posed)
    right = reference(check.operands, posed.signature).bfloat16()
    assert right.isnan().any()
    assert find_fault(right.nan_to_num(), check.expected) is not None


def test_sets_to_time_have_half_the_columns_and_the_bias_all() -> None:
    posed = problem("swiglu_oai_halves")
    a, b, out, bias = make_sets(posed, "cpu", seed=0, total_bytes=1)[0]
    assert (a.shape, b.shape, out.shape) == ((24, 512), (512, 64), (24, 32))
    assert bias.shape == (64,)


@pytest.mark.parametrize("name", [*GATED, *KEPT, *GRADIENTS, *SUMMED, *UPS])
def test_torch_has_nothing_for_groups_to_race_with(name: str) -> None:
    signature = grouped(name).signature
    assert aten_run(signature) is None
    assert triton_run(signature) is None


@pytest.mark.parametrize(
    "name", [GATED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in GATED[1:])]
)
def test_a_gated_product_races_with_what_torch_compile_runs_unfused(name: str) -> None:
    posed = problem(name)
    run = aten_run(posed.signature)
    assert run is not None
    assert triton_run(posed.signature) is None
    *_, check = checks(posed)
    result, twice = run(*check.operands), rounded_twice(check, posed.signature)
    assert agrees_roughly(result, check.expected)
    assert not agrees_roughly(result * 1.2, check.expected)
    torch.testing.assert_close(result, twice, equal_nan=True, rtol=2**-8, atol=2**-8)


def rounded_twice(check: OperandCheck, signature: Signature) -> torch.Tensor:
    """A gated product that rounds the product and the result, as Inductor's kernels do."""
    assert signature.epilogue is not None
    gate = signature.epilogue.gate
    assert gate is not None
    activation = GatedActivation(kind=gate, alpha=gate.row.alpha, limit=gate.row.limit or 0.0)
    gates, ups = pairs(product(check).to(check.operands[2].dtype).double(), signature)
    return activation.apply(gates, ups).to(check.operands[2].dtype)


@pytest.mark.parametrize("key", ["bmm/tn/bf16xbf16/fp32/bf16", "mm/tn/bf16xbf16/fp32/fp32"])
def test_other_gated_products_have_nothing_to_race_with(key: str) -> None:
    signature = replace(Signature.parse(key), epilogue=problem("swiglu_halves").signature.epilogue)
    assert aten_run(signature) is None


def grouped(name: str, out: str = "bf16") -> Problem:
    layout = "tt" if name in GRADIENTS + SUMMED else "tn"
    return Problem.parse(f"grouped_mm/{layout}/{out}x{out}/fp32/{out}/{name}/g3m24n64k512")


@pytest.mark.parametrize("name", KEPT + GRADIENTS + SUMMED + UPS)
def test_sets_to_time_have_the_shapes_of_the_form(name: str) -> None:
    a, b, out, offsets, *added = make_sets(grouped(name), "cpu", seed=0, total_bytes=1)[0]
    assert (a.shape, b.shape, offsets.tolist()) == ((24, 512), (3, 512, 64), [8, 16, 24])
    if name in GRADIENTS + SUMMED:
        assert (out.shape, added[0].shape) == ((24, 128), (24, 128))
        sums = added[1:]
        assert [one.shape for one in sums] == [(24, 1)] * (name in SUMMED)
        assert not any(one.any() for one in sums)
    elif name in UPS:
        assert (out.shape, added[0].shape) == ((24, 128), (24, 64))
    else:
        assert out.shape == (24, 96)
        assert [one.shape for one in added] == [(3, 64)] * ("oai" in name)


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_product_stands_before_what_the_gate_gives(name: str) -> None:
    posed = grouped(name)
    gate = grouped(name.removesuffix("_kept")).signature
    for check in checks(posed):
        a, b, out, offsets, *added = check.operands
        assert out.shape == (24, 96)
        right = reference(check.operands, posed.signature)
        joined = reference((a, b, out, offsets, *added), gate)
        torch.testing.assert_close(right[:, 64:], joined, equal_nan=True, rtol=0, atol=0)
        first = a[: offsets[0]].double() @ b[0].double()
        first = first + added[0][0].double() if added else first
        torch.testing.assert_close(right[: offsets[0], :64], first, equal_nan=True)
        assert find_fault(right.to(out.dtype), check.expected) is None
        swapped = torch.cat((right[:, 32:], right[:, :32]), -1).to(out.dtype)
        assert find_fault(swapped, check.expected) is not None


@pytest.mark.parametrize("out", ["bf16", "fp16"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_experts(name: str, out: str) -> None:
    posed = grouped(name, out)
    epilogue = posed.signature.epilogue
    assert epilogue is not None
    assert epilogue.gate is not None
    activation = GatedActivation(kind=epilogue.gate, alpha=1.702, limit=7.0)
    for check in checks(posed):
        a, b, result, offsets, kept = check.operands
        assert (result.shape, kept.shape) == ((24, 128), (24, 128))
        wanted, begin = torch.empty(24, 128, dtype=torch.float64), 0
        for group, end in enumerate(offsets.tolist()):
            of_group = slice(begin, end)
            grad = a[of_group].double() @ b[group].double()
            gates, ups = pairs(kept[of_group].double(), posed.signature)
            found = activation.gradients(gates, ups, grad)
            for part, values in zip(pairs(wanted[of_group], posed.signature), found):
                part.copy_(values)
            begin = end
        right = reference(check.operands, posed.signature)
        torch.testing.assert_close(right, wanted, equal_nan=True)
        assert find_fault(right.to(result.dtype), check.expected) is None


WRONG_GRADIENTS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "slope of the activation missing": lambda of_gates, of_ups, grad, ups: (grad * ups, of_ups),
    "gates and ups exchanged": lambda of_gates, of_ups, grad, ups: (of_ups, of_gates),
    "factor of the ups missing": lambda of_gates, of_ups, grad, ups: (of_gates, grad),
}


@pytest.mark.parametrize("wrong", WRONG_GRADIENTS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_wrong_gradients_are_noticed(name: str, wrong: str) -> None:
    posed = grouped(name)
    faults = []
    for check in checks(posed):
        plain = Signature.parse("grouped_mm/tt/bf16xbf16/fp32/bf16")
        right = reference(check.operands, posed.signature)
        grad = reference(check.operands[:4], plain)
        _, ups = pairs(check.operands[4].double(), posed.signature)
        changed = torch.empty_like(right)
        of_gates, of_ups = pairs(right, posed.signature)
        for part, values in zip(
            pairs(changed, posed.signature),
            WRONG_GRADIENTS[wrong](of_gates, of_ups, grad, ups),
        ):
            part.copy_(values)
        faults.append(find_fault(changed.bfloat16(), check.expected))
    assert any(fault is not None for fault in faults)


def summed(check: OperandCheck, signature: Signature) -> torch.Tensor:
    """Of each row, what the gate gave times its gradient, each by its own reference."""
    grad = reference(check.operands[:4], Signature.parse("grouped_mm/tt/bf16xbf16/fp32/bf16"))
    assert signature.epilogue is not None
    joined = stored(check.operands[4].double(), joined_signature(signature))
    return (grad * joined).sum(1)


def joined_signature(signature: Signature) -> Signature:
    """That of what the gate gives."""
    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    assert signature.epilogue.order is not None
    gate = find_gated(signature.epilogue.gate, signature.epilogue.order)
    return replace(signature, epilogue=gate)


@pytest.mark.parametrize("name", SUMMED)
def test_sums_are_a_second_result_that_is_checked(name: str) -> None:
    """In any of their parts, right; and wrong, stale or missing."""
    posed = grouped(name)
    for check in checks(posed):
        right = reference(check.operands, posed.signature)
        gradient = right.to(check.operands[2].dtype)
        without = grouped(name.removesuffix("_sums")).signature
        torch.testing.assert_close(
            right, reference(check.operands[:5], without), equal_nan=True, rtol=0, atol=0
        )
        sums, parts = summed(check, posed.signature), check.operands[5]
        check.prepare()
        assert check.operands[2].isnan().all()
        parts[:, 0] = sums
        assert check.fault(gradient) is None
        assert "sums" not in str(check.fault(gradient.flip(1)))
        for wrong in (-sums, sums.roll(1), torch.where(sums.isnan(), sums, 0), sums * 1.01 + 0.1):
            check.prepare()
            assert not parts.any()
            parts[:, 0] = wrong
            assert str(check.fault(gradient)).startswith("sums of rows: ")


@pytest.mark.parametrize("name", ["swiglu_halves_gradient_sums"])
def test_sums_are_found_in_parts_as_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posed = grouped(name)
    whole = [check.expected_sums for check in checks(posed)]
    monkeypatch.setattr(correctness, "MOST_AT_ONCE", 5 * 128)
    for one, check in zip(whole, checks(posed)):
        assert one is not None
        assert check.expected_sums is not None
        torch.testing.assert_close(one.low, check.expected_sums.low, equal_nan=True)
        torch.testing.assert_close(one.high, check.expected_sums.high, equal_nan=True)


def test_gates_and_ups_beyond_their_limit_have_no_gradient() -> None:
    (check, *_) = checks(grouped("swiglu_oai_halves_gradient"))
    right = reference(check.operands, grouped("swiglu_oai_halves_gradient").signature)
    gates, ups = check.operands[4].chunk(2, -1)
    of_gates, of_ups = right.chunk(2, -1)
    for values, found, is_beyond in (
        (gates, of_gates, gates > 7),
        (ups, of_ups, ups.abs() > 7),
    ):
        assert 0 < int(is_beyond.sum()) < values.numel()
        assert (found[is_beyond] == 0).all()


def test_gates_and_ups_at_their_limit_keep_their_gradient() -> None:
    """As in kernels, with every release of torch: from 2.14 on, ``clamp`` gives 0 there."""
    signature = Signature.parse("grouped_mm/tt/bf16xbf16/fp32/bf16/swiglu_oai_halves_gradient")
    grad, weight = torch.ones(1, 1).bfloat16(), torch.ones(1, 1, 3).bfloat16()
    gates, ups = torch.tensor([[7.0, 1.0, 1.0]]), torch.tensor([[1.0, 7.0, -7.0]])
    operands = (
        grad,
        weight,
        torch.empty(1, 6).bfloat16(),
        torch.tensor([1], dtype=torch.int32),
        torch.cat((gates, ups), 1).bfloat16(),
    )
    of_gates, of_ups = reference(operands, signature).chunk(2, -1)
    shares = torch.sigmoid(1.702 * gates.double())
    slopes = shares * (1 + 1.702 * gates.double() * (1 - shares))
    torch.testing.assert_close(of_gates, slopes * (ups.double() + 1), atol=0, rtol=1e-12)
    torch.testing.assert_close(of_ups, gates.double() * shares, atol=0, rtol=1e-12)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {"swiglu_halves_ups": silu, "geglu_halves_ups": gelu_tanh}


def ups_and_gates(check: OperandCheck) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of ups and the gates that are read, in fp64."""
    a, b, _, offsets, gates = check.operands
    ends = offsets.tolist()
    parts = [a[begin:end].double() @ one.double() for begin, end, one in zip([0, *ends], ends, b)]
    return torch.cat(parts), gates.double()


@pytest.mark.parametrize("out", ["bf16", "fp16"])
@pytest.mark.parametrize("name", UPS)
def test_ups_stand_before_what_gates_that_are_read_make_of_them(name: str, out: str) -> None:
    posed = grouped(name, out)
    found = checks(posed)
    assert [check.name for check in found] == [WHOLE_NUMBERS, FEW_PRODUCTS]
    for check in found:
        ups, gates = ups_and_gates(check)
        wanted = torch.cat((ups, ACTIVATIONS[name](gates) * ups), -1)
        right = reference(check.operands, posed.signature)
        torch.testing.assert_close(right, wanted, equal_nan=True, rtol=1e-12, atol=1e-12)
        assert find_fault(right.to(check.operands[2].dtype), check.expected) is None


WRONG_UPS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "no activation": lambda f, g, u: (u, g * u),
    "another activation": lambda f, g, u: (u, (gelu_tanh if f is silu else silu)(g) * u),
    "gate and up exchanged": lambda f, g, u: (u, g * f(u)),
    "gates stored for ups": lambda f, g, u: (g, f(g) * u),
    "parts exchanged": lambda f, g, u: (f(g) * u, u),
    "gates of another row": lambda f, g, u: (u, f(g.roll(1, 0)) * u),
    "gates of another column": lambda f, g, u: (u, f(g.roll(1, 1)) * u),
    "ups rounded first": lambda f, g, u: (u, f(g) * u.bfloat16().double()),
    "activation rounded first": lambda f, g, u: (u, f(g).bfloat16().double() * u),
    "a dropped NaN": lambda f, g, u: (u, (f(g) * u).nan_to_num()),
}


@pytest.mark.parametrize("wrong", WRONG_UPS)
@pytest.mark.parametrize("name", UPS)
def test_wrong_ups_are_noticed(name: str, wrong: str) -> None:
    faults = []
    for check in checks(grouped(name)):
        ups, gates = ups_and_gates(check)
        made = torch.cat(WRONG_UPS[wrong](ACTIVATIONS[name], gates, ups), -1)
        faults.append(find_fault(made.bfloat16(), check.expected))
    assert any(fault is not None for fault in faults)


@pytest.mark.parametrize("name", UPS)
def test_errors_of_ups_and_activations_are_allowed_and_larger_ones_are_not(name: str) -> None:
    """Those of an accumulator and of ``tanh.approx``; a gate that is read has none."""
    signature = grouped(name).signature
    generator = torch.Generator().manual_seed(2)
    ups, gates = (torch.randn(24, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    activation = ACTIVATIONS[name]
    error, curve = 2.0**-12, 2.0**-10
    bound = stored_error(
        torch.tensor(error).double(), ups, signature, gates, slope=1.2, curve=curve
    )
    right = stored(ups, signature, gates)
    for sign, of_curve in itertools.product((1, -1), (1, -1)):
        off = ups + sign * error
        made = torch.cat((off, (activation(gates) + of_curve * curve * gates.abs()) * off), -1)
        assert ((made - right).abs() <= bound * (1 + 1e-9)).all()
    rest = bound[:, 64:] - activation(gates).abs() * error - curve * gates.abs() * ups.abs()
    assert (rest <= 1.001 * error * curve * gates.abs()).all(), "more is allowed than can be off"
    assert (bound[:, :64] == error).all()
