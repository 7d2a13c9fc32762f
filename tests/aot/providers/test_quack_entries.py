"""That entry functions have the names that are in the kernels of earlier releases."""

from __future__ import annotations

from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.providers.quack import (
    _absence_reason,
    _offered_designs,
    entry,
    gated,
    grouped,
    k_grouped,
)
from nvgemm_runtime.gemm.problem import Op, Signature


def names_of(signature: Signature) -> dict[str, str]:
    if signature.op.groups_rows:
        return grouped._NAMES
    if signature.op is Op.K_GROUPED_MM:
        return k_grouped._NAMES
    return gated._NAMES if signature.is_gated else entry._NAMES


def test_every_offered_design_has_a_name_and_every_name_a_design() -> None:
    used = set()
    for signature in EVERY_SIGNATURE:
        for arch in ("sm_90a", "sm_100f"):
            if _absence_reason(signature, arch) is not None:
                continue
            for design in _offered_designs(signature, arch):
                parameters = entry.calling_convention(design, signature, arch).parameters
                used.add(names_of(signature)[" ".join(parameters)])
    tables = (entry, gated, grouped, k_grouped)
    assert used == {name for module in tables for name in module._NAMES.values()}
    assert len(used) == sum(len(module._NAMES) for module in tables) == 37
