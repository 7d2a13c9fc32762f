"""Sizes at which a kernel is tested: odd m where it is free, n and k at the edges of alignment."""

from __future__ import annotations

from nvgemm_aot.emulator.checking.small_problems import size_steps
from nvgemm_runtime.gemm.problem import Op, Problem, Signature

BATCH = 3
GROUPS = 4


def problem_of(signature: Signature, m: int, n: int, k: int, *, count: int = BATCH) -> Problem:
    """A problem of these sizes; ``count`` is its batch or groups, where it has them."""
    return Problem(
        signature=signature,
        m=m,
        n=n,
        k=k,
        batch=count if signature.op is Op.BMM else 1,
        groups=count if signature.op.has_groups else 1,
    )


def edges(signature: Signature, alignment_bytes: int) -> list[Problem]:
    """Problems of a signature, from the smallest that a kernel's alignment allows."""
    step_m, step_n, step_k = size_steps(signature, alignment_bytes)

    def m(value: int) -> int:
        return -(-value // step_m) * step_m

    sizes = [
        (m(1), step_n, step_k, BATCH),
        (m(37), 3 * step_n, 5 * step_k, GROUPS),
        (m(1003), 128 + step_n, 256 - step_k, GROUPS),
        (m(128), 256, 512, BATCH),
        (m(300), 1024 + step_n, 192 + step_k, 1),
    ]
    return [problem_of(signature, m, n, k, count=count) for m, n, k, count in sizes]
