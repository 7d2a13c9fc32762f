"""The provider quack: groups whose rows of A are gathered, by which designs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.target import ARCHITECTURES
from verified_builds import builds_verified_and_equal

HOPPER = "sm_90a"

OP = "gathered_grouped_mm"
EPILOGUES = [
    None,
    Epilogue.BIAS,
    *(one for one in Epilogue if one.form is not None and not one.form.is_gradient),
]


def signature_of(
    epilogue: Epilogue | None, layout: str = "tn", dtype: str = "bf16", out: str = ""
) -> Signature:
    rest = "" if epilogue is None else f"/{epilogue.value}"
    return Signature.parse(f"{OP}/{layout}/{dtype}x{dtype}/fp32/{out or dtype}{rest}")


def offered(signature: Signature, arch: str) -> tuple[Candidate, ...]:
    found = Quack().enumerate(signature, build_target(arch))
    assert found.absence is None, found.absence
    return found.candidates


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_offers_designs_of_groups_that_can_gather(arch: str, epilogue: Epilogue | None) -> None:
    signature = signature_of(epilogue, dtype="fp16")
    of_groups = offered(Signature.parse(signature.key.removeprefix("gathered_")), arch)
    found = offered(signature, arch)
    assert len({one.operator for one in found}) == len(found) >= 15
    added = "addend," if epilogue is not None and epilogue.addend else ""
    told = "clusters," if arch == HOPPER else ""
    for one in found:
        assert one.operator.startswith("quack.GemmGatheredGrouped")
        assert one.calling_convention == f"tvm_ffi:gemm(a,b,offsets,rows,{added}out,{told}stream)"
        convention = parse_calling_convention(one.calling_convention)
        assert convention is not None
        assert convention.misfit(signature, one.has_workspace) is None
        assert one.design.cluster[1] == 1
        assert not one.has_workspace
        # On Blackwell, a warp reads numbers of rows before it could wait for what wrote them.
        assert one.design.dependent_launch is (arch == HOPPER)
        if arch == HOPPER:
            assert one.design.tile[1] != 208
            assert one.design.tile[:2] not in ((256, 192), (192, 128)), "which spill"
    tiles = {(one.design.tile, one.design.cluster, one.traits) for one in of_groups}
    assert {(one.design.tile, one.design.cluster, one.traits) for one in found} <= tiles


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("tn/fp8_e4m3xfp8_e4m3/fp32/bf16", "takes no fp8_e4m3, but fp16, bf16"),
        ("tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row", "takes no scales (here fp32_row)"),
        ("nn/bf16xbf16/fp32/bf16", "has layout tn or tt alone (here nn)"),
        ("tn/bf16xbf16/fp32/bf16/add", "gated ones other than gradients (here add)"),
        ("tn/bf16xbf16/fp32/bf16/bias_relu", "here bias_relu"),
        ("tt/bf16xbf16/fp32/bf16/swiglu_halves", "B column-major alone, layout tn (here tt)"),
        (
            "tn/bf16xbf16/fp32/bf16/swiglu_halves_gradient",
            "gated ones other than gradients (here swiglu_halves_gradient)",
        ),
    ],
)
def test_says_why_it_offers_nothing(rest: str, reason: str) -> None:
    found = Quack().enumerate(Signature.parse(f"{OP}/{rest}"), build_target(HOPPER))
    assert not found.candidates
    assert reason in str(found.absence)


@pytest.mark.parametrize("name", ["cutlass_operators", "gathered"])
def test_other_providers_offer_none(name: str) -> None:
    found = load_provider(name).enumerate(signature_of(None), build_target("sm_100f"))
    assert not found.candidates
    assert found.absence is not None
    if name == "cutlass_operators":
        assert "quack has such kernels: add it" in found.absence


@pytest.mark.parametrize(
    ("epilogue", "parts"),
    [
        (None, ["groups", "gathered"]),
        (Epilogue.BIAS, ["groups", "gathered", "epilogue"]),
        (Epilogue.SWIGLU_HALVES_KEPT, ["gate", "groups", "gathered"]),
        (Epilogue.SWIGLU_HALVES_UPS, ["gate", "gradient", "ups", "groups", "gathered"]),
    ],
)
def test_cache_keys_hold_the_source_of_every_part(
    epilogue: Epilogue | None, parts: list[str]
) -> None:
    (code,) = {one.added_code for one in offered(signature_of(epilogue), HOPPER)}
    assert [part.split()[0] for part in code.split(", ")] == parts


MANIFEST = """
version: 1
name: gathered
targets: [{arch}]
providers: [quack]
candidates: 1
defaults: {{op: gathered_grouped_mm, dtype: bf16}}
gemms:
  - {{groups: 8, epilogue: [none, bias, swiglu_halves, swiglu_halves_ups], mnk: [[4096, 512, 512]]}}
  - {{groups: 8, layout: tt, epilogue: swiglu_oai_interleaved_kept, mnk: [[4096, 512, 512]]}}
  - {{groups: 8, dtype: fp16, out: fp32, mnk: [[64, 512, 512]]}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_kernels_compile_verify_and_come_out_equal(tmp_path: Path, arch: str) -> None:
    builds_verified_and_equal(MANIFEST.format(arch=arch), tmp_path)


WIDEST = (
    "cooperative_cluster2x1x1_tile256x160x64",
    "cooperative_cluster1x1x1_tile128x256x64",
    "pingpong_cluster2x1x1_tile128x192x64",
)
"""With the fewest registers left: tall, and with the most sums of a thread."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epilogue", "layout", "dtype", "out"),
    [
        (None, "tt", "fp16", "fp32"),
        (Epilogue.BIAS, "tn", "bf16", "fp32"),
        (Epilogue.SWIGLU_OAI_HALVES, "tn", "bf16", "bf16"),
        (Epilogue.GEGLU_HALVES_KEPT, "tn", "fp16", "fp16"),
        (Epilogue.GEGLU_INTERLEAVED_KEPT, "tt", "bf16", "bf16"),
        (Epilogue.GEGLU_HALVES_UPS, "tt", "bf16", "bf16"),
    ],
)
def test_the_widest_spill_no_registers(
    kernel_cache: Cache, epilogue: Epilogue | None, layout: str, dtype: str, out: str
) -> None:
    """One that spills is a failure of the build."""
    found = offered(signature_of(epilogue, layout, dtype, out), HOPPER)
    widest = [one for one in found if one.operator.endswith(WIDEST)]
    assert widest
    tasks = make_tasks(widest, build_target(HOPPER), Quack())
    assert not compile_all(tasks, kernel_cache, jobs=2).failures
