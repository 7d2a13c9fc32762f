"""The provider gathered: what it lists and refuses, how it ranks, and what its kernels are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.pipeline.select_candidates import select
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.checking.checked import Checked
from nvgemm_aot.providers.gathered import TILES, Gathered
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_aot.verify.device.cubin import read_cubins
from nvgemm_aot.verify.device.disassembler import require_disassembler
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.target import ARCHITECTURES

KEYS = ("gathered_mm/tt/fp32xbf16/fp32/bf16", "gathered_mm/tt/fp32xfp16/fp32/fp16")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("key", KEYS)
def test_offers_every_design_on_every_target(arch: str, key: str) -> None:
    signature = Signature.parse(key)
    # Held to what is asked of the providers of other packages.
    found = Checked(Gathered(), "gathered").enumerate(signature, build_target(arch))
    assert found.absence is None
    assert [one.operator for one in found.candidates] == [
        "gathered.GatheredMm_tile1x1024x1",
        "gathered.GatheredMm_tile1x1024x4",
    ]
    for one in found.candidates:
        assert one.calling_convention == "tvm_ffi:gemm(a,b,rows,out,stream)"
        convention = parse_calling_convention(one.calling_convention)
        assert convention is not None
        assert convention.misfit(signature, one.has_workspace) is None
        assert one.alignment_bytes == 16
        assert not one.has_workspace


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("mm/tn/bf16xbf16/fp32/bf16", "gathered computes gathered_mm alone (here mm)"),
        ("grouped_mm/tt/bf16xbf16/fp32/bf16", "gathered_mm alone (here grouped_mm)"),
        ("gathered_mm/tt/bf16xbf16/fp32/bf16", "here bf16 by bf16"),
        ("gathered_mm/tt/fp32xfp32/fp32/fp32", "here fp32 by fp32"),
        ("gathered_mm/tt/fp32xbf16/fp32/fp32", "gives B's type, bf16 (here fp32)"),
        ("gathered_mm/tn/fp32xbf16/fp32/bf16", "has layout tt alone (here tn)"),
        ("gathered_mm/tt/fp32xbf16/fp32/bf16/bias", "has no epilogue (here bias)"),
    ],
)
def test_says_why_it_offers_nothing(key: str, reason: str) -> None:
    found = Gathered().enumerate(Signature.parse(key), build_target("sm_90a"))
    assert not found.candidates
    assert found.absence is not None
    assert reason in found.absence


def test_other_providers_offer_no_such_sums() -> None:
    for name in ("cutlass_operators", "quack"):
        found = load_provider(name).enumerate(Signature.parse(KEYS[0]), build_target("sm_90a"))
        assert not found.candidates
        assert found.absence is not None


def ranked(provider: str, sizes: str) -> list[str]:
    """Tiles of the designs that are chosen for a problem, best first."""
    target, source = build_target("sm_90a", "H100"), load_provider(provider)
    problem = Problem.parse(f"{KEYS[0]}/{sizes}")
    found = source.enumerate(problem.signature, target).candidates
    chosen = select(problem, found, source.runtime_model(target).estimate_ns, limit=8).choices
    return [one.candidate.operator.rpartition("_tile")[2] for one in chosen]


@pytest.mark.parametrize("provider", ["gathered", "cutlass_operators+quack+gathered"])
@pytest.mark.parametrize("sizes", ["m64n2880k4", "m98304n2880k1"])
def test_the_usual_design_comes_first(provider: str, sizes: str) -> None:
    """No model has an estimate of these kernels."""
    assert ranked(provider, sizes) == ["x".join(map(str, tile)) for tile in TILES]


def test_listing_imports_no_compiler() -> None:
    program = (
        "import sys\n"
        "from nvgemm_aot.providers import load_provider\n"
        "from nvgemm_aot.targets import build_target\n"
        "from nvgemm_runtime.gemm.problem import Signature\n"
        "provider, target = load_provider('gathered'), build_target('sm_90a')\n"
        f"assert provider.enumerate(Signature.parse({KEYS[0]!r}), target).candidates\n"
        "assert 'cutlass' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


MANIFEST = """\
version: 1
name: gathered
providers: [gathered]
candidates: 4
targets: [{targets}]
gemms: [{{op: gathered_mm, dtype: [{dtypes}], mnk: [[24576, 2880, 4]]}}]
"""

_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:[0-9]+|T)\s+)?([A-Z][A-Za-z0-9_.]*)", re.MULTILINE
)


def instructions(targets: str, dtypes: str, path: Path, cache: Cache) -> dict[str, Counter[str]]:
    """Build every design and verify it; by target and operator, its instructions."""
    (path / "gathered.yaml").write_text(MANIFEST.format(targets=targets, dtypes=dtypes))
    found = {}
    for one in build(load_manifest(path / "gathered.yaml"), path / "out", cache).bundles:
        assert not one.failures
        report = verify_bundle(one.path, disassemble=True)
        assert report.ok, report.findings
        for evidence in report.kernels:
            assert not evidence.instructions  # neither of tensor cores nor of local memory
            assert not evidence.local_bytes
            assert not evidence.static_shared_bytes
            assert not evidence.unseen
            assert evidence.registers is not None
            assert evidence.registers <= (40 if evidence.operator.endswith("x1") else 64)
            assert evidence.alignment_bytes == (4, 16)
        with Bundle(one.path) as bundle:
            for kernel in one.header.kernels:
                [cubin] = read_cubins(bundle.payload(kernel))
                assert [function.shared_bytes for function in cubin.kernels] == [0]
                text = require_disassembler().disassemble(cubin.content)
                name = f"{one.header.target.key} {kernel.signature.key} {kernel.operator}"
                found[name] = Counter(_INSTRUCTION.findall(text))
    return found


def check_instructions(found: dict[str, Counter[str]]) -> None:
    for name, counts in found.items():
        loaded_at_once = int(name.rpartition("x")[2])
        assert counts["STG.E.128"] == 1, name
        assert counts["LDG.E.128"] >= loaded_at_once, name
        assert counts["FFMA"] == 8 * counts["LDG.E.128"], name
        # Nothing wider or narrower is loaded but weights and numbers of rows, each by itself.
        loads = {opcode for opcode in counts if opcode.startswith(("LDG", "LD.", "LDS"))}
        assert loads == {"LDG.E", "LDG.E.128"}, name
        assert not any(opcode.startswith(("FMUL", "BAR", "STS")) for opcode in counts), name


@pytest.mark.slow
def test_kernels_load_vectors_and_spill_nothing(tmp_path: Path, kernel_cache: Cache) -> None:
    targets = [*ARCHITECTURES, "{arch: sm_100f, cuda: cu12}"]
    found = instructions(", ".join(targets), "bf16, fp16", tmp_path, kernel_cache)
    assert len(found) == len(targets) * 2 * len(TILES)
    check_instructions(found)
