"""Contenders for a problem: callables for bundled kernels, ATen's operator and Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.gemm.aten import unusual_setting
from nvgemm_runtime.gemm.epilogues import BIAS, GateForm
from nvgemm_runtime.gemm.group_limits import too_large_reason
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, contiguous_bytes, extra_roles
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.matching.refusals import unlaunchable

from ..rankings.agreement import ATEN, TRITON
from .correctness.gate_results import pairs

if TYPE_CHECKING:
    from ..bundle.content import ProblemRanking

Run = Callable[..., Any]
"""``run(a, b, out, *extras)`` computes a GEMM and returns the result; see `random_operands`."""


class Contenders:
    """Contenders from a set of bundles, except the names in ``without``.

    A kernel contained in several bundles comes from the first.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        *,
        all_kernels: bool,
        triton: bool,
        without: Collection[str],
    ) -> None:
        self._all_kernels = all_kernels
        self._triton = triton
        self._without = without
        self._kernels: dict[str, tuple[Bundle, Kernel]] = {
            kernel.id: (bundle, kernel)
            for bundle in reversed(bundles)
            for kernel in bundle.header.kernels
            if unlaunchable(kernel) is None
        }

    def runs_of(self, ranking: ProblemRanking, further_ids: Collection[str] = ()) -> dict[str, Run]:
        """Returns callables by name: ATen, Triton, and kernels whose alignment the operands meet.

        ``further_ids`` names more kernels with the same signature.
        """
        problem, signature = ranking.problem, ranking.problem.signature
        ids = [id_ for id_, _ in ranking.kernels if id_ in self._kernels]
        if self._all_kernels:
            ids = [
                id_ for id_, (_, kernel) in self._kernels.items() if kernel.signature == signature
            ]
        runs: dict[str, Run | None] = {
            id_: _lazy_run(*self._kernels[id_])
            for id_ in dict.fromkeys([*ids, *further_ids])
            if self.serves(id_, problem)
        }
        runs[ATEN] = aten_run(signature)
        runs[TRITON] = triton_run(signature) if self._triton else None
        return {
            name: run for name, run in runs.items() if run is not None and name not in self._without
        }

    def runs_of_kernels(self, problem: Problem, ids: Iterable[str]) -> dict[str, Run]:
        """Returns callables by name: ATen, and those of these kernels that serve a problem."""
        runs = {id_: _lazy_run(*self._kernels[id_]) for id_ in ids if self.serves(id_, problem)}
        aten = aten_run(problem.signature)
        return runs if aten is None or ATEN in self._without else {ATEN: aten, **runs}

    def serves(self, id_: str, problem: Problem) -> bool:
        """Returns True if a kernel may run on a problem's operands."""
        if id_ not in self._kernels or id_ in self._without:
            return False
        _, kernel = self._kernels[id_]
        if contiguous_bytes(problem) % kernel.alignment_bytes:
            return False
        return (
            kernel.signature == problem.signature
            and too_large_reason(kernel.provider, problem) is None
        )


def _lazy_run(bundle: Bundle, kernel: Kernel) -> Run:
    """Loads a bundled kernel at its first call, so that a failure counts against it alone."""
    loaded = functools.cache(lambda: kernel_run(bundle, kernel))
    return lambda *operands: loaded()(*operands)


def refuse_unusual_aten(problems: Iterable[Problem]) -> None:
    """Refuses to time ATen under settings with which its times hold nowhere else.

    Raises:
        TuningError: If torch has such a setting for an operand dtype of these problems.
    """
    for dtype in dict.fromkeys(problem.signature.a for problem in problems):
        setting = unusual_setting(dtype)
        if setting is not None:
            raise TuningError(
                f"{setting}: ATen's times would not be comparable; set it back (perhaps one of "
                "torch's environment variables changed it) and run again"
            )


