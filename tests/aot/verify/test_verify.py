"""Whole bundles: two real kernels compiled here, and what was tampered with after that."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.bundle_texts import verification_text
from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.providers.cutlass_operators import CutlassOperators
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.verify.bundle import UNPROVED, Report, verify_bundle
from nvgemm_aot.verify.device import disassembler
from nvgemm_aot.verify.device.cubin import read_cubins
from nvgemm_aot.verify.findings import Check, Finding
from nvgemm_aot.verify.kernel_inspection import NOT_DISASSEMBLED, inspect_kernel
from nvgemm_runtime.bundle.format import ClusterLimit, KernelDesign, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError, ToolchainError
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.target import Target
from synthetic_cubin import synthetic_cubin
from synthetic_payload import CALL, host_payload

CONVENTION = "tvm_ffi:gemm(a,b,out,stream)"
SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
LIMIT = ClusterLimit(cluster_size=1, max_active=132, basis="measured")
DEVICES = {"sm_100f": "B200", "sm_100a": "B200", "sm_90a": "H200"}


def built(payload: bytes, tile: tuple[int, int, int]) -> BuiltKernel:
    return BuiltKernel(
        payload=payload,
        signature=SIGNATURE,
        provider="test",
        operator="operator",
        design=KernelDesign(
            tile=tile,
            ctas_per_tile=1,
            cluster=(1, 1),
            fallback_cluster=None,
            scheduler="clc",
        ),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention=CONVENTION,
    )


@pytest.fixture(scope="session")
def kernels(kernel_cache: Cache) -> dict[str, BuiltKernel]:
    """One real kernel of each architecture."""
    provider = CutlassOperators()
    tasks = {}
    for arch, wanted in (
        ("sm_100f", "1cta_cluster1x1x1_tile64x32x64_schedulerCLC"),
        ("sm_90a", "cluster1x1x1_tile64x64x64"),
    ):
        target = build_target(arch)
        found = provider.enumerate(SIGNATURE, target).candidates
        candidate = next(c for c in found if wanted in c.operator)
        (tasks[arch],) = make_tasks([candidate], target, provider)
    compiled = compile_all(list(tasks.values()), kernel_cache, jobs=1)
    assert not compiled.failures
    assert tasks["sm_90a"].candidate.design.cluster_limits == (LIMIT,)
    return {
        arch: BuiltKernel(**task.candidate.facts(), payload=compiled.kernels[task.key].payload)
        for arch, task in tasks.items()
    }


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembler, "_possible_paths", lambda: iter(()))


@pytest.fixture
def tools() -> None:
    if disassembler.find_disassembler() is None:
        pytest.skip("nvdisasm is not installed")


def bundle(folder: Path, *content: BuiltKernel, arch: str, device: str | None = None) -> Path:
    path = folder / "kernels.nvgemm"
    write_bundle(
        path,
        BundleContent(
            target=Target(arch=arch),
            device=device or DEVICES[arch],
            generator="test",
            build_key=sha256_hex(b"build"),
            toolchain={"test": "1"},
            kernels=content,
            rankings=(),
        ),
    )
    return path


def assert_only(report: Report, check: Check, message: str) -> Finding:
    assert not report.ok
    assert [finding.check for finding in report.findings] == [check], report.findings
    assert message in report.findings[0].message
    return report.findings[0]


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("arch", "flags", "opcode", "multiplies"),
    [
        ("sm_100f", "sm_100", "UTCHMMA", "m64n32 tn bf16xbf16/fp32"),
        ("sm_90a", "sm_90a", "HGMMA.64x64x16.F32.BF16", "m64n64 tn bf16xbf16/fp32"),
    ],
)
def test_accepts_real_kernel_and_shows_the_evidence(
    tmp_path: Path,
    kernels: dict[str, BuiltKernel],
    arch: str,
    flags: str,
    opcode: str,
    multiplies: str,
) -> None:
    report = verify_bundle(bundle(tmp_path, kernels[arch], arch=arch), disassemble=True)
    assert report.ok, report.findings
    assert report.notes == (UNPROVED,)
    (evidence,) = report.kernels
    assert evidence.id == sha256_hex(kernels[arch].payload)
    assert (evidence.architecture, evidence.compiled_for) == (flags, arch)
    assert evidence.registers is not None
    assert 16 <= evidence.registers <= 255
    assert evidence.threads in (192, 224, 256, 384)
    assert evidence.static_shared_bytes == evidence.local_bytes == 0
    assert evidence.dynamic_shared_bytes is not None
    assert 1 << 16 <= evidence.dynamic_shared_bytes <= 232448
    assert list(evidence.instructions) == [opcode]
    assert evidence.instructions[opcode] >= 4
    assert evidence.multiplies == (multiplies,)
    assert evidence.operands == CALL.removeprefix("__call__(").removesuffix(")")
    assert evidence.alignment_bytes == (16,)
    assert evidence.clusters == ((1, 1),)
    assert evidence.disassembled_by.startswith("nvdisasm V")
    document = json.loads(json.dumps(report.to_json()))
    assert document["ok"] is True
    assert document["kernels"][0]["instructions"] == evidence.instructions


@pytest.mark.usefixtures("tools")
def test_numbers_are_those_that_cuobjdump_prints(
    tmp_path: Path, kernels: dict[str, BuiltKernel]
) -> None:
    found = disassembler.require_disassembler()
    tool = found.path.with_name("cuobjdump")
    if not tool.exists():
        pytest.skip("cuobjdump is not installed")
    for arch, kernel in kernels.items():
        (cubin,) = read_cubins(kernel.payload)
        (function,) = cubin.kernels
        image = tmp_path / f"{arch}.cubin"
        image.write_bytes(cubin.content)
        printed = subprocess.run(
            [str(tool), "-res-usage", str(image)], capture_output=True, text=True, check=True
        ).stdout
        wanted = f"REG:{function.registers} STACK:0 SHARED:{function.shared_bytes} LOCAL:0"
        assert wanted in printed


@pytest.mark.usefixtures("tools")
def test_finds_entry_with_another_type(tmp_path: Path, kernels: dict[str, BuiltKernel]) -> None:
    signature = Signature.parse("mm/tn/fp16xfp16/fp32/fp16")
    kernel = replace(kernels["sm_100f"], signature=signature, provider="test")
    report = verify_bundle(bundle(tmp_path, kernel, arch="sm_100f"))
    assert {finding.check for finding in report.findings} == {
        Check.OPERANDS,
        Check.OPERAND_TYPES,
        Check.RESULT_TYPE,
    }
    assert all("is mm/tn/fp16xfp16/fp32/fp16" in finding.message for finding in report.findings)


LIES: list[tuple[str, dict[str, Any], set[Check], str]] = [
    (
        "sm_90a",
        {"signature": Signature.parse("bmm/tn/bf16xbf16/fp32/bf16")},
        {Check.OPERANDS},
        "a of rank 3, bfloat16",
    ),
    ("sm_100f", {"alignment_bytes": 1}, {Check.ALIGNMENT}, "to 16 bytes, its entry says 1"),
    ("sm_100f", {"workspace_bytes": 1 << 62}, {Check.WORKSPACE}, "must be 0"),
    *(
        ("sm_100f", {"calling_convention": text}, {check}, message)
        for text, check, message in (
            ("tvm_ffi:gemm((((", Check.CALLING_CONVENTION, "convention 'tvm_ffi:gemm(((('"),
            ("tvm_ffi:gemm(a*,b*,out*,stream)", Check.CALLING_CONVENTION, "(a*,b*,out*,stream)'"),
            ("tvm_ffi:gemm(b,a,out,stream)", Check.OPERANDS, "b of rank 2, bfloat16, a of rank 2"),
            ("tvm_ffi:gemm(a,b,stream,out)", Check.OPERANDS, "stream, out of rank 2, bfloat16"),
            ("tvm_ffi:other(a,b,out,stream)", Check.HOST_EXPORTS, "exactly __tvm_ffi_other"),
        )
    ),
    ("sm_100f", {"ctas_per_tile": 2}, {Check.CTAS_PER_TILE}, "with 1 thread blocks a tile"),
    ("sm_90a", {"ctas_per_tile": 2}, {Check.CTAS_PER_TILE}, "with 1 thread blocks a tile"),
    ("sm_100f", {"cluster": (999, 7)}, {Check.CLUSTER}, "clusters of 1x1, its entry says 999x7"),
    ("sm_100f", {"fallback_cluster": (2, 1)}, {Check.CLUSTER}, "its entry says 1x1 and 2x1"),
    ("sm_100f", {"scheduler": "banana"}, {Check.SCHEDULER}, "'banana' is none of clc, dynamic_p"),
    (
        "sm_100f",
        {"scheduler": "static_persistent"},
        {Check.SCHEDULER, Check.CLUSTER_LIMITS},
        "uses cluster launch control",
    ),
    (
        "sm_90a",
        {"scheduler": "clc", "cluster_limits": ()},
        {Check.SCHEDULER},
        "does not use cluster launch control",
    ),
    ("sm_90a", {"cluster_limits": ()}, {Check.CLUSTER_LIMITS}, "takes [1]"),
    ("sm_100f", {"cluster_limits": (LIMIT,)}, {Check.CLUSTER_LIMITS}, "takes none"),
    (
        "sm_90a",
        {"cluster_limits": (replace(LIMIT, max_active=131),)},
        {Check.CLUSTER_LIMITS},
        "H200 has 132 (measured)",
    ),
    (
        "sm_90a",
        {"cluster_limits": (ClusterLimit(cluster_size=3, max_active=1, basis="measured"),)},
        {Check.CLUSTER_LIMITS},
        "no max active clusters for cluster size 3",
    ),
]
"""What an entry says falsely, beside the truth: the architecture, the change, what finds it."""

NAME_LIES: list[tuple[str, dict[str, Any], set[Check], str]] = [
    ("sm_100f", {"tile": (64, 32, 7)}, {Check.OPERATOR_NAME}, "states tile k 64, its entry says 7"),
    (
        "sm_90a",
        {"scheduler": "one_tile", "cluster_limits": ()},
        {Check.OPERATOR_NAME},
        "its entry says scheduler one_tile",
    ),
]
"""The same, of what nothing but names shows."""


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("provider", "arch", "change", "checks", "message"),
    [("test", *lie) for lie in LIES] + [("cutlass_operators", *lie) for lie in NAME_LIES],
)
def test_finds_entry_that_its_payload_contradicts(
    tmp_path: Path,
    kernels: dict[str, BuiltKernel],
    provider: str,
    arch: str,
    change: dict[str, Any],
    checks: set[Check],
    message: str,
) -> None:
    kernel = replace(kernels[arch], provider=provider)
    of_design = {name: value for name, value in change.items() if hasattr(kernel.design, name)}
    rest = {name: value for name, value in change.items() if name not in of_design}
    kernel = replace(kernel, design=replace(kernel.design, **of_design), **rest)
    report = verify_bundle(bundle(tmp_path, kernel, arch=arch))
    assert {finding.check for finding in report.findings} == checks, report.findings
    assert {finding.kernel for finding in report.findings} == {report.kernels[0].id}
    assert any(message in finding.message for finding in report.findings), report.findings


@pytest.mark.usefixtures("no_tools")
def test_says_which_providers_operator_names_are_not_read(
    tmp_path: Path, kernels: dict[str, BuiltKernel]
) -> None:
    kernel = replace(kernels["sm_90a"], provider="nobody", operator="rm -rf")
    report = verify_bundle(bundle(tmp_path, kernel, arch="sm_90a"))
    assert report.ok, report.findings
    assert "operator names from nobody are not parsed" in report.notes[1]
    kernel = replace(kernel, provider="cutlass_operators")
    report = verify_bundle(bundle(tmp_path, kernel, arch="sm_90a"))
    assert_only(report, Check.OPERATOR_NAME, "'rm -rf' states tile k nowhere")


@pytest.mark.usefixtures("tools")
def test_finds_spills(
    tmp_path: Path, kernels: dict[str, BuiltKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = disassembler.Disassembler.disassemble

    def spilling(self: disassembler.Disassembler, cubin: bytes) -> str:
        return honest(self, cubin) + "        /*ff00*/                   STL [R1+0x4], R8 ;\n"

    monkeypatch.setattr(disassembler.Disassembler, "disassemble", spilling)
    report = verify_bundle(bundle(tmp_path, kernels["sm_90a"], arch="sm_90a"))
    assert_only(report, Check.LOCAL_MEMORY, "1 x STL")
    assert report.kernels[0].instructions["STL"] == 1


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("device", "message"),
    [("H9000", "'H9000'"), ("H200", "capability 9.0 and cannot run target sm_100f")],
)
def test_finds_device_that_is_unknown_or_cannot_run_the_target(
    tmp_path: Path, kernels: dict[str, BuiltKernel], device: str, message: str
) -> None:
    path = bundle(tmp_path, kernels["sm_100f"], arch="sm_100f", device=device)
    assert assert_only(verify_bundle(path), Check.DEVICE_PROFILE, message).kernel is None


@pytest.mark.usefixtures("no_tools")
def test_says_plainly_that_device_code_was_not_disassembled(
    tmp_path: Path, kernels: dict[str, BuiltKernel]
) -> None:
    path = bundle(tmp_path, kernels["sm_100f"], arch="sm_100f")
    report = verify_bundle(path)
    assert report.ok
    assert report.disassembler is None
    assert report.kernels[0].disassembled_by == NOT_DISASSEMBLED
    assert report.notes[0] == UNPROVED
    assert "was not disassembled" in report.notes[1]
    assert "pip install '.[build]'" in report.notes[1]
    assert "not requested" in verify_bundle(path, disassemble=False).notes[1]
    with pytest.raises(ToolchainError, match=r"pip install '\.\[build\]'"):
        verify_bundle(path, disassemble=True)


# Without the compiler: payloads from the system's C compiler around synthetic device code.


@pytest.fixture
def fake_nvdisasm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disassembler that prints what the test wrote beside it; its temporary files are watched."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = tmp_path / "nvdisasm"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo "release 99.1, V99.1.2";;\n'
        f'*) test -s "$2" && . {tmp_path}/says;; esac\n'
    )
    program.chmod(0o755)
    (tmp_path / "says").write_text("echo nothing\n")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(disassembler, "_possible_paths", lambda: iter([program]))
    yield tmp_path / "says"
    assert not list(temporary.iterdir())


def verify_payload(folder: Path, payload: bytes, **options: Any) -> Report:
    return verify_bundle(bundle(folder, built(payload, (64, 32, 64)), arch="sm_100f"), **options)


@pytest.mark.usefixtures("no_tools")
def test_accepts_synthetic_kernel(tmp_path: Path) -> None:
    assert verify_payload(tmp_path, host_payload(tmp_path, cubin=synthetic_cubin())).ok


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("flag", "extension"), [("-mavx2", "AVX"), ("-mavx512f", "AVX-512")], ids=["avx", "avx512"]
)
def test_finds_host_code_for_some_processors_only(
    tmp_path: Path, flag: str, extension: str
) -> None:
    bits = "512" if flag == "-mavx512f" else "256"
    body = (
        f"typedef long vector __attribute__((vector_size({bits} / 8)));"
        "static volatile vector stored; stored = (vector){0}; TVMFFIEnvGetStream();"
        "stored = stored + 1; TVMFFIEnvGetStream(); return 0;"
    )
    payload = host_payload(tmp_path, "-O2", flag, body=body, cubin=synthetic_cubin())
    report = verify_payload(tmp_path, payload)
    assert_only(report, Check.HOST_PROCESSOR, f"host code uses {extension};")


@pytest.mark.usefixtures("no_tools")
def test_finds_shared_memory_of_the_launch_over_the_limit(tmp_path: Path) -> None:
    payload = host_payload(tmp_path, shared_bytes=300000, cubin=synthetic_cubin())
    report = verify_payload(tmp_path, payload)
    assert report.kernels[0].dynamic_shared_bytes == 300000
    assert_only(report, Check.SHARED_MEMORY, "301024 bytes of shared memory a block, B200 has")


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (CALL.replace("a: ", "x: ").replace("b: ", "a: ").replace("x: ", "b: "), "takes (b: "),
        (CALL.replace(", stream: Stream", ", scale: float, stream: Stream"), "takes (a: "),
    ],
)
def test_finds_launcher_with_other_operands(tmp_path: Path, call: str, message: str) -> None:
    payload = host_payload(tmp_path, call=call, cubin=synthetic_cubin())
    assert_only(verify_payload(tmp_path, payload), Check.OPERANDS, message)


def of_both(folder: Path, payload: bytes, **options: Any) -> tuple[Report, Report]:
    """Reports on a payload as that of a known provider, and as that of an unknown one."""
    entry = built(payload, (64, 32, 64))
    named = replace(entry, provider="cutlass_operators", operator="a_tile64x32x64")
    known, unknown = (
        verify_bundle(bundle(folder, one, arch="sm_100f"), **options) for one in (named, entry)
    )
    return known, unknown


@pytest.mark.usefixtures("no_tools")
def test_the_report_says_why_it_shows_no_instructions(tmp_path: Path) -> None:
    """The program that disassembled is no answer: its path would stand where code is shown."""
    _, report = of_both(tmp_path, host_payload(tmp_path, call=CALL, cubin=synthetic_cubin()))
    assert "not disassembled" in verification_text(report)
    kernels = tuple(replace(one, disassembled_by="a/path/nvdisasm") for one in report.kernels)
    text = verification_text(replace(report, kernels=kernels))
    assert "no tensor-core instruction" in text
    assert "a/path" not in text


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    "call", ["nothing of the kind", CALL + "` when calling: `" + CALL.replace("bfloat16", "fp16")]
)
def test_a_launcher_that_shows_no_call_is_a_finding_of_known_providers_alone(
    tmp_path: Path, call: str
) -> None:
    payload = host_payload(tmp_path, call=call, cubin=synthetic_cubin())
    known, unknown = of_both(tmp_path, payload)
    assert_only(known, Check.OPERANDS, "does not show its operands")
    assert unknown.ok, unknown.findings
    assert unknown.kernels[0].unseen == ("operands: the launcher does not show its operands",)
    assert any("unchecked for 1 kernel from unknown" in note for note in unknown.notes)


def test_a_kernel_without_tensor_core_instructions_is_a_finding_of_known_providers_alone(
    tmp_path: Path, fake_nvdisasm: Path
) -> None:
    known, unknown = of_both(tmp_path, host_payload(tmp_path, cubin=synthetic_cubin()))
    for report in (known, unknown):
        assert report.disassembler is not None
        assert report.disassembler.startswith("nvdisasm V99.1.2")
    said = "no tensor-core instruction; bf16 on sm_100f calls for"
    asked = "never asks for its next tile"  # the fake disassembly shows nothing of the scheduler
    found = [finding for finding in known.findings if asked not in finding.message]
    assert [finding.check for finding in found] == [Check.TENSOR_CORE]
    assert said in found[0].message
    [of_the_scheduler] = unknown.findings
    assert asked in of_the_scheduler.message
    assert any(said in note for note in unknown.notes)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("echo 'fatal: bad image' >&2; exit 3\n", "exits with 3: fatal: bad image"),
        ("exec sleep 5\n", "timed out"),
    ],
)
def test_finds_device_code_that_does_not_disassemble(
    tmp_path: Path,
    fake_nvdisasm: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    message: str,
) -> None:
    if "sleep" in program:
        monkeypatch.setattr(disassembler, "TIMEOUT_SECONDS", 0.3)
    fake_nvdisasm.write_text(program)
    report = verify_payload(tmp_path, host_payload(tmp_path, cubin=synthetic_cubin()))
    assert_only(report, Check.DISASSEMBLY, message)
    assert report.kernels[0].disassembled_by == NOT_DISASSEMBLED


@pytest.mark.usefixtures("no_tools")
def test_jobs_change_nothing_and_progress_counts_kernels(tmp_path: Path) -> None:
    images = [synthetic_cubin(registers=registers) for registers in (254, 255, 256)]
    content = [built(host_payload(tmp_path, cubin=image), (64, 32, 64)) for image in images]
    path = bundle(tmp_path, *content, arch="sm_100f")
    calls: list[tuple[int, int]] = []
    report = verify_bundle(path, jobs=3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert report == verify_bundle(path)
    ids = [evidence.id for evidence in report.kernels]
    assert ids == sorted(ids)
    assert_only(report, Check.REGISTERS, "256 registers a thread")


@pytest.mark.usefixtures("no_tools")
def test_damaged_bundle_is_a_format_error(tmp_path: Path) -> None:
    path = bundle(tmp_path, built(host_payload(tmp_path), (64, 32, 64)), arch="sm_100f")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleFormatError, match="body-digest"):
        verify_bundle(path)


def test_missing_bundle_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        verify_bundle(tmp_path / "missing.nvgemm")


@pytest.fixture(scope="module")
def synthetic_payload(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return host_payload(tmp_path_factory.mktemp("fuzz"), cubin=synthetic_cubin())


@pytest.mark.usefixtures("no_tools")
def test_finds_payload_without_device_code_and_what_is_no_shared_object(tmp_path: Path) -> None:
    report = verify_payload(tmp_path, host_payload(tmp_path))
    assert_only(report, Check.DEVICE_FORMAT, "no device code")
    assert report.kernels[0].registers is None
    checks = {finding.check for finding in verify_payload(tmp_path, b"PK").findings}
    assert {Check.HOST_FORMAT, Check.DEVICE_FORMAT} <= checks


@settings(max_examples=200)
@given(data=st.data())
def test_malformed_payload_is_a_finding_and_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, synthetic_payload: bytes, data: st.DataObject
) -> None:
    image = bytearray(synthetic_payload)
    for _ in range(data.draw(st.integers(1, 10))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    path = bundle(
        tmp_path_factory.getbasetemp(),
        built(bytes(image[: data.draw(st.integers(1, len(image)))]), (64, 32, 64)),
        arch="sm_100f",
    )
    with Bundle(path) as opened:
        (kernel,) = opened.header.kernels
        evidence, _ = inspect_kernel(
            kernel,
            opened.payload(kernel),
            target=opened.header.target,
            profiles=(),
            disassembler=None,
        )
    assert evidence.id == kernel.id
