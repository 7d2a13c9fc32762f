"""Random operands for timing, and helpers that all tuning operands share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Problem
from nvgemm_runtime.gemm.roles import Role, extra_roles, role_dtype, role_shape, roles

from ...providers.heuristics.group_times import ESTIMATED_ROUTINGS, EVEN, routed_counts
from .block_scales import has_blocks, random_scales

if TYPE_CHECKING:
    import torch

Operands = tuple[Any, ...]
"""A, B, the output, then the further operands in `roles.extra_roles` order."""

MOST_SETS = 512
"""Most operand sets: a sample has no more launches."""

_FP8_RESULT = 16.0
"""Standard deviation for fp8 results, whose largest value is 448 (e4m3)."""
_INT8_RESULT = 20.0
"""Standard deviation for int8 results: six deviations fit into 127."""
_UINT8_RESULT = 40.0
"""Mean uint8 result for zeros and ones; twos make it 90, and 255 is ten deviations further."""


def make_sets(problem: Problem, device: str, *, seed: int, total_bytes: int) -> list[Operands]:
    """Creates operand sets for a problem, which together take ``total_bytes``.

    Creates 2 to `MOST_SETS` sets, each in its own buffers. A grouped problem's sets take the
    routings `ESTIMATED_ROUTINGS` in turn, with equal shares.
    """
    import torch

    signature = problem.signature
    set_bytes = 0
    for role in roles(signature):
        dtype = role_dtype(signature, role)
        set_bytes += dtype.bytes_of(math.prod(role_shape(problem, role)) * dtype.packed)
    count = min(MOST_SETS, max(2, -(-total_bytes // set_bytes)))
    generator = torch.Generator(device=device).manual_seed(seed)
    routings = ESTIMATED_ROUTINGS if signature.op.has_groups else (EVEN,)
    turns = -(-count // len(routings))
    return [
        make_operands(problem, device, generator, routing)
        for _ in range(turns)
        for routing in routings
    ]


def make_operands(
    problem: Problem, device: str, generator: torch.Generator, routing: str = EVEN
) -> Operands:
    """Creates an operand set; ``routing`` says how groups share rows, or terms."""
    import torch

    signature = problem.signature
    a = _matrix(problem, Role.A, device, generator, row_major=signature.layout.a_row_major)
    b = _matrix(problem, Role.B, device, generator, row_major=signature.layout.b_row_major)
    out = torch.empty(
        role_shape(problem, Role.OUT), dtype=torch_dtype(signature.out), device=device
    )
    extras = random_extras(
        problem, device, generator, terms=problem.k, routing=routing,
        rows_of_a_token=ROWS_OF_A_TOKEN,
    )  # fmt: skip
    return a, b, out, *extras


def poison(out: torch.Tensor) -> None:
    """Fills every byte with 0xFF, which is NaN or -1, so that unwritten elements show."""
    import torch

    out.view(torch.uint8).fill_(0xFF)


SAVED_PRODUCT_SCALE = 4
"""Factor for saved products: 8 % of a normal distribution then exceed 7, gpt-oss' gate limit."""


def make_extras(
    problem: Problem,
    device: str,
    generator: torch.Generator,
    addend: Callable[[tuple[int, ...]], torch.Tensor],
    scales: Callable[[Role], torch.Tensor],
    routing: str = EVEN,
    rows_of_a_token: int = 1,
) -> list[torch.Tensor]:
    """Creates the operands besides A, B and the output; converts an addend to its dtype.

    A saved product in the addend's place is scaled up, so that some gates and ups pass their limit.
    For groups with gathered rows, each used A row is selected ``rows_of_a_token`` times.
    """
    import torch

    extras = []
    times = SAVED_PRODUCT_SCALE if problem.signature.is_gradient else 1
    for role in extra_roles(problem.signature):
        if role is Role.OFFSETS:
            extras.append(_group_ends(problem, device, routing))
        elif role is Role.ROWS:
            extras.append(_random_rows(problem, device, generator, routing, rows_of_a_token))
        elif role is Role.SUMS:
            extras.append(torch.zeros(role_shape(problem, role), device=device))
        elif role is Role.ADDEND:
            dtype = torch_dtype(role_dtype(problem.signature, role))
            extras.append((addend(role_shape(problem, role)) * times).to(dtype))
        else:
            extras.append(scales(role))
    return extras


