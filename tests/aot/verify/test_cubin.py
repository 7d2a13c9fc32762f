"""Device code inside a payload, with synthetic cubins; real ones are in test_verify."""

from __future__ import annotations

from typing import Any

import pytest

from nvgemm_aot.targets.profile import load_profile
from nvgemm_aot.verify.device.cubin import (
    check_cubin,
    foreign_cuda_versions,
    read_cubins,
    spilled_bytes,
)
from nvgemm_aot.verify.findings import Check, Finding
from nvgemm_aot.verify.host.elf import MAGIC, MalformedElfError
from nvgemm_runtime.gemm.target import Target
from synthetic_cubin import (
    CLUSTER_LAUNCH_CONTROL_USED,
    KERNEL,
    TCGEN05_1CTA_USED,
    TCGEN05_2CTA_USED,
    synthetic_cubin,
)

PREFIX = b"host code"


def findings_of(
    arch: str = "sm_100f", device: str = "B200", launch_bytes: int | None = 0, **fields: Any
) -> list[Finding]:
    (cubin,) = read_cubins(PREFIX + synthetic_cubin(**fields))
    return list(
        check_cubin(
            cubin,
            target=Target(arch=arch),
            profiles=[load_profile(device)],
            launch_bytes=launch_bytes,
        )
    )


def test_reads_architecture_and_resources() -> None:
    image = synthetic_cubin(registers=168, threads=(384, 1, 1))
    (cubin,) = read_cubins(PREFIX + image + b"more host code")
    assert cubin.content == image
    assert (cubin.architecture, cubin.compiled_for) == ("sm_100", "sm_100f")
    (kernel,) = cubin.kernels
    assert kernel.name == KERNEL
    assert (kernel.registers, kernel.threads) == (168, 384)
    assert (kernel.shared_bytes, kernel.local_bytes) == (1024, 0)
    assert (kernel.ctas_per_tile, kernel.cluster_launch_control) == (1, True)


@pytest.mark.parametrize(
    ("uses", "ctas_per_tile", "cluster_launch_control"),
    [
        ((TCGEN05_2CTA_USED,), 2, False),
        ((TCGEN05_1CTA_USED, CLUSTER_LAUNCH_CONTROL_USED), 1, True),
        ((TCGEN05_1CTA_USED, TCGEN05_2CTA_USED), None, False),
        ((), None, False),
    ],
)
def test_reads_instructions_that_the_code_uses(
    uses: tuple[int, ...], ctas_per_tile: int | None, cluster_launch_control: bool
) -> None:
    (cubin,) = read_cubins(PREFIX + synthetic_cubin(uses=uses))
    (kernel,) = cubin.kernels
    assert kernel.ctas_per_tile == ctas_per_tile
    assert kernel.cluster_launch_control is cluster_launch_control


def test_finds_every_cubin() -> None:
    payload = PREFIX + synthetic_cubin() + b"between" + synthetic_cubin(sm=103)
    assert [cubin.sm for cubin in read_cubins(payload)] == [100, 103]


@pytest.mark.parametrize(
    ("arch", "device", "sm", "accelerator"),
    [
        ("sm_90a", "H200", 90, 1),
        ("sm_100a", "B200", 100, 1),
        ("sm_100f", "B200", 100, 0),
        ("sm_103a", "GB300", 103, 1),
    ],
)
def test_accepts_each_target(arch: str, device: str, sm: int, accelerator: int) -> None:
    assert not findings_of(arch, device, sm=sm, accelerator=accelerator, compiled_for=arch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sm": 90}, "for sm_90 by its flags, target sm_100f needs sm_100"),
        ({"sm": 103}, "for sm_103 by its flags"),
        ({"accelerator": 1}, "for sm_100a by its flags, target sm_100f needs sm_100"),
        ({"compiled_for": "sm_100"}, "compiled for sm_100, must be sm_100f"),
        ({"arch": "sm_100a", "compiled_for": "sm_100a"}, "for sm_100 by its flags, target sm_100a"),
    ],
)
def test_finds_other_architecture(fields: dict[str, Any], message: str) -> None:
    (finding,) = findings_of(**fields)
    assert finding.check is Check.ARCHITECTURE
    assert message in finding.message


