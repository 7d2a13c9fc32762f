"""Builtin provider that serves what the default one does not."""

from __future__ import annotations

from nvgemm_runtime.gemm.problem import Layout, Op, Signature
from nvgemm_runtime.gemm.target import ARCHITECTURES

QUACK = "quack"

_SOLE = {
    Op.GATHERED_MM: "gathered",
    Op.GATHERED_GROUPED_MM: QUACK,
    Op.K_GROUPED_MM: QUACK,
}
"""The one provider for an operation, on every architecture."""


def other_provider(signature: Signature, arch: str) -> str | None:
    """Returns the provider that serves a signature if the default one does not; None otherwise.

    An unknown architecture has no providers.
    """
    row = ARCHITECTURES.get(arch)
    if row is None:
        return None
    if signature.is_gated:
        return QUACK
    if signature.op in _SOLE:
        return _SOLE[signature.op]
    has_extras = (signature.epilogue, signature.scales) != (None, None)
    if signature.op is Op.GROUPED_MM:
        by_default = row.default_has_groups and signature.layout is Layout.TN and not has_extras
        return None if by_default else QUACK
    if signature.a is not signature.b:
        return QUACK if row.has_mixed_fp8 else None
    return QUACK if has_extras and not row.default_has_epilogues else None
