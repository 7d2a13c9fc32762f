"""What `verify` proves of kernels whose thread blocks share memory, and of how kernels wait."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from typing import Any

import pytest

from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT, STATIC_PERSISTENT
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.verify.device.disassembler import Disassembler, require_disassembler
from nvgemm_aot.verify.device.order import OrderCode, check_order_code, read_order_code
from nvgemm_aot.verify.findings import Check
from nvgemm_aot.verify.kernel_inspection import inspect_kernel
from nvgemm_runtime.bundle.format import ClusterLimit, Kernel, KernelDesign
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.problem import Problem, Signature
from split_designs import list_few

pytestmark = pytest.mark.slow  # real kernels, of designs that nothing else compiles by default

BF16 = Signature.parse("mm/nt/bf16xbf16/fp32/bf16")

Inspected = tuple[Kernel, bytes]


@pytest.fixture(scope="module")
def kernels(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inspected]:
    """Of quack: two that split k, in order or in any, a dynamic schedule, and one of neither."""
    manifest = Manifest(
        name="split",
        description="",
        targets=(build_target("sm_90a", None),),
        declared=(Declared(problem=Problem(signature=BF16, m=16, n=512, k=16384), candidates=8),),
        providers=("quack",),
    )
    with pytest.MonkeyPatch.context() as patch:
        list_few(patch)
        (built,) = build(manifest, tmp_path_factory.mktemp("split"), kernel_cache).bundles
    found = {}
    with Bundle(built.path) as bundle:
        for kernel in bundle.header.kernels:
            name = "whole" if kernel.design.splits == 1 else "ordered"
            name = name if kernel.is_deterministic else "any order"
            name = "dynamic" if kernel.design.scheduler == DYNAMIC_PERSISTENT else name
            found[name] = (kernel, bundle.payload(kernel))
    assert found.keys() == {"whole", "ordered", "any order", "dynamic"}
    return found


class Remembering(Disassembler):
    """Disassembles each kernel once, whatever its entry says."""

    disassemble = functools.cache(Disassembler.disassemble)


@functools.cache
def disassembler() -> Disassembler:
    return Remembering(**asdict(require_disassembler()))


def checks_of(inspected: Inspected, **change: Any) -> dict[Check, str]:
    """What is found of a kernel whose entry is changed; members of the design are named so."""
    kernel, payload = inspected
    design = {key: change.pop(key) for key in [*change] if key in KernelDesign.__dataclass_fields__}
    target = build_target("sm_90a", None)
    _, findings = inspect_kernel(
        replace(kernel, design=replace(kernel.design, **design), **change),
        payload,
        target=target.target,
        profiles=[target.device],
        disassembler=disassembler(),
    )
    return {finding.check: finding.message for finding in findings}


@pytest.mark.parametrize("name", ["whole", "ordered", "any order", "dynamic"])
def test_what_they_say_is_true(kernels: dict[str, Inspected], name: str) -> None:
    assert not checks_of(kernels[name])


def smaller(workspace: TileWorkspace | None, **change: Any) -> TileWorkspace:
    assert workspace is not None
    return replace(workspace, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scratch_per_tile": 0}, "a counter and a partial result take"),
        ({"zeroed_per_tile": 3}, "of which 3 are zeroed"),
        ({"tile": (512, 512)}, "its workspace is for tiles of 512x512"),
        ({"tiles_multiple": (1, 2)}, "rounded up to 1x2"),
    ],
)
def test_finds_a_workspace_that_is_too_small(
    kernels: dict[str, Inspected], change: dict[str, Any], said: str
) -> None:
    kernel, _ = kernels["ordered"]
    found = checks_of(kernels["ordered"], workspace=smaller(kernel.workspace, **change))
    assert found.keys() == {Check.WORKSPACE}
    assert said in found[Check.WORKSPACE]


def test_finds_a_counter_that_nobody_zeroes(kernels: dict[str, Inspected]) -> None:
    kernel, _ = kernels["dynamic"]
    scratch = smaller(kernel.workspace, zeroed_once=0, scratch_per_tile=64)
    for change in (
        {"workspace": scratch},
        {"workspace": smaller(kernel.workspace, zeroed_once=3)},
        {"workspace": None, "workspace_bytes": 128},
    ):
        found = checks_of(kernels["dynamic"], **change)
        assert found.keys() == {Check.WORKSPACE}
        assert "takes tiles from a counter of 4" in found[Check.WORKSPACE]


def test_finds_partial_results_that_are_not_zeroed(kernels: dict[str, Inspected]) -> None:
    kernel, _ = kernels["any order"]
    assert kernel.workspace is not None
    per_tile = kernel.workspace.zeroed_per_tile
    like_ordered = smaller(
        kernel.workspace, zeroed_once=0, zeroed_per_tile=4, scratch_per_tile=per_tile - 4
    )
    found = checks_of(kernels["any order"], workspace=like_ordered)
    assert found.keys() == {Check.WORKSPACE}
    no_gap = smaller(kernel.workspace, zeroed_once=0)
    assert "plus 128" in checks_of(kernels["any order"], workspace=no_gap)[Check.WORKSPACE]


@pytest.mark.parametrize(
    ("name", "change", "checks"),
    [
        ("any order", {"is_deterministic": True}, {Check.DETERMINISM}),
        ("ordered", {"is_deterministic": False}, {Check.DETERMINISM, Check.WORKSPACE}),
        ("whole", {"is_deterministic": False}, {Check.DETERMINISM}),
        ("ordered", {"splits": 1}, {Check.SPLITS}),
        ("whole", {"splits": 2}, {Check.SPLITS}),
        ("dynamic", {"scheduler": STATIC_PERSISTENT}, {Check.SCHEDULER}),
        ("whole", {"scheduler": DYNAMIC_PERSISTENT}, {Check.SCHEDULER, Check.WORKSPACE}),
        ("ordered", {"scheduler": DYNAMIC_PERSISTENT}, {Check.SCHEDULER}),
        ("dynamic", {"is_deterministic": False}, {Check.DETERMINISM}),
        ("dynamic", {"splits": 2}, {Check.SPLITS, Check.WORKSPACE}),
        ("dynamic", {"workspace": None}, {Check.WORKSPACE}),
        ("whole", {"dependent_launch": False}, {Check.DEPENDENT_LAUNCH}),
        (
            "whole",
            {"cluster_limits": (ClusterLimit(cluster_size=1, max_active=132, basis="measured"),)},
            {Check.CLUSTER_LIMITS},
        ),
        (
            "whole",
            {"calling_convention": "tvm_ffi:gemm(a,b,out,stream)"},
            {Check.OPERANDS, Check.CLUSTER_LIMITS},
        ),
        ("ordered", {"workspace": None, "workspace_bytes": 1 << 30}, {Check.SPLITS}),
        (
            "ordered",
            {"workspace": None},
            {Check.SPLITS, Check.WORKSPACE},
        ),
    ],
)
def test_finds_entries_that_their_code_contradicts(
    kernels: dict[str, Inspected], name: str, change: dict[str, Any], checks: set[Check]
) -> None:
    assert checks_of(kernels[name], **change).keys() == checks


def of_another(name: str, kernels: dict[str, Inspected]) -> Inspected:
    kernel, payload = kernels[name]
    return replace(kernel, provider="another"), payload


def test_another_provider_may_share_a_sum_in_its_own_way(kernels: dict[str, Inspected]) -> None:
    """Such as by slots that the last thread block adds up, in memory of its own size."""
    ordered, in_any_order = of_another("ordered", kernels), of_another("any order", kernels)
    for room in ({"tile": (512, 512)}, {"zeroed_per_tile": 0, "scratch_per_tile": 1}):
        assert not checks_of(ordered, workspace=smaller(ordered[0].workspace, **room))
    no_gap = smaller(in_any_order[0].workspace, zeroed_once=0)
    assert not checks_of(in_any_order, workspace=no_gap)
    whole = of_another("whole", kernels)
    assert not checks_of(whole, splits=2, is_deterministic=False)


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        ("any order", {"is_deterministic": True}, Check.DETERMINISM),
        ("ordered", {"splits": 1}, Check.SPLITS),
        ("whole", {"dependent_launch": False}, Check.DEPENDENT_LAUNCH),
    ],
)
def test_what_code_contradicts_is_found_of_another_provider_too(
    kernels: dict[str, Inspected], name: str, change: dict[str, Any], check: Check
) -> None:
    assert checks_of(of_another(name, kernels), **change).keys() == {check}


DESIGN = KernelDesign(
    tile=(64, 64, 64),
    ctas_per_tile=1,
    cluster=(1, 1),
    fallback_cluster=None,
    scheduler=STATIC_PERSISTENT,
)


def test_another_provider_may_begin_early_or_not_if_it_says_so() -> None:
    code = OrderCode(adds_floats=False, counts=False, draws=False, waits=False, signals=True)
    assert not [*check_order_code(code, DESIGN, is_deterministic=True)]
    early = replace(DESIGN, dependent_launch=True)
    (finding,) = check_order_code(code, early, is_deterministic=True)
    assert "never waits for the kernel ahead of it" in finding.message


@pytest.mark.parametrize(
    ("opcodes", "seen"),
    [
        (["REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU"], {"adds_floats"}),
        (["REDG.E.ADD.F32.FTZ.RN.STRONG.GPU", "STG.E.STRONG.GPU"], {"adds_floats"}),
        (["RED.E.ADD.F16x2.RN.STRONG.GPU"], {"adds_floats"}),
        (
            ["ATOMG.E.ADD.BF16x2.STRONG.GPU", "REDG.E.ADD.S32.STRONG.GPU"],
            {"adds_floats", "counts"},
        ),
        (["ATOMG.E.INC.STRONG.GPU"], {"counts", "draws"}),
        (["ATOM.E.ADD.STRONG.GPU"], {"counts", "draws"}),
        (["REDG.E.ADD.STRONG.GPU"], {"counts"}),
        (["SYNCS.ARRIVE.TRANS64.RED.A1T0", "FADD", "REDUX.SUM.S32", "CREDUX.MAX"], set()),
    ],
)
def test_reads_what_is_added_in_memory(opcodes: list[str], seen: set[str]) -> None:
    code = read_order_code([(opcode, "") for opcode in opcodes])
    assert {name for name, is_seen in asdict(code).items() if is_seen} == seen


def test_what_a_counter_of_another_provider_is_for_is_not_known() -> None:
    """Of kernels that `verify` does not know, what no instruction shows is a note."""
    code = OrderCode(adds_floats=False, counts=True, draws=True, waits=False, signals=False)
    (finding,) = check_order_code(code, DESIGN, is_deterministic=True)
    assert finding.check is Check.SCHEDULER
    assert finding.is_unseen
    dynamic = replace(DESIGN, scheduler=DYNAMIC_PERSISTENT)
    assert not [*check_order_code(code, dynamic, is_deterministic=True)]


LOAD, ADD, STORE = "LDG.E.STRONG.GPU", "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU", "STG.E.STRONG.GPU"


@pytest.mark.parametrize(
    ("opcodes", "is_in_order"),
    [
        ([LOAD, ADD, STORE], True),
        ([LOAD, ADD, STORE, LOAD, STORE], True),
        ([ADD], False),
        ([LOAD, ADD], False),
        ([ADD, LOAD, STORE], False),
        (["LDG.E.128", ADD, "STG.E"], False),
        (["LDG.E.STRONG.SM", ADD, STORE], False),
        ([LOAD, ADD, STORE, "REDG.E.ADD.S32.STRONG.GPU"], False),
    ],
)
def test_believes_that_sums_have_an_order_only_where_the_code_shows_turns(
    opcodes: list[str], is_in_order: bool
) -> None:
    code = read_order_code([(opcode, "") for opcode in opcodes])
    design = replace(DESIGN, splits=2)
    for is_deterministic in (True, False):
        found = [*check_order_code(code, design, is_deterministic=is_deterministic)]
        wanted = [] if is_deterministic is is_in_order else [Check.DETERMINISM]
        assert [finding.check for finding in found] == wanted


def test_reads_the_two_instructions_of_dependent_launches() -> None:
    code = read_order_code([("ACQBULK", ""), ("PREEXIT", "")])
    assert code.waits
    assert code.signals
