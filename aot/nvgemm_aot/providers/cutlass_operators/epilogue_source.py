"""GEMMs with an epilogue: row and tensor scales, a bias or a matrix, an activation.

The operators compile an epilogue from source. This module writes it for each signature:
``D = round(f(scale_a * scale_b * accum + addend))``, computed in fp32.
"""

# ruff: noqa: D102 - `Family` documents the methods

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from nvgemm_runtime.gemm.epilogues import ADD, BIAS
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles
from nvgemm_runtime.gemm.types import ScaleRecipe

from ...targets import BuildTarget
from ..other_provider import other_provider
from .family import Family
from .samples import sample_operands, sample_tensors
from .toolchain import import_operators

EFC_OPERATOR = "PersistentDenseGemmEFCOperator"

_SCALES = (Role.SCALE_A, Role.SCALE_B)

_ALIGNMENT_BYTES = 16
"""Alignment that TMA requires for addresses and strides of addend, row-wise scales and result.

A broadcast tensor has stride 0 along the broadcast dimension, in its descriptor as well. On an
H200, such a descriptor repeats its row for any number of rows.
"""


class WithEpilogue(Family):
    """Blackwell GEMMs with a compiled-in epilogue.

    Tiles of 64 rows are among them. torch's backend drops these if an epilogue broadcasts, for
    wrong results that nobody has reproduced (pytorch/pytorch#181901). In emulation, such kernels
    with rows, columns and scalars were right at whole tiles and tails; none has run on a GPU. As
    the library compiles them, they round the product before they add a bias, like its taller
    tiles: see `_compute_in_accumulator_type`.
    """

    operators = (EFC_OPERATOR,)

    def serves(self, signature: Signature) -> bool:
        scales = signature.scales
        return (
            signature.op in (Op.MM, Op.BMM)
            and bool(extra_roles(signature))
            and (scales is None or not scales.is_swizzled)
        )

    def parameters(self, signature: Signature) -> tuple[str, ...]:
        extras = (role.value for role in extra_roles(signature))
        return ("a", "b", "stream", *extras, "out")

    def arguments(self, signature: Signature) -> Any:
        import torch

        operators = import_operators()
        tensors = sample_tensors(signature)
        loaded = {role.value: tensors[role] for role in extra_roles(signature)}
        # The tracer has no fp8 support: it gets fp32 tensors, which `_pass_tensors` replaces.
        traced = {
            name: torch.empty_like(tensor, dtype=torch.float32)
            for name, tensor in (*loaded.items(), ("D", tensors[Role.OUT]))
        }
        arguments = operators.GemmArguments(
            **sample_operands(signature, tensors),
            epilogue=operators.EpilogueArguments(epilogue_source(signature), **traced),
        )
        _pass_tensors(arguments.epilogue, signature, {**loaded, "D": tensors[Role.OUT]})
        return arguments

    def absence(self, signature: Signature, target: BuildTarget) -> str:
        arch = target.target.arch
        other = other_provider(signature, arch)
        if signature.a is not signature.b:
            types = f"{signature.a.value} by {signature.b.value}"
            return f"no operator of {arch} multiplies {types}{other_provider_hint(other)}"
        feature = "applies scales" if signature.scales is not None else "has an epilogue"
        text = f"no operator of {arch} {feature}: its plain kernels store the bare product"
        if other is not None:
            text += other_provider_hint(other)
        elif signature.scales is None and signature.epilogue in (BIAS, ADD):
            text += "; declare the product with 'out: fp32', to which torch.compile adds the rest"
        return text

    def compile(self, operator: Any, arguments: Any, target_sm: str) -> Any:
        _compute_in_accumulator_type(operator)
        with _maxima_keep_nan():
            return super().compile(operator, arguments, target_sm)

    def added_code(self, operator: Any, signature: Signature) -> str:
        return f"# in {signature.accumulator.value}, NaN kept\n{epilogue_source(signature)}"


