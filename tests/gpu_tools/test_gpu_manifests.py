"""The manifests of tests/gpu: together they have every row of the support table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import provider_of
from nvgemm_aot.pipeline.target_plan import look_up_plan, make_plan
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT, STATIC_PERSISTENT
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, BIAS
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.support import unavailable
from nvgemm_runtime.gemm.types import ScaleRecipe
from repository import TESTS

DIRECTORY = TESTS / "gpu"
UNGATED = [one for one in EVERY_SIGNATURE if not one.is_gated]
"""All but the rows of gated epilogues, whose manifest is ``gated.yaml``."""


def declared(*names: str) -> set[Signature]:
    manifests = [load_manifest(DIRECTORY / f"{name}.yaml") for name in names]
    return {entry.problem.signature for manifest in manifests for entry in manifest.declared}


def rows(signatures: Iterable[Signature]) -> set[tuple[object, ...]]:
    """What a signature has in pairs and triples: all of it would be a thousand kernels."""
    found: set[tuple[object, ...]] = set()
    for one in signatures:
        if one.a is not one.b:  # the same kernels, with another instruction
            found |= {(one.a, one.b), ("two types", one.scales)}
            continue
        found.add((one.op, one.a, one.scales, one.out))
        found.add((one.op, one.a, one.scales, one.layout))
        found.add((one.op, one.a, one.scales, one.epilogue))
    return found


def test_blackwell_has_every_row() -> None:
    there = declared("every_row_sm100", "int8_sm100", "gated", "grouped")
    assert there <= set(EVERY_SIGNATURE)
    compiled = {one for one in EVERY_SIGNATURE if unavailable(one, "sm_100f") is None}
    assert rows(compiled) - rows(there) == set()


def is_plain(one: Signature) -> bool:
    return one.scales is None and one.epilogue is None


def is_of_the_usual_provider(one: Signature) -> bool:
    return is_plain(one) and one.a is one.b and not one.op.has_groups


def test_hopper_has_every_signature_that_it_compiles() -> None:
    """No block scales, and no groups of fp8; types of 8 bits in tn alone, and integers plain.

    Groups and fp8 of two types are another provider's than the plain kernels of ``every_kind``.
    """
    compiled = {one for one in EVERY_SIGNATURE if unavailable(one, "sm_90a") is None}
    assert declared("every_kind") == {one for one in compiled if is_of_the_usual_provider(one)}
    there = declared("every_kind", "hopper_rows", "gated", "grouped")
    assert there <= compiled
    assert rows(compiled) - rows(there) == set()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("every_kind", "sm_90a"),
        ("quack", "sm_90a"),
        ("hopper_rows", "sm_90a"),
        ("every_row_sm100", "sm_100f"),
        ("int8_sm100", "sm_100a"),
        ("quack_sm100", "sm_100f"),
    ],
)
def test_each_is_for_one_target(name: str, arch: str) -> None:
    manifest = load_manifest(DIRECTORY / f"{name}.yaml")
    assert [target.arch for target in manifest.bundle_targets] == [arch]
    assert manifest.name == name.replace("_", "-")


def test_fp8_of_quack_is_tested_on_blackwell() -> None:
    target, provider = build_target("sm_100f"), Quack()
    there = declared("quack_sm100")
    assert all(provider.enumerate(one, target).candidates for one in there)
    narrow = {
        one
        for one in UNGATED
        if not one.op.has_groups
        and min(one.a.bits, one.out.bits) == 8
        and provider.enumerate(one, target).candidates
    }

    def kinds(signatures: Iterable[Signature]) -> set[tuple[object, ...]]:
        found: set[tuple[object, ...]] = set()
        for one in signatures:
            found |= {(one.a, one.out), (one.a, one.scales)}
            if one.a.is_fp8:
                found |= {(one.a, one.layout), (one.op, one.a), (one.a, one.epilogue)}
        return found

    assert kinds(narrow) == kinds(there)


@pytest.mark.slow
def test_quack_is_tested_in_every_design_and_every_plain_signature() -> None:
    manifest = load_manifest(DIRECTORY / "quack.yaml")
    everywhere = build_target("sm_90a")
    provider = Quack()
    plain = {one for one in UNGATED if provider.enumerate(one, everywhere).candidates}
    wide = {one for one in plain if is_plain(one) and min(one.a.bits, one.out.bits) >= 16}
    assert wide <= declared("quack", "grouped")
    for entry in manifest.declared:
        listed = provider.enumerate(entry.problem.signature, everywhere).candidates
        assert entry.candidates < 16 or len(listed) <= entry.candidates


@pytest.mark.slow
def test_split_k_has_every_way_in_which_thread_blocks_share_memory(tmp_path: Path) -> None:
    """With and without epilogues and scales; what no problem's candidates keep is not tested."""
    manifest = load_manifest(DIRECTORY / "split_k.yaml")
    target, *_ = manifest.targets
    cache = Cache(tmp_path)
    lookup = look_up_plan(manifest.declared, target, load_provider("quack"), cache)
    sharing = [one for one in make_plan(lookup, cache).candidates if one.has_workspace]
    found = {
        (one.design.scheduler, one.design.splits > 1, one.is_deterministic, one.signature.op)
        for one in sharing
    }
    static = STATIC_PERSISTENT
    assert found >= {
        *((static, True, True, op) for op in (Op.MM, Op.BMM)),
        *((DYNAMIC_PERSISTENT, False, True, op) for op in (Op.MM, Op.BMM)),
        (static, True, False, Op.MM),
    }
    split = [one.signature for one in sharing if one.design.splits > 1]
    assert {*EPILOGUES_OF_HOPPER} <= {one.epilogue for one in split}
    assert {one.scales for one in split} == {None, *FP32_SCALES}
    assert {one.epilogue for one in split if one.scales is not None} == {None, BIAS}
    everything = Quack().enumerate(PLAIN, target).candidates
    dynamic = {one for one in everything if one.design.scheduler == DYNAMIC_PERSISTENT}
    assert dynamic <= {*sharing}


@pytest.mark.slow
def test_dynamic_schedules_of_gates_and_of_fp8_are_tested(tmp_path: Path) -> None:
    cache, dynamic = Cache(tmp_path), []
    for name in ("gated", "hopper_rows"):
        manifest = load_manifest(DIRECTORY / f"{name}.yaml")
        target, *_ = (one for one in manifest.targets if one.target.arch == "sm_90a")
        plan = make_plan(
            look_up_plan(manifest.declared, target, provider_of(manifest), cache), cache
        )
        dynamic += [one for one in plan.candidates if one.design.scheduler == DYNAMIC_PERSISTENT]
    gated = {one.signature.epilogue for one in dynamic if one.signature.is_gated}
    assert {epilogue.addend is None for epilogue in gated if epilogue is not None} == {True, False}
    tiles = {one.block_shape for one in dynamic if one.signature.is_gated}
    assert len(tiles) >= 4
    fp8 = [one for one in dynamic if one.signature.a.is_fp8]
    assert {one.signature.scales for one in fp8} == {*FP32_SCALES}


EPILOGUES_OF_HOPPER = tuple(one for one in ALL_EPILOGUES if one.gate is None)
FP32_SCALES = (ScaleRecipe.FP32_ROW, ScaleRecipe.FP32_TENSOR)
PLAIN = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
