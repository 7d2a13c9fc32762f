from __future__ import annotations

import pytest

from nvgemm_aot.targets import DEFAULT_DEVICE, build_target, default_device
from nvgemm_aot.targets.profile import load_profile, profile_names
from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import (
    ARCHITECTURES,
    MMA_BY_MAJOR,
    ORDERED_ARCHITECTURES,
    Target,
    TargetName,
    architecture,
)


@pytest.mark.parametrize(
    ("arch", "runs_on", "not_on"),
    [
        ("sm_90a", [(9, 0)], [(8, 0), (10, 0)]),
        ("sm_100a", [(10, 0)], [(10, 3), (9, 0), (12, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (11, 0), (12, 0)]),
        ("sm_103a", [(10, 3)], [(10, 0)]),
        ("sm_103f", [(10, 3)], [(10, 0)]),
        ("sm_80", [(8, 0), (8, 9), (9, 0), (12, 0)], [(7, 5)]),
    ],
)
def test_runs_only_on_gpus_its_suffix_allows(
    arch: str, runs_on: list[tuple[int, int]], not_on: list[tuple[int, int]]
) -> None:
    target = Target(arch=arch)
    assert all(target.runs_on(capability) for capability in runs_on)
    assert not any(target.runs_on(capability) for capability in not_on)


@pytest.mark.parametrize("arch", ["", "sm_", "sm_9", "90a", "sm_90b", "sm_90a ", "sm_1000"])
def test_rejects_what_is_not_an_architecture(arch: str) -> None:
    with pytest.raises(ValueError, match="architecture"):
        Target(arch=arch)


@pytest.mark.parametrize("arch", ["sm_99a", "sm_100", "cpu"])
def test_an_unknown_architecture_is_named_with_the_known_ones(arch: str) -> None:
    known = ", ".join(ORDERED_ARCHITECTURES)
    assert known.startswith("sm_90a, sm_100a, ")
    with pytest.raises(TargetError, match=rf"^unknown architecture '{arch}' \(known: {known}\)$"):
        architecture(arch)


def test_architectures_with_one_major_capability_have_one_kind_of_instruction() -> None:
    for arch, row in ARCHITECTURES.items():
        assert MMA_BY_MAJOR[Target(arch=arch).capability[0]] is row.mma


def test_every_default_device_can_run_its_target() -> None:
    for arch, device in DEFAULT_DEVICE.items():
        resolved = build_target(arch)
        assert resolved.device.name == device
        assert resolved.target.runs_on(resolved.device.capability)


@pytest.mark.parametrize(
    ("arch", "device"),
    [("sm_100f", "GB200"), ("sm_100a", "GB200"), ("sm_103a", "GB300"), ("sm_90a", "H200")],
)
def test_a_target_on_arm_is_for_the_gpu_beside_arm_processors(arch: str, device: str) -> None:
    resolved = build_target(arch, platform="linux_aarch64")
    assert resolved.device.name == default_device(arch, "linux_aarch64") == device
    assert build_target(arch).device.name == DEFAULT_DEVICE[arch]
    assert (
        build_target(arch, DEFAULT_DEVICE[arch], platform="linux_aarch64").device.name
        == (DEFAULT_DEVICE[arch])
    ), "one that is named stays"


def test_the_usual_gpu_on_arm_is_what_the_message_suggests() -> None:
    with pytest.raises(TargetError, match=r"leave the device out for GB200$"):
        build_target("sm_100f", "H200", platform="linux_aarch64")


@pytest.mark.parametrize(
    ("text", "named", "resolved"),
    [
        ("sm_90a", TargetName(arch="sm_90a"), "sm_90a-linux_aarch64-cu12"),
        ("sm_90a-cu13", TargetName(arch="sm_90a", cuda="cu13"), "sm_90a-linux_aarch64-cu13"),
        (
            "sm_100f-linux_x86_64",
            TargetName(arch="sm_100f", platform="linux_x86_64"),
            "sm_100f-linux_x86_64-cu12",
        ),
        (
            "sm_103a-linux_x86_64-cu13",
            TargetName(arch="sm_103a", platform="linux_x86_64", cuda="cu13"),
            "sm_103a-linux_x86_64-cu13",
        ),
    ],
)
def test_a_name_is_an_architecture_or_more_of_a_key(
    text: str, named: TargetName, resolved: str
) -> None:
    assert TargetName.parse(text) == named
    assert named.text == text
    assert named.resolve(platform="linux_aarch64", cuda="cu12").key == resolved


def test_what_nothing_is_built_for_counts_as_the_usual_one() -> None:
    named = TargetName(arch="sm_90a")
    assert named.resolve(platform="darwin_arm64", cuda="cu11").key == "sm_90a-linux_x86_64-cu13"
    assert named.resolve(platform=None, cuda=None).key == "sm_90a-linux_x86_64-cu13"


@pytest.mark.parametrize(
    "text",
    ["", "sm_80", "sm_90a-", "sm_90a-linux", "sm_90a-cu11", "sm_90a-cu13-linux_x86_64", "SM_90A"],
)
def test_other_names_are_refused_with_those_that_are_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"sm_90a, .*linux_aarch64.*cu12.*sm_90a-linux_aarch64-"):
        TargetName.parse(text)


def test_refuses_a_device_of_another_architecture() -> None:
    with pytest.raises(TargetError, match=r"H200 has compute capability 9\.0"):
        build_target("sm_100f", "H200")


def test_unknown_target_and_device_name_the_known_ones() -> None:
    with pytest.raises(TargetError, match="sm_100f"):
        build_target("sm_77")
    with pytest.raises(TargetError, match="GB200"):
        build_target("sm_100f", "B2000")


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_complete_and_plausible(name: str) -> None:
    profile = load_profile(name)
    assert set(profile.max_active_clusters) >= {1, 2, 4, 8, 16}
    facts = [
        profile.sm_count,
        profile.shared_memory_per_block_bytes,
        profile.registers_per_thread,
        *profile.max_active_clusters.values(),
    ]
    for fact in facts:
        assert fact.basis in ("measured", "reported", "estimated")
        assert fact.source
    for size, fact in profile.max_active_clusters.items():
        assert 0 < fact.value * size <= profile.sm_count.value


def test_unknown_cluster_size_is_an_error_not_a_guess() -> None:
    with pytest.raises(TargetError, match="cluster size 3"):
        load_profile("H200").cluster_capacity(3)
