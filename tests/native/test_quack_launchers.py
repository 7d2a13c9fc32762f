"""The launchers of quack's kernels, called as the runtime calls them, where no GPU is.

A launcher checks its arguments before it calls CUDA, as `test_native_launchers` explains: a call
that is right gets as far as CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from edges import problem_of
from test_native_launchers import PRELUDE, REACHES_CUDA

from cpu_kernels import signature
from fake_driver import FakeDriver
from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe
from split_designs import list_only

FAST = (signature("tn", operand=DType.BF16),)
EXTRAS = (
    signature("tn", operand=DType.BF16, epilogue=Epilogue.BIAS),
    signature("tt", op=Op.BMM, operand=DType.BF16, epilogue=Epilogue.BIAS_GELU_TANH),
    signature("tn", op=Op.BMM, operand=DType.FP16, epilogue=Epilogue.ADD),
    Signature.parse("mm/nn/bf16xbf16/fp32/fp32/add"),
    Signature.parse("mm/tn/fp16xfp16/fp32/fp8_e4m3/bias_relu"),
    signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_TENSOR),
    signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW, epilogue=Epilogue.BIAS),
    Signature.parse("mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp16"),
    Signature.parse("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor"),
)
ALL = (
    *EXTRAS,
    *(signature(layout, operand=DType.BF16) for layout in ("tn", "tt", "nn", "nt")),
    signature("nt", op=Op.BMM, operand=DType.FP16),
    Signature.parse("mm/tn/fp16xfp16/fp32/fp32"),
    Signature.parse("bmm/tn/bf16xbf16/fp32/fp16"),
)
GROUPED = (
    Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16"),
    Signature.parse("grouped_mm/tt/fp16xfp16/fp32/fp32"),
    Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16/bias"),
    Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_oai_halves"),
    Signature.parse("k_grouped_mm/nt/bf16xbf16/fp32/bf16"),
)

CALL_ALL = """
for kernel in bundle.header.kernels:
    if kernel.workspace is not None:
        continue  # its memory comes from torch, which has no GPU here: see below
    launch = library.load(bundle, kernel).launch
    for m in (1, 3, 128) if kernel.signature.layout.a_row_major else (8, 128):
        say(kernel, launch, *tensors(kernel.signature, m))