def kernel_run(bundle: Bundle, kernel: Kernel) -> Run:
    """Loads a bundled kernel and returns a callable that launches it.

    Raises:
        NvgemmError: If loading fails; see `KernelLoader.load`.
    """
    from nvgemm_runtime.launch.loading.loader import LOADER

    launch = LOADER.load(bundle, kernel).launch

    def run(a: Any, b: Any, out: Any, *extras: Any) -> Any:
        launch(a, b, out, *extras)
        return out

    return run


def aten_run(signature: Signature) -> Run | None:
    """Returns what plain torch.compile runs for a signature without bundled kernels, or None.

    That is ATen's operator, or, for gated products, ATen's operator and Inductor's kernel for the
    gate.

    - fp8: ``_scaled_mm`` with fast accumulation, since the kernels do not promote sums either;
      scales are 1 if the problem has none.
    - Block scales: ``_scaled_mm_v2``, which also supports MXFP4.
    - Activations: None. ATen needs a second operator, which Inductor replaces by generated code.
    - Gathered rows: None. No operator takes fp32 weights.
    - Groups with gathered rows: None. No operator avoids a copy.
    """
    import torch

    if signature.op.is_gathered:
        return None
    if signature.op.has_groups and signature.scales is not None:
        return _scaled_groups(signature)
    if signature.form is not None:
        return _gated(signature)
    if signature.op.has_groups:
        is_plain = signature.epilogue is None and signature.a is signature.out
        return _grouped if is_plain else None
    if signature.epilogue is not None and signature.epilogue.activation is not None:
        return None
    if signature.scales is not None and signature.scales.block is not None:
        return _block_scaled(signature)
    if signature.a.is_integer:
        if signature.op is Op.MM and signature.out is DType.INT32 and signature.a is DType.INT8:
            return lambda a, b, out: torch._int_mm(a, b, out=out)
        return None
    if signature.a.is_fp8:
        return _scaled(signature)
    is_single = signature.op is Op.MM
    if signature.epilogue is not None:
        total = torch.addmm if is_single else torch.baddbmm
        if signature.a is not signature.out:
            return None
        return lambda a, b, out, addend: total(addend, a, b, out=out)
    product = torch.mm if is_single else torch.bmm
    if signature.a is signature.out:
        return lambda a, b, out: product(a, b, out=out)
    if signature.out is DType.FP32:
        operator = getattr(torch.ops.aten, signature.op.value).dtype_out
        return lambda a, b, out: operator(a, b, torch.float32, out=out)
    return None


def _scaled(signature: Signature) -> Run | None:
    import torch

    if signature.op is not Op.MM or signature.layout is not Layout.TN:
        return None
    if signature.epilogue not in (None, BIAS):
        return None
    dtype, unit_scale = torch_dtype(signature.out), None

    def run(a: Any, b: Any, out: Any, *extras: Any) -> Any:
        nonlocal unit_scale
        operands = dict(zip(extra_roles(signature), extras))
        if unit_scale is None:
            unit_scale = torch.ones((), device=a.device)
        return torch._scaled_mm(
            a, b,
            scale_a=operands.get(Role.SCALE_A, unit_scale),
            scale_b=operands.get(Role.SCALE_B, unit_scale),
            bias=operands.get(Role.ADDEND), out_dtype=dtype, use_fast_accum=True, out=out,
        )  # fmt: skip

    return run


