"""Quack's kernels that tests compile: each class, type, layout, epilogue and way to share memory.

Which of a signature's designs stands here is no accident: both sides of a class's switches (swapped
or not, cooperative or pingpong, whole or split), and of gates those with the fewest registers left,
which spill first.
"""

from __future__ import annotations

from pathlib import Path

from nvgemm_aot.bundle.content import BuiltKernel
from nvgemm_aot.pipeline.compiler import Task, compile_all, make_tasks
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import Signature
from row_kernels import write_kernels

_NARROW = "cooperative_cluster1x1x1_tile64x16x128_swap_ab"
_NARROW_FP8 = "cooperative_cluster1x1x1_tile64x16x256_swap_ab"
_PINGPONG = "pingpong_cluster2x1x1_tile128x192x64"
_DYNAMIC = "pingpong_dynamic_cluster2x1x1_tile128x192x64"
_DYNAMIC_FP8 = "cooperative_dynamic_cluster2x1x1_tile128x192x128"
_TALL = "cooperative_cluster2x1x1_tile256x160x64"
_WIDE = "cooperative_cluster1x1x1_tile128x256x64"
_WIDEST_UPS = ("cooperative_cluster1x1x1_tile256x128x64", "pingpong_cluster1x1x1_tile128x208x64")
"""With the most sums of a thread in the library's steps, 128, and in narrow ones, 208."""

_PAIR = "clc_cluster2x1x1_tile256x224x64"
_PAIR_FP8 = "clc_cluster2x1x1_tile256x224x128"
_SWAPPED = "clc_cluster1x1x1_tile128x128x64_swap_ab"

_BF16, _FP16, _E4M3, _E5M2 = (
    f"{one}x{one}/fp32/{out}"
    for one, out in (("bf16", "bf16"), ("fp16", "fp16"), ("fp8_e4m3", "bf16"), ("fp8_e5m2", "fp16"))
)
_FP16_INTO_FP32 = "fp16xfp16/fp32/fp32"

