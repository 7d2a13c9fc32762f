"""`grouped_mm` with gates for training, by bundled kernels for the CPU: values, views, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from edges import problem_of
from gemm_arguments import random_arguments
from gemm_reference import assert_close

import nvgemm_runtime
from cpu_kernels import signature
from installed_bundles import id_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.epilogues import Epilogue, Gate, GateForm, WeightOrder, find_gated
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.launch.select import load_kernel
from nvgemm_runtime.moe.activations import GatedActivation


def grouped(epilogue: Epilogue | None, layout: str = "tn") -> Signature:
    return signature(layout, op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)


PLAIN = grouped(None)
JOINED = grouped(Epilogue.parse("swiglu_halves"))
KEPT = grouped(Epilogue.parse("swiglu_halves_kept"))
OAI_KEPT = grouped(Epilogue.parse("swiglu_oai_interleaved_kept"))
GRADIENT = grouped(Epilogue.parse("swiglu_halves_gradient"), "tt")
UPS = grouped(Epilogue.parse("geglu_halves_ups"))

READ = {GRADIENT: "product", UPS: "gates"}
"""What is read where others add a bias."""

HIDDEN, ENDS = 24, (0, 5, 6, 14)
"""What a gate gives, and ends of groups of 16 rows: an empty one, one of one row."""

Experts = dict[str, torch.Tensor]


@pytest.fixture
def made(installed: BuiltBundle) -> Experts:
    """Rows, weights and biases of 4 experts, and the gradient of their result."""
    torch.manual_seed(0)
    shapes = {
        "x": (16, 64),
        "w_up": (4, 2 * HIDDEN, 64),
        "bias": (4, 2 * HIDDEN),
        "grad": (16, 64),
        "w_down": (4, 64, HIDDEN),
    }
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors["w_up"] /= 4
    return {**tensors, "ends": torch.tensor(ENDS, dtype=torch.int32)}


def forward(made: Experts, epilogue: Epilogue, out: torch.Tensor | None = None) -> torch.Tensor:
    assert epilogue.gate is not None
    bias = made["bias"] if epilogue.gate.row.is_biased else None
    return nvgemm_runtime.grouped_mm(
        made["x"], made["w_up"].mT, made["ends"], out, epilogue=epilogue, bias=bias
    )


def backward(
    made: Experts,
    epilogue: Epilogue,
    product: torch.Tensor,
    out: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    return nvgemm_runtime.grouped_mm(
        made["grad"], made["w_down"], made["ends"], out, epilogue=epilogue.name, product=product,
        sums=sums,
    )  # fmt: skip


def ups_beside(
    made: Experts, epilogue: Epilogue, gates: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The lower half of ``w_up`` gives ups; the upper one has given the gates."""
    b = made["w_up"][:, HIDDEN:].mT
    return nvgemm_runtime.grouped_mm(
        made["x"], b, made["ends"], out, epilogue=epilogue.name, gates=gates
    )