def random_extras(
    problem: Problem,
    device: str,
    generator: torch.Generator,
    *,
    terms: int,
    routing: str = EVEN,
    rows_of_a_token: int = 1,
) -> list[torch.Tensor]:
    """Creates a normally distributed addend, and scales around 1 or, for blocks, random ones."""
    import torch

    def scales(role: Role) -> torch.Tensor:
        if has_blocks(problem.signature):
            return random_scales(problem, role, device, generator, terms=terms)
        return torch.rand(role_shape(problem, role), generator=generator, device=device) + 0.5

    return make_extras(
        problem,
        device,
        generator,
        lambda shape: torch.randn(shape, generator=generator, device=device),
        scales,
        routing,
        rows_of_a_token,
    )


def _group_ends(problem: Problem, device: str, routing: str) -> torch.Tensor:
    import torch

    ends = list(itertools.accumulate(routed_counts(problem, routing)))
    return torch.tensor(ends, dtype=torch.int32, device=device)


ROWS_OF_A_TOKEN = 8
"""Selections per used A row in timed groups with gathered rows: many models have 8 experts for a
token."""


def _random_rows(
    problem: Problem,
    device: str,
    generator: torch.Generator,
    routing: str,
    rows_of_a_token: int,
) -> torch.Tensor:
    """Selects each B row once, in random order, like token rows among experts' rows.

    For groups, selects each used A row ``rows_of_a_token`` times, in rising order within a group,
    as each expert has its tokens.
    """
    import torch

    shape = role_shape(problem, Role.ROWS)
    rows = torch.randperm(math.prod(shape), generator=generator, device=device)
    if problem.signature.op.has_groups:
        rows %= -(-problem.m // rows_of_a_token)
        begin = 0
        for count in routed_counts(problem, routing):
            rows[begin : begin + count] = rows[begin : begin + count].sort().values
            begin += count
    return rows.to(torch.int32).reshape(shape)


def _matrix(
    problem: Problem, role: Role, device: str, generator: torch.Generator, *, row_major: bool
) -> torch.Tensor:
    *lead, rows, columns = role_shape(problem, role)
    shape = (*lead, rows, columns) if row_major else (*lead, columns, rows)
    values = _values(problem, role_dtype(problem.signature, role), shape, device, generator)
    return values if row_major else values.mT


def _values(
    problem: Problem, dtype: DType, shape: tuple[int, ...], device: str, generator: torch.Generator
) -> torch.Tensor:
    """Returns random values whose sums of ``k`` scaled products fit into the output dtype."""
    import torch

    def integers(least: int, end: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randint(least, end, shape, generator=generator, device=device, dtype=kind)

    out, value_dtype = problem.signature.out, torch_dtype(dtype)
    if dtype is DType.FP4_E2M1:  # every code, in both halves of a byte
        return integers(0, 256, torch.uint8).view(value_dtype)
    if not dtype.is_integer:
        scale = 1.0
        if out.is_fp8 and not has_blocks(problem.signature):
            scale = min(1.0, (_FP8_RESULT / problem.k**0.5) ** 0.5)
        return (torch.randn(shape, generator=generator, device=device) * scale).to(value_dtype)
    if out is DType.INT32:
        info = torch.iinfo(value_dtype)
        return integers(info.min, info.max + 1, value_dtype)
    is_unsigned = dtype is DType.UINT8
    if out not in (DType.INT8, DType.UINT8):
        return integers(0 if is_unsigned else -8, 9, value_dtype)
    result = _UINT8_RESULT**0.5 if is_unsigned else _INT8_RESULT
    density = min(1.0, result / problem.k**0.5)
    mask = torch.rand(shape, generator=generator, device=device) < density
    if is_unsigned:  # 1 or 2: with zeros and ones, few products would be all ones
        return (mask * integers(1, 3, torch.int64)).to(value_dtype)
    return (mask * (integers(0, 2, torch.int64) * 2 - 1)).to(value_dtype)