_HOPPER_DENSE = {
    f"mm/tn/{_BF16}": (
        _NARROW,
        "cooperative_cluster1x1x1_tile128x240x64_swap_ab",
    ),
    f"mm/nt/{_BF16}": (
        f"{_NARROW}_split_k4_serial",
        f"{_NARROW}_split_k4_parallel",
        _DYNAMIC,
    ),
    f"mm/tt/{_BF16}": (_PINGPONG,),
    f"mm/nn/{_BF16}": (f"{_PINGPONG}_swap_ab",),
    f"mm/tn/{_BF16}/bias": (_PINGPONG,),
    f"mm/tn/{_BF16}/add": (f"{_NARROW}_split_k2_serial", f"{_DYNAMIC}_swap_ab"),
    f"bmm/tt/{_BF16}/bias_gelu_tanh": (_NARROW,),
    f"bmm/tn/{_FP16}/add": (_NARROW,),
    "bmm/tn/bf16xbf16/fp32/fp16": ("cooperative_cluster1x2x1_tile128x256x64_swap_ab",),
    f"bmm/tt/{_FP16_INTO_FP32}/bias_silu": (f"{_NARROW}_split_k4_serial",),
    "mm/tn/fp16xfp16/fp32/fp8_e4m3/bias_relu": (_NARROW,),
    f"mm/tn/{_E4M3}/fp32_tensor": ("cooperative_cluster2x1x1_tile128x192x128",),
    f"mm/tn/{_E4M3}/fp32_row/bias": (
        f"{_NARROW_FP8}_split_k2_serial",
        _DYNAMIC_FP8,
    ),
    f"mm/tn/{_E5M2}/fp32_tensor": (f"{_NARROW_FP8}_split_k2_serial",),
    "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor": (f"{_DYNAMIC_FP8}_swap_ab",),
    f"mm/tn/{_BF16}/swiglu_halves": (_WIDE, _DYNAMIC),
    f"mm/tn/{_BF16}/swiglu_oai_halves": (_PINGPONG,),
    f"mm/tn/{_BF16}/geglu_interleaved": ("cooperative_cluster2x1x1_tile256x192x64",),
}
_HOPPER_GROUPS = {
    f"grouped_mm/tn/{_BF16}": ("cooperative_cluster2x1x1_tile256x208x64",),
    f"grouped_mm/tt/{_FP16_INTO_FP32}": ("cooperative_cluster1x1x1_tile256x128x64",),
    f"grouped_mm/tn/{_BF16}/bias": (_WIDE,),
    f"grouped_mm/tn/{_BF16}/add": (_WIDE,),
    f"k_grouped_mm/nt/{_BF16}": (_PINGPONG, _DYNAMIC),
    f"grouped_mm/tn/{_E4M3}": ("cooperative_cluster1x1x1_tile128x192x128",),
    f"grouped_mm/tn/{_E4M3}/fp32_row": ("pingpong_cluster1x1x1_tile128x96x128",),
    f"grouped_mm/tn/{_BF16}/swiglu_halves": (_PINGPONG,),
    f"grouped_mm/tn/{_BF16}/swiglu_oai_halves": (_TALL,),
    f"grouped_mm/tt/{_BF16}/geglu_interleaved": (_WIDE,),
    f"grouped_mm/tn/{_BF16}/swiglu_halves_kept": (_PINGPONG,),
    f"grouped_mm/tn/{_BF16}/geglu_interleaved_kept": ("pingpong_cluster2x1x1_tile128x160x64",),
    f"grouped_mm/tn/{_BF16}/swiglu_oai_interleaved_gradient": (_PINGPONG,),
    f"grouped_mm/tn/{_BF16}/geglu_halves_gradient": (_PINGPONG,),
    f"grouped_mm/tn/{_BF16}/swiglu_oai_halves_gradient_sums": (_TALL,),
    f"grouped_mm/tn/{_BF16}/geglu_interleaved_gradient_sums": (
        "pingpong_cluster2x1x1_tile128x160x64",
    ),
    f"grouped_mm/tn/{_BF16}/swiglu_halves_ups": _WIDEST_UPS,
    f"grouped_mm/tn/{_BF16}/geglu_halves_ups": _WIDEST_UPS[:1],
}
_HOPPER_GATHERED = {
    f"gathered_grouped_mm/tt/{_FP16_INTO_FP32}": (_TALL,),
    "gathered_grouped_mm/tn/bf16xbf16/fp32/fp32/bias": (_WIDE,),
    f"gathered_grouped_mm/tn/{_BF16}/swiglu_oai_halves": (_TALL, _PINGPONG),
    f"gathered_grouped_mm/tt/{_BF16}/swiglu_oai_interleaved_kept": (_WIDE,),
    f"gathered_grouped_mm/tn/{_FP16}/geglu_halves_kept": (_TALL,),
    f"gathered_grouped_mm/tt/{_BF16}/geglu_interleaved_kept": (_WIDE,),
    f"gathered_grouped_mm/tt/{_BF16}/geglu_halves_ups": (_TALL, _PINGPONG),
}
_BLACKWELL = {
    f"mm/tn/{_BF16}": (_PAIR, _SWAPPED),
    f"mm/nt/{_BF16}": ("clc_cluster1x1x1_tile128x16x64_swap_ab_split_k4_serial",),
    f"mm/nt/{_BF16}/bias_relu": ("clc_cluster2x1x1_tile256x128x64_split_k2_serial",),
    f"mm/tn/{_BF16}/add": (_PAIR,),
    f"bmm/tn/{_FP16_INTO_FP32}/bias_gelu_tanh": (_PAIR,),
    f"mm/tn/{_E4M3}": ("clc_cluster1x1x1_tile128x128x128_swap_ab",),
    "mm/nt/fp8_e5m2xfp8_e5m2/fp32/fp32": (_PAIR_FP8,),
    "mm/tn/bf16xbf16/fp32/fp8_e5m2": (_PAIR,),
    f"mm/tn/{_E5M2}/fp32_tensor": ("clc_cluster2x1x1_tile128x192x128_swap_ab",),
    f"mm/tn/{_E4M3}/fp32_row/bias": (_PAIR_FP8,),
    f"mm/tn/{_BF16}/geglu_interleaved": ("clc_cluster2x1x1_tile256x256x64",),
    f"mm/tn/{_BF16}/swiglu_oai_halves": ("clc_cluster1x1x1_tile128x256x64",),
    f"grouped_mm/tt/{_FP16_INTO_FP32}": ("clc_cluster1x1x1_tile128x128x64",),
    f"k_grouped_mm/nt/{_BF16}": (_PAIR,),
    f"grouped_mm/tn/{_E4M3}/fp32_row": (_PAIR_FP8,),
    **{
        f"grouped_mm/{layout}/{_BF16}/{epilogue}": (_PAIR,)
        for layout, epilogue in (
            ("tn", "bias"),
            ("tn", "swiglu_oai_halves"),
            ("tt", "geglu_interleaved"),
            ("tn", "geglu_halves_kept"),
            ("tn", "swiglu_oai_halves_gradient"),
            ("tn", "geglu_halves_gradient_sums"),
            ("tn", "swiglu_halves_ups"),
        )
    },
    f"gathered_grouped_mm/tn/{_FP16_INTO_FP32}": ("clc_cluster1x1x1_tile128x128x64",),
    **{
        f"gathered_grouped_mm/{layout}/{_BF16}/{epilogue}": (_PAIR,)
        for layout, epilogue in (
            ("tn", "swiglu_halves"),
            ("tn", "swiglu_halves_ups"),
            ("tt", "swiglu_oai_interleaved_kept"),
        )
    },
}
_OTHER_BLACKWELL = {
    f"mm/tn/{_BF16}/bias_relu": (_SWAPPED,),
    f"mm/tn/{_E4M3}/fp32_row/bias": (_PAIR_FP8,),
}

KERNELS = {
    "sm_90a": _HOPPER_DENSE | _HOPPER_GROUPS | _HOPPER_GATHERED,
    "sm_100f": _BLACKWELL,
    "sm_100a": _OTHER_BLACKWELL,
    "sm_103a": _OTHER_BLACKWELL,
}
"""By architecture and signature: the ends of operators' names."""


def make_all_tasks() -> list[Task]:
    """A task for each of `KERNELS`."""
    tasks: list[Task] = []
    provider = Quack()
    for arch, designs in KERNELS.items():
        target = build_target(arch)
        for key, ends in designs.items():
            offered = provider.enumerate(Signature.parse(key), target).candidates
            for end in ends:
                named = [one for one in offered if one.operator.partition("_")[2] == end]
                assert len(named) == 1, f"{arch} {key} {end} is {len(named)} of {len(offered)}"
                tasks += make_tasks(named, target, provider)
    return tasks


def compile_bundles(tasks: list[Task], cache: Cache, directory: Path) -> dict[str, Path]:
    """Compile all, and write a bundle of each architecture's."""
    compiled = compile_all(tasks, cache, jobs=1)
    assert not compiled.failures, [failure.reason for failure in compiled.failures]
    return {
        arch: write_kernels(
            directory,
            arch,
            [
                BuiltKernel(**task.candidate.facts(), payload=compiled.kernels[task.key].payload)
                for task in tasks
                if task.target.target.arch == arch
            ],
        )
        for arch in KERNELS
    }
