"""Calls the function of `nvgemm_runtime` that computes a signature, as users do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nvgemm_runtime
from nvgemm_runtime.gemm.epilogues import ADD, Addend
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles
from nvgemm_runtime.launch.loading.loader import LoadedKernel

if TYPE_CHECKING:
    import torch

_READ = {Addend.PRODUCT: "product", Addend.GATES: "gates"}


def call_as_user(kernel: LoadedKernel, operands: tuple[torch.Tensor, ...]) -> None:
    """Computes a kernel's result through the user's function.

    Args:
        kernel: The kernel.
        operands: A, B, the result, then the further operands in `extra_roles` order.
    """
    signature = kernel.kernel.signature
    a, b, out, *others = operands
    extras = dict(zip(extra_roles(signature), others))
    name, tensors, named = _arguments(signature, a, b, extras)
    getattr(nvgemm_runtime, name)(*tensors, out=out, kernel=kernel, **named)


def _arguments(
    signature: Signature, a: torch.Tensor, b: torch.Tensor, extras: dict[Role, torch.Tensor]
) -> tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Returns the function's name, its tensors, and its keywords."""
    op, epilogue = signature.op, signature.epilogue
    addend = extras.pop(Role.ADDEND, None)
    sums = extras.pop(Role.SUMS, None)
    added = {} if addend is None else {"bias": addend}
    tensors = (a, b, *extras.values())
    if signature.scales is not None:
        if op is Op.GROUPED_MM:
            return "scaled_grouped_mm", tensors, added
        return "scaled_mm", tensors, {**added, "recipe": signature.scales}
    if op.groups_rows:
        named: dict[str, Any] = dict(added)
        if signature.is_gated:
            assert epilogue is not None
            named = {"epilogue": epilogue}
            if addend is not None:
                named[_READ.get(epilogue.addend, "bias")] = addend  # type: ignore[arg-type]
            if sums is not None:
                named["sums"] = sums
        elif epilogue is ADD:
            named = {"addend": addend}
        return op.value, tensors, named
    if signature.is_gated:
        return "gated_mm", tensors, {**added, "epilogue": epilogue}
    if addend is not None:
        assert epilogue is not None
        activation = {} if epilogue.activation is None else {"activation": epilogue.activation}
        return "addmm" if op is Op.MM else "baddbmm", (addend, *tensors), activation
    return op.value, tensors, {}