def split(order: WeightOrder, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if order is WeightOrder.INTERLEAVED:
        return both[..., ::2], both[..., 1::2]
    return both[..., :HIDDEN], both[..., HIDDEN:]


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The products of the groups in fp64."""
    begins = (0, *ENDS[:-1])
    parts = [a[i:j].double() @ one.double() for i, j, one in zip(begins, ENDS, b)]
    return torch.cat(parts)


@pytest.mark.parametrize("order", WeightOrder)
@pytest.mark.parametrize("gate", Gate)
def test_a_gradient_of_what_was_kept_is_that_of_experts(
    made: Experts, gate: Gate, order: WeightOrder
) -> None:
    """The product is read where it was kept, in rows that are 3 n apart."""
    stored = forward(made, find_gated(gate, order, GateForm.KEPT))
    assert stored.shape == (16, 3 * HIDDEN)
    product, joined = stored[:, : 2 * HIDDEN], stored[:, 2 * HIDDEN :]
    assert product.stride() == (3 * HIDDEN, 1)
    assert torch.equal(joined[: ENDS[-1]], forward(made, find_gated(gate, order))[: ENDS[-1]])

    found = backward(made, find_gated(gate, order, GateForm.GRADIENT), product)
    assert found.shape == (16, 2 * HIDDEN)
    activation = GatedActivation(kind=gate, alpha=1.702, limit=7.0)
    gates, ups = split(order, product[: ENDS[-1]].double())
    wanted = activation.gradients(gates, ups, multiply(made["grad"], made["w_down"]))
    for part, exact in zip(split(order, found[: ENDS[-1]].double()), wanted):
        torch.testing.assert_close(part, exact, rtol=2**-8, atol=2**-12)


@pytest.mark.parametrize("order", WeightOrder)
@pytest.mark.parametrize("gate", Gate)
def test_sums_are_those_of_rows(made: Experts, gate: Gate, order: WeightOrder) -> None:
    """Beside the gradient, which is that of a kernel without sums."""
    stored = forward(made, find_gated(gate, order, GateForm.KEPT))
    product, joined = stored[:, : 2 * HIDDEN], forward(made, find_gated(gate, order))
    sums = torch.full((16, 1), torch.nan)  # what was there before is gone
    found = backward(made, find_gated(gate, order, GateForm.GRADIENT_SUMS), product, sums=sums)
    without = backward(made, find_gated(gate, order, GateForm.GRADIENT), product)
    assert torch.equal(found[: ENDS[-1]], without[: ENDS[-1]])
    grad = multiply(made["grad"], made["w_down"])
    wanted = (grad * joined[: ENDS[-1]].double()).sum(1)
    torch.testing.assert_close(sums[: ENDS[-1], 0].double(), wanted, rtol=2**-6, atol=2**-3)
    assert not sums[ENDS[-1] :].any()


@pytest.mark.parametrize("gate", [Gate.SWIGLU, Gate.GEGLU])
def test_gates_and_ups_of_two_weights_are_stored_as_of_one(made: Experts, gate: Gate) -> None:
    """Side by side, where gates are read and the gradient reads both; ups multiply unrounded."""
    stored = torch.full((16, 3 * HIDDEN), 7.0).bfloat16()
    gates, others = stored[:, :HIDDEN], stored[:, HIDDEN:]
    nvgemm_runtime.grouped_mm(made["x"], made["w_up"][:, :HIDDEN].mT, made["ends"], gates)
    epilogue = find_gated(gate, WeightOrder.HALVES, GateForm.UPS)
    assert ups_beside(made, epilogue, gates, others) is others
    assert (stored[ENDS[-1] :] == 7).all()
    of_one = forward(made, find_gated(gate, WeightOrder.HALVES, GateForm.KEPT))
    assert torch.equal(stored[: ENDS[-1], : 2 * HIDDEN], of_one[: ENDS[-1], : 2 * HIDDEN])

    activation = GatedActivation(kind=gate, alpha=1.702, limit=7.0)
    exact = multiply(made["x"], made["w_up"][:, HIDDEN:].mT)
    wanted = activation.apply(gates[: ENDS[-1]].double(), exact)
    found = others[: ENDS[-1], HIDDEN:].double()
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=2**-12)
    assert torch.equal(ups_beside(made, epilogue, gates)[: ENDS[-1]], others[: ENDS[-1]])

    of_gate = find_gated(gate, WeightOrder.HALVES, GateForm.GRADIENT)
    read, alone = (backward(made, of_gate, one[:, : 2 * HIDDEN]) for one in (stored, of_one))
    assert torch.equal(read[: ENDS[-1]], alone[: ENDS[-1]])


def test_a_kept_product_is_that_of_a_kernel_without_a_gate(made: Experts) -> None:
    plain = nvgemm_runtime.grouped_mm(made["x"], made["w_up"].mT, made["ends"])
    stored = forward(made, Epilogue.parse("swiglu_halves_kept"))
    assert torch.equal(stored[: ENDS[-1], : 2 * HIDDEN], plain[: ENDS[-1]])


def test_results_may_lie_in_wider_matrices(made: Experts) -> None:
    """Around them, and in rows of no group, nothing is written."""
    kept, gradient, beside = (
        Epilogue.parse(name)
        for name in ("swiglu_oai_halves_kept", "swiglu_oai_halves_gradient", "swiglu_halves_ups")
    )
    stored = forward(made, kept)
    product = stored[:, : 2 * HIDDEN]
    found = backward(made, gradient, product)
    gates = product[:, :HIDDEN]
    ups = ups_beside(made, beside, gates)
    for width, result, run in (
        (3 * HIDDEN, stored, lambda out: forward(made, kept, out)),
        (2 * HIDDEN, found, lambda out: backward(made, gradient, product, out)),
        (2 * HIDDEN, ups, lambda out: ups_beside(made, beside, gates, out)),
    ):
        wide = torch.full((16, width + 16), 7.0).bfloat16()
        out = wide[:, 8:-8]
        assert run(out) is out
        assert torch.equal(out[: ENDS[-1]], result[: ENDS[-1]])
        assert (wide[:, :8] == 7).all()
        assert (wide[:, -8:] == 7).all()
        assert (out[ENDS[-1] :] == 7).all()


@pytest.mark.parametrize("served", [KEPT, OAI_KEPT, GRADIENT, UPS], ids=lambda one: one.key)
def test_a_named_kernel_says_the_epilogue(installed: BuiltBundle, served: Signature) -> None:
    arguments = random_arguments(problem_of(served, 16, 32, 64), "cpu")
    offsets, *added = arguments.others
    named = {READ.get(served, "bias"): added[0]} if added else {}
    id_ = id_of(installed, served)
    for kernel in (id_, load_kernel(id_)):
        for out in (None, arguments.out.zero_()):
            found = nvgemm_runtime.grouped_mm(
                arguments.a, arguments.b, offsets, out, kernel=kernel, **named
            )
            assert_close(found, arguments)


@pytest.mark.parametrize("served", [KEPT, OAI_KEPT, GRADIENT, UPS], ids=lambda one: one.key)
def test_choose_and_explain_find_the_kernel(installed: BuiltBundle, served: Signature) -> None:
    arguments = random_arguments(problem_of(served, 16, 32, 64), "cpu")
    chosen = nvgemm_runtime.choose(*arguments.operands(), extras=arguments.extras)
    assert chosen.kernel.signature == served
    explained = nvgemm_runtime.explain(arguments.a, arguments.b, extras=arguments.extras)
    assert explained.request is not None
    assert explained.request.problem.key == arguments.problem.key
    assert explained.match is not None


@pytest.mark.parametrize(("m", "hidden", "k"), [(0, 16, 32), (8, 0, 32), (8, 16, 0)])
def test_zero_sizes(installed: BuiltBundle, m: int, hidden: int, k: int) -> None:
    ends = torch.full((2,), m, dtype=torch.int32)
    a, up, down = (torch.randn(shape).bfloat16() for shape in
                   ((m, k), (2, 2 * hidden, k), (2, k, hidden)))  # fmt: skip
    kept = nvgemm_runtime.grouped_mm(a, up.mT, ends, epilogue="swiglu_halves_kept")
    assert kept.shape == (m, 3 * hidden)
    assert not kept.any()
    product = torch.randn(m, 2 * hidden).bfloat16()
    found = nvgemm_runtime.grouped_mm(
        a, down, ends, epilogue="swiglu_halves_gradient", product=product
    )
    assert found.shape == (m, 2 * hidden)
    assert not found.any()
    ups = nvgemm_runtime.grouped_mm(
        a, down, ends, epilogue="geglu_halves_ups", gates=product[:, :hidden].contiguous()
    )
    assert ups.shape == (m, 2 * hidden)
    assert not ups.any()


Call = Callable[[Experts, torch.Tensor], Any]
GATED, OF_GATE = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_gradient")
SUMMED = Epilogue.parse("swiglu_halves_gradient_sums")
BESIDE = Epilogue.parse("swiglu_halves_ups")

REFUSALS: dict[str, tuple[Call, type[Exception], str]] = {
    "no product": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["grad"], x["w_down"], x["ends"],
            epilogue=OF_GATE),
        NoKernelError, "swiglu_halves_gradient needs product"),
    "a product of what gates give": (lambda x, p: backward(x, OF_GATE, p[:, :HIDDEN]),
        NoKernelError, r"reads a product of shape \[16, 24\], must have \[16, 48\]: one gate and "
        "one up per column of a @ b"),
    "all that was stored": (
        lambda x, p: backward(x, OF_GATE, forward(x, GATED)), NoKernelError,
        r"reads a product of shape \[16, 72\], must have \[16, 48\]"),
    "a product of fewer rows": (lambda x, p: backward(x, OF_GATE, p[:15]), NoKernelError,
        r"reads a product of shape \[15, 48\]"),
    "a product of another type": (lambda x, p: backward(x, OF_GATE, p.half()), NoKernelError,
        "addend is torch.float16, must be torch.bfloat16"),
    "a column-major product": (lambda x, p: backward(x, OF_GATE, p.T.contiguous().T), NoKernelError,
        "addend is not row-major"),
    "a bias for a gradient": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["grad"], x["w_down"], x["ends"],
            epilogue=OF_GATE, bias=x["bias"], product=p),
        ValueError, "grouped_mm: bias is given with epilogue swiglu_halves_gradient, but is only "
        "for epilogues other than gradients and ups"),
    "a product for what keeps one": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], epilogue=GATED,
            product=p),
        ValueError, "product is given with epilogue swiglu_halves_kept, but is only for gradients"),
    "a product without an epilogue": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], product=p),
        ValueError, "product is given with epilogue None, but is only for gradients"),
    "a bias too many": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], epilogue=GATED,
            bias=x["bias"]),
        NoKernelError, "swiglu_halves_kept takes no bias"),
    "a bias too few": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"],
            epilogue="swiglu_oai_halves_kept"),
        NoKernelError, "swiglu_oai_halves_kept needs bias"),
    "an out for the product alone": (
        lambda x, p: forward(x, GATED, torch.empty(16, 48).bfloat16()),
        ValueError, r"out has shape \[16, 48\], must have \[16, 72\]"),
    "an out of gradients of one": (
        lambda x, p: backward(x, OF_GATE, p, torch.empty(16, 24).bfloat16()),
        ValueError, r"out has shape \[16, 24\], must have \[16, 48\]"),
    "an odd n": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT[..., :47], x["ends"],
            epilogue=GATED),
        ValueError, "b has 47 columns, must have an even number"),
    "halves of a row-major B": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT.contiguous(), x["ends"],
            epilogue=GATED),
        NoKernelError, "no kernel for grouped_mm/tt/bf16xbf16/fp32/bf16/swiglu_halves_kept"),
    "gradients in place": (lambda x, p: backward(x, OF_GATE, p, p), ValueError, "out overlaps"),
    "no sums": (
        lambda x, p: backward(x, SUMMED, p),
        ValueError, "grouped_mm: swiglu_halves_gradient_sums needs sums"),
    "sums for a gradient without": (
        lambda x, p: backward(x, OF_GATE, p, sums=torch.zeros(16, 1)),
        ValueError, "need an epilogue with sums .got swiglu_halves_gradient"),
    "sums without an epilogue": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"],
            sums=torch.zeros(16, 1)),
        ValueError, "grouped_mm: sums need an epilogue with sums"),
    "sums of another shape": (
        lambda x, p: backward(x, SUMMED, p, sums=torch.zeros(16)),
        ValueError, r"sums have shape \[16\], must have \[16, 1\]: one part per 64 columns"),
    "sums of another type": (
        lambda x, p: backward(x, SUMMED, p, sums=torch.zeros(16, 1).double()),
        NoKernelError, "sums are torch.float64, must be torch.float32"),
    "sums with gaps": (
        lambda x, p: backward(x, SUMMED, p, sums=torch.zeros(16, 2)[:, ::2]),
        NoKernelError, "sums are not contiguous"),
    "sums on another device": (
        lambda x, p: backward(x, SUMMED, p, sums=torch.zeros(16, 1, device="meta")),
        (TypeError, ValueError, NoKernelError), "meta"),
    "no gates": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], epilogue=BESIDE),
        NoKernelError, "swiglu_halves_ups needs gates"),
    "gates and ups": (lambda x, p: ups_beside(x, BESIDE, p),
        NoKernelError, r"swiglu_halves_ups reads gates of shape \[16, 48\], must have \[16, 24\]: "
        "one gate per column of a @ b"),
    "gates of fewer rows": (lambda x, p: ups_beside(x, BESIDE, p[:15, :HIDDEN]), NoKernelError,
        r"reads gates of shape \[15, 24\], must have \[16, 24\]"),
    "a row of gates": (lambda x, p: ups_beside(x, BESIDE, p[0, :HIDDEN]), NoKernelError,
        r"reads gates of shape \[24\], must have \[16, 24\]"),
    "gates of another type": (lambda x, p: ups_beside(x, BESIDE, p[:, :HIDDEN].half()),
        NoKernelError, "addend is torch.float16, must be torch.bfloat16"),
    "column-major gates": (
        lambda x, p: ups_beside(x, BESIDE, p[:, :HIDDEN].T.contiguous().T), NoKernelError,
        "addend is not row-major"),
    "a bias for ups": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], epilogue=BESIDE,
            gates=p, bias=x["bias"]),
        ValueError, "grouped_mm: bias is given with epilogue swiglu_halves_ups, but is only for "
        "epilogues other than gradients and ups"),
    "a product for ups": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], epilogue=BESIDE,
            gates=p, product=p),
        ValueError, "product is given with epilogue swiglu_halves_ups, but is only for gradients"),
    "gates for a gradient": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["grad"], x["w_down"], x["ends"],
            epilogue=OF_GATE, product=p, gates=p[:, :HIDDEN]),
        ValueError, "gates is given with epilogue swiglu_halves_gradient, but is only for ups"),
    "gates for what has them in its product": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], epilogue=GATED,
            gates=p),
        ValueError, "gates is given with epilogue swiglu_halves_kept, but is only for ups"),
    "gates without an epilogue": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"], gates=p),
        ValueError, "gates is given with epilogue None, but is only for ups"),
    "an out of ups alone": (
        lambda x, p: ups_beside(x, BESIDE, p[:, :HIDDEN], torch.empty(16, 24).bfloat16()),
        ValueError, r"out has shape \[16, 24\], must have \[16, 48\]"),
    "gates in the result": (lambda x, p: ups_beside(x, BESIDE, p[:, :HIDDEN], p), ValueError,
        "out overlaps"),
    "ups of gpt-oss' gate": (
        lambda x, p: nvgemm_runtime.grouped_mm(x["x"], x["w_up"].mT, x["ends"],
            epilogue="swiglu_oai_halves_ups", gates=p),
        ValueError, "no such Epilogue: 'swiglu_oai_halves_ups'"),
    "ups without groups": (
        lambda x, p: nvgemm_runtime.gated_mm(x["x"], x["w_up"][0].T, epilogue=BESIDE),
        ValueError, "epilogue is swiglu_halves_ups, must be one of swiglu_halves, "),
    "mm": (
        lambda x, p: nvgemm_runtime.gated_mm(x["x"], x["w_up"][0].T, epilogue=GATED),
        ValueError, "epilogue is swiglu_halves_kept, must be one of swiglu_halves, "
        "swiglu_interleaved, geglu_halves"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(made: Experts, name: str) -> None:
    call, error, text = REFUSALS[name]
    product = forward(made, GATED)[:, : 2 * HIDDEN].contiguous()
    with pytest.raises(error, match=text):
        call(made, product)


@pytest.mark.parametrize("served", [JOINED, KEPT, GRADIENT, UPS], ids=lambda one: one.key)
def test_a_kernel_refuses_calls_for_another_form(
    installed: BuiltBundle, made: Experts, served: Signature
) -> None:
    """Also by a loaded kernel with a result of the right shape for it."""
    kernel = load_kernel(id_of(installed, served))
    n = 2 * HIDDEN
    out = torch.empty(16, served.out_columns(n)).bfloat16()
    other = (
        Epilogue.parse("swiglu_halves") if served is KEPT else Epilogue.parse("swiglu_halves_kept")
    )
    for given in (None, out):
        with pytest.raises(ValueError, match="computes grouped_mm/t"):
            nvgemm_runtime.grouped_mm(
                made["x"], made["w_up"].mT, made["ends"], given, kernel=kernel, epilogue=other
            )


def test_operators_refuse_by_name_what_they_do_not_compute(
    installed: BuiltBundle, made: Experts
) -> None:
    operators = torch.ops.nvgemm_aot
    tensors = (made["x"], made["w_up"].mT, made["ends"])
    for served, text in (
        (KEPT, "keeps its product, which no operator supports: call nvgemm_runtime.grouped_mm"),
        (GRADIENT,
         "computes a gate's gradient, which no operator supports: call nvgemm_runtime.grouped_mm"),
        (UPS, "reads gates, which no operator supports: call nvgemm_runtime.grouped_mm"),
    ):  # fmt: skip
        id_ = id_of(installed, served)
        for operator in (operators.grouped_gated_mm, operators.grouped_mm):
            with pytest.raises(RuntimeError, match=f"kernel {id_[:12]} {text}"):
                operator(*tensors, id_)


def test_refuses_to_lose_a_gradient(made: Experts) -> None:
    """They compute one, and have none themselves."""
    product = forward(made, GATED)[:, : 2 * HIDDEN].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        backward(made, OF_GATE, product)
    gates = product.detach()[:, :HIDDEN].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        ups_beside(made, BESIDE, gates)


def test_extras_say_what_is_read(made: Experts) -> None:
    extras = ExtraOperands(offsets=made["ends"], gated=Epilogue.parse("swiglu_halves_gradient"))
    explained = nvgemm_runtime.explain(made["grad"], made["w_down"], extras=extras)
    assert "swiglu_halves_gradient needs product" in str(explained)
    extras = ExtraOperands(offsets=made["ends"], gated=Epilogue.parse("swiglu_halves_ups"))
    explained = nvgemm_runtime.explain(made["x"], made["w_up"].mT, extras=extras)
    assert "swiglu_halves_ups needs gates" in str(explained)


def test_rows_of_a_result_that_lie_too_far_apart_are_refused_of_quacks_kernels(
    made: Experts, installed: BuiltBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that a caller names, too."""
    ids = [one.id for one in installed.header.kernels if one.signature == PLAIN]
    operands = made["x"], made["w_up"].mT, made["ends"]
    near, far = (torch.zeros(16, pitch).bfloat16()[:, : 2 * HIDDEN] for pitch in (49152, 49160))
    nvgemm_runtime.grouped_mm(*operands, far)
    provider = installed.header.kernels[0].provider
    monkeypatch.setattr("nvgemm_runtime.gemm.group_limits.LIMITED_PROVIDER", provider)
    monkeypatch.setattr("nvgemm_runtime.launch.select._cache", {})
    for kernel in (None, ids[0], load_kernel(ids[0])):
        nvgemm_runtime.grouped_mm(*operands, near, kernel=kernel)
        with pytest.raises(NoKernelError, match=r"lie 98320 bytes apart.*take at most 98304"):
            nvgemm_runtime.grouped_mm(*operands, far, kernel=kernel)
    assert torch.equal(near[: ENDS[-1]], far[: ENDS[-1]])