@pytest.mark.parametrize(
    ("fields", "check", "message"),
    [
        ({"registers": 256}, Check.REGISTERS, "256 registers a thread, B200 has 255"),
        (
            {"registers": 200, "threads": (384, 1, 1)},
            Check.REGISTERS,
            "76800 registers a block, B200 has 65536",
        ),
        ({"registers": 8, "threads": (64, 32, 1)}, Check.THREADS, "2048 threads a block"),
        ({"shared_bytes": 233473}, Check.SHARED_MEMORY, "233473 bytes of shared memory a block"),
        ({"launch_bytes": 232449}, Check.SHARED_MEMORY, "B200 has 233472"),
        ({"launch_bytes": None}, Check.SHARED_MEMORY, "does not show its dynamic shared memory"),
        ({"cuda_version": 128}, Check.CUDA_VERSION, "compiled with CUDA 12.8, target"),
        ({"stack_bytes": 8}, Check.LOCAL_MEMORY, "8 bytes of local memory a thread, must be 0"),
        ({"local_bytes": 16}, Check.LOCAL_MEMORY, "16 bytes of local memory a thread, must be 0"),
    ],
)
def test_finds_what_the_target_does_not_allow(
    fields: dict[str, Any], check: Check, message: str
) -> None:
    (finding,) = findings_of(**fields)
    assert finding.check is check
    assert message in finding.message


def test_accepts_resources_at_the_limit() -> None:
    assert not findings_of(registers=255, threads=(256, 1, 1), launch_bytes=232448)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PREFIX * 100, "no device code"),
        (MAGIC, "cannot be read as ELF"),
        (synthetic_cubin(abi=9), "ABI 9, must be 7 or 8"),
    ],
    ids=["none", "cut off", "other ABI"],
)
def test_rejects_what_is_no_device_code(content: bytes, message: str) -> None:
    with pytest.raises(MalformedElfError, match=message):
        read_cubins(PREFIX + content)


@pytest.mark.parametrize(
    "name", [".symtab", ".note.nv.tkinfo", ".nv.info", ".nv.compat", f".nv.info.{KERNEL}"]
)
def test_rejects_missing_section(name: str) -> None:
    with pytest.raises(MalformedElfError):
        read_cubins(PREFIX + synthetic_cubin(left_out=name))


CUDA_12 = {"cuda_version": 129, "uses": ()}


def test_reads_hopper_code_of_cuda_12_which_notes_no_arguments() -> None:
    content = synthetic_cubin(abi=7, flags=0x5A0D5A, left_out=".note.nv.tkinfo", **CUDA_12)
    [cubin] = read_cubins(PREFIX + content)
    assert (cubin.architecture, cubin.compiled_for) == ("sm_90a", None)
    assert cubin.kernels[0].cluster_launch_control is None
    assert not list(
        check_cubin(
            cubin,
            target=Target(arch="sm_90a", cuda="cu12"),
            profiles=[load_profile("H200")],
            launch_bytes=1 << 16,
        )
    )


@pytest.mark.parametrize(
    ("flags", "architecture"),
    [(0x6006402, "sm_100"), (0x600640A, "sm_100a"), (0x600670A, "sm_103a")],
)
def test_reads_blackwell_code_of_cuda_12_by_its_flags(flags: int, architecture: str) -> None:
    [cubin] = read_cubins(PREFIX + synthetic_cubin(flags=flags, left_out=".nv.compat", **CUDA_12))
    assert cubin.architecture == architecture


def test_code_of_cuda_12_for_a_family_states_its_architecture() -> None:
    """By its flags it could be of sm_100."""
    payload = PREFIX + synthetic_cubin(left_out=".note.nv.tkinfo", **CUDA_12)
    with pytest.raises(MalformedElfError, match="lacks the compiler's arguments"):
        read_cubins(payload)


def test_says_which_other_cuda_made_device_code() -> None:
    both = PREFIX + synthetic_cubin(cuda_version=129) + synthetic_cubin(cuda_version=134)
    assert foreign_cuda_versions(both, "cu12") == ["13.4"]
    assert foreign_cuda_versions(both, "cu13") == ["12.9"]
    assert foreign_cuda_versions(PREFIX, "cu12") == []


@pytest.mark.parametrize(("cuda", "other"), [(129, "cu13"), (134, "cu12")])
def test_code_of_another_cuda_is_a_finding(cuda: int, other: str) -> None:
    [cubin] = read_cubins(PREFIX + synthetic_cubin(cuda_version=cuda))
    target = Target(arch="sm_100f", cuda=other)
    found = check_cubin(cubin, target=target, profiles=(), launch_bytes=1 << 16)
    assert [one.check for one in found] == [Check.CUDA_VERSION]


@pytest.mark.parametrize(
    ("payload", "spilled"),
    [
        (PREFIX + synthetic_cubin(), 0),
        (PREFIX + synthetic_cubin(local_bytes=16), 16),
        (PREFIX + synthetic_cubin() + synthetic_cubin(local_bytes=24), 24),
        (PREFIX, 0),
    ],
)
def test_says_how_much_is_spilled_where_device_code_can_be_read(
    payload: bytes, spilled: int
) -> None:
    assert spilled_bytes(payload) == spilled