"""


GATED = tuple(
    signature("tn", operand=DType.BF16, epilogue=epilogue)
    for epilogue in (Epilogue.SWIGLU_HALVES, Epilogue.SWIGLU_OAI_INTERLEAVED)
)

CALL_GATED = """
for kernel in bundle.header.kernels:
    launch = library.load(bundle, kernel).launch
    for m in (1, 3, 128):
        a, b, out, *extras = tensors(kernel.signature, m)
        assert out.shape == (m, b.shape[1] // 2)
        say(kernel, launch, a, b, out, *extras)
    say(kernel, launch, a, b, on(torch.empty(m, b.shape[1]).bfloat16()), *extras)
"""


@pytest.mark.slow
def test_launchers_of_gated_kernels_take_half_of_the_columns(
    driver: FakeDriver, kernel_cache: Cache, tmp_path: Path
) -> None:
    manifest = Manifest(
        name="gated",
        description="",
        targets=(build_target("sm_90a", None),),
        declared=tuple(
            Declared(problem=problem_of(served, 4096, 256, 512), candidates=1)
            for served in sorted(GATED)
        ),
        providers=("quack",),
    )
    (built,) = build(manifest, tmp_path, kernel_cache).bundles
    said = driver.run(PRELUDE + CALL_GATED, str(built.path), capability=90).splitlines()
    assert len(said) == 4 * len(GATED)
    for number, line in enumerate(said):
        is_wrong = number % 4 == 3
        assert (REACHES_CUDA in line) is not is_wrong, line
        assert ("must be (m, k), (k, n) and (m, n / 2)" in line) is is_wrong, line


@pytest.mark.slow
@pytest.mark.parametrize("signatures", [FAST, ALL, GROUPED], ids=["plain", "all", "groups"])
def test_launchers_take_what_they_are_given(
    driver: FakeDriver,
    kernel_cache: Cache,
    tmp_path: Path,
    signatures: tuple[Signature, ...],
) -> None:
    manifest = Manifest(
        name="quack",
        description="",
        targets=(build_target("sm_90a", None),),
        declared=tuple(
            Declared(problem=problem_of(served, m, 256, 512), candidates=3)
            for served in sorted(signatures)
            for m in (16, 4096)
        ),
        providers=("quack",),
    )
    (built,) = build(manifest, tmp_path, kernel_cache).bundles
    with Bundle(built.path) as opened:
        kernels = [kernel for kernel in opened.header.kernels if kernel.workspace is None]
        swapped = {kernel.design.swapped for kernel in kernels}
        assert swapped == ({False} if signatures is GROUPED else {True, False})
        assert {kernel.signature for kernel in kernels} == set(signatures)
    said = driver.run(PRELUDE + CALL_ALL, str(built.path), capability=90).splitlines()
    assert len(said) >= 2 * len(kernels)
    for line in said:
        assert REACHES_CUDA in line, line


CALL_WITH_MEMORY = """
from pathlib import Path
from nvgemm_runtime.gemm.roles import extra_roles
for kernel in bundle.header.kernels:
    library.load(bundle, kernel)  # with the libraries that it needs
    file = Path(sys.argv[1]).with_name(f"{kernel.id}.so")
    file.write_bytes(bundle.payload(kernel))
    function = tvm_ffi.load_module(str(file)).gemm
    parameters = parse_calling_convention(kernel.calling_convention).parameters
    extras = [role.value for role in extra_roles(kernel.signature)]
    given = dict(zip(("a", "b", "out", *extras), tensors(kernel.signature, 16)))
    given |= {"clusters": 132, "stream": ctypes.c_void_p(0)}
    for dtype in (torch.uint8, torch.int32):
        given["workspace"] = on(torch.zeros(1 << 16, dtype=dtype))
        say(kernel, function, *(given[name] for name in parameters))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "served",
    [
        "mm/nt/bf16xbf16/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/add",
        "bmm/tt/fp16xfp16/fp32/fp32/bias_silu",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias",
        "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp32/fp32_tensor",
        "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/swiglu_halves",
        "mm/tn/bf16xbf16/fp32/bf16/swiglu_oai_interleaved",
    ],
)
def test_launchers_take_bytes_that_thread_blocks_share(
    driver: FakeDriver,
    kernel_cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: str,
) -> None:
    """Here the test brings the memory, for the launch API asks torch for memory of a GPU."""
    wanted = Signature.parse(served)
    narrow = "cooperative_cluster1x1x1_tile64x16x{}_swap_ab_split_k{}"
    names = []
    if wanted.a.is_fp8:
        names.append("cooperative_dynamic_cluster2x1x1_tile128x192x128")
    else:
        names.append("pingpong_dynamic_cluster2x1x1_tile128x192x64")
    if not wanted.is_gated:
        names.append(narrow.format(256 if wanted.a.is_fp8 else 128, "4_serial"))
    if wanted.epilogue is None and not wanted.a.is_fp8:
        names.append(narrow.format(128, "4_parallel"))
    family = "quack.GemmGatedSm90" if wanted.is_gated else "quack.GemmDefaultSm90"
    list_only(monkeypatch, tuple(f"{family}_{name}" for name in names))
    manifest = Manifest(
        name="memory",
        description="",
        targets=(build_target("sm_90a", None),),
        declared=(Declared(problem=problem_of(wanted, 16, 768, 16384), candidates=8),),
        providers=("quack",),
    )
    # No other test has this n: their plans, in the same cache, are of other lists of kernels.
    (built,) = build(manifest, tmp_path, kernel_cache).bundles
    said = driver.run(PRELUDE + CALL_WITH_MEMORY, str(built.path), capability=90).splitlines()
    assert len(said) == 2 * len(names)
    for right, wrong in zip(said[::2], said[1::2]):
        assert REACHES_CUDA in right, right
        assert REACHES_CUDA not in wrong, wrong
        assert "workspace" in wrong, wrong