def other_provider_hint(provider: str | None) -> str:
    """Returns an absence's hint at another provider with such kernels, or an empty string."""
    if provider is None:
        return ""
    return f"; {provider} has such kernels: add it to the manifest's `providers`, or name none"


@contextlib.contextmanager
def _maxima_keep_nan() -> Iterator[None]:
    """Makes relu return NaN for NaN, as torch's does; the library's returns 0."""
    import cutlass
    from cutlass.operators.providers.cutedsl.evt.efc import _configuration

    def maximum(x: Any, y: Any) -> Any:
        # Comparisons with NaN are false, so the false branch returns x, which may be NaN.
        return cutlass.cute.where(y > x, y, x)

    original = _configuration.maximum
    _configuration.maximum = maximum
    try:
        yield
    finally:
        _configuration.maximum = original


def _compute_in_accumulator_type(operator: Any) -> None:
    """Makes an operator compute its epilogue in the accumulator's type.

    Left alone, an operator first rounds the product to the result's type, bf16 or even fp8, and
    then computes the epilogue in that type.
    """
    kernel = operator.impl
    result, accumulator = operator.metadata.operands.out.dtype, kernel.acc_dtype
    partition = type(kernel).epilogue_tmem_copy_and_partition

    def partition_for_result(*arguments: Any) -> Any:
        # Reads from tensor memory still depend on the stored type.
        kernel.epi_dtype = result
        try:
            return partition(kernel, *arguments)
        finally:
            kernel.epi_dtype = accumulator

    kernel.epi_dtype = accumulator
    kernel.epilogue_tmem_copy_and_partition = partition_for_result


def epilogue_source(signature: Signature) -> str:
    """Returns the epilogue as source for `cutlass.operators`, which parses but never runs it."""
    extras = [role.value for role in extra_roles(signature)]
    value = " * ".join(["accum", *(role.value for role in _SCALES if role.value in extras)])
    body = [f"D = {value}"]
    if signature.epilogue is not None:
        value = f"{value} + {Role.ADDEND.value}"
        activation = signature.epilogue.activation
        body = [f"x = {value}", *activation.row.efc_source] if activation else [f"D = {value}"]
    lines = (f"    {line}\n" for line in (*body, "return D"))
    return "".join([f"def epilogue({', '.join(['accum', *extras])}):\n", *lines])


def _pass_tensors(epilogue: Any, signature: Signature, tensors: dict[str, Any]) -> None:
    """Replaces a traced epilogue's tensors. Scales keep only their own type's alignment.

    TMA moves row-wise scales, so they need `_ALIGNMENT_BYTES` like other tensors; the kernel's
    ``alignment_bytes`` makes callers align them. The launcher must not require it: it would also
    assume an extent that is a multiple of that many bytes, which means four rows. (A launcher
    compiled that way requires an extent "divisible by 4".)
    """
    from cutlass.operators.fusion.ir import LoadNode
    from cutlass.operators.fusion.ir.load_nodes import RowBroadcastImpl, ScalarBroadcastImpl
    from cutlass.operators.utils.tensor import TensorWrapper

    for name, tensor in tensors.items():
        is_scale = name in (Role.SCALE_A.value, Role.SCALE_B.value)
        epilogue.tensors[name] = TensorWrapper(
            tensor,
            alignment_bytes=tensor.element_size() if is_scale else _ALIGNMENT_BYTES,
            static_layout=is_scale and signature.scales is ScaleRecipe.FP32_TENSOR,
        )
    for node in epilogue.traced_epilogue.dag_ir.node_metas_topological_order():
        is_scalar = isinstance(node, LoadNode) and node.name in tensors
        if is_scalar and isinstance(node.underlying_impl, ScalarBroadcastImpl):
            # A scalar node gets its number from the host. A broadcast node loads its tensor: with a
            # broadcast along all three dimensions, the tensor's only element.
            node.underlying_impl = RowBroadcastImpl(node)