def _gated(signature: Signature) -> Run | None:
    """Returns ATen's product and Inductor's kernel for the gate.

    The first call with new sizes compiles.
    """
    import torch

    from nvgemm_runtime import mode
    from nvgemm_runtime.moe.activations import GatedActivation  # imports torch

    halves = (DType.BF16, DType.FP16)
    is_joined = signature.op is Op.MM and signature.form is GateForm.JOINED
    if not is_joined or signature.a is not signature.out or signature.out not in halves:
        return None
    assert signature.epilogue is not None
    gate = signature.epilogue.gate
    assert gate is not None
    row = gate.row
    activation = GatedActivation(kind=gate, alpha=row.alpha, limit=row.limit or 0.0)

    def unfused(a: Any, b: Any, *addends: Any) -> Any:
        product = torch.addmm(*addends, a, b) if addends else torch.mm(a, b)
        return activation.apply(*pairs(product, signature))

    torch._dynamo.reset()  # the recompilation limit would otherwise count all problems together
    options = {"max_autotune": False, "max_autotune_gemm": False, "triton.cudagraphs": False}
    compiled = torch.compile(unfused, dynamic=False, fullgraph=True, options=options)

    def run(a: Any, b: Any, out: Any, *addends: Any) -> Any:
        with mode("off"):
            return compiled(a, b, *addends)

    return run


_SCALED_BY_ATEN = {
    (DType.FP8_E4M3, ScaleRecipe.E8M0_1X32),
    (DType.FP4_E2M1, ScaleRecipe.E8M0_1X32),
    (DType.FP4_E2M1, ScaleRecipe.E4M3_1X16),
}
"""Operand dtypes and block scales that torch's CUDA operator supports (``ScaledBlas.cpp`` in
PyTorch at 0174dfa). It does not multiply e5m2 by e5m2."""


def _block_scaled(signature: Signature) -> Run | None:
    import torch
    from torch.nn.functional import SwizzleType

    assert signature.scales is not None
    if (signature.a, signature.scales) not in _SCALED_BY_ATEN:
        return None
    is_mxfp4 = signature.a is DType.FP4_E2M1 and signature.scales is ScaleRecipe.E8M0_1X32
    if is_mxfp4 and signature.out is not DType.BF16:  # always writes bf16
        return None
    recipe = [signature.scales.row.torch_scaling.value]
    swizzle = [SwizzleType.SWIZZLE_32_4_4.value]
    operator, dtype = torch.ops.aten._scaled_mm_v2.out, torch_dtype(signature.out)

    def run(a: Any, b: Any, out: Any, scale_a: Any, scale_b: Any) -> Any:
        return operator(
            a, b, [scale_a], recipe, swizzle, [scale_b], recipe, swizzle, None, dtype, out=out
        )

    return run


def _scaled_groups(signature: Signature) -> Run | None:
    """Returns ATen's scaled grouped product; it supports e4m3 operands with bf16 results only."""
    if (signature.a, signature.b, signature.out) != (DType.FP8_E4M3, DType.FP8_E4M3, DType.BF16):
        return None

    def run(a: Any, b: Any, out: Any, scale_a: Any, scale_b: Any, offsets: Any) -> Any:
        import torch

        return torch._scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return run


def _grouped(a: Any, b: Any, out: Any, offsets: Any) -> Any:
    """Computes a grouped product; ATen has no variant with an output argument."""
    import torch

    return torch._grouped_mm(a, b, offs=offsets)


def triton_run(signature: Signature) -> Run | None:
    """Returns Inductor's best Triton kernel, or None if Inductor has none for such a GEMM.

    The first call with new sizes compiles: Inductor autotunes its choices then.
    """
    import torch

    from nvgemm_runtime import mode

    floats = (DType.BF16, DType.FP16, DType.FP32)
    is_plain = not extra_roles(signature) and signature.epilogue is None
    if not is_plain or signature.a is not signature.out or signature.out not in floats:
        return None
    product = torch.mm if signature.op is Op.MM else torch.bmm
    options = {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TRITON",
        "max_autotune_gemm_search_space": "DEFAULT",
        "triton.cudagraphs": False,
    }
    torch._dynamo.reset()  # the recompilation limit would otherwise count all problems together
    compiled = torch.compile(
        lambda a, b: product(a, b), dynamic=False, fullgraph=True, options=options
    )

    def run(a: Any, b: Any, out: Any) -> Any:
        with mode("off"):
            return compiled(a, b)

    return run
