from __future__ import annotations

import pytest

from nvgemm_aot.targets import DEFAULT_DEVICE, build_target
from nvgemm_aot.targets.profile import load_profile, profile_names
from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import Target


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


def test_every_default_device_can_run_its_target() -> None:
    for arch, device in DEFAULT_DEVICE.items():
        resolved = build_target(arch)
        assert resolved.device.name == device
        assert resolved.target.runs_on(resolved.device.capability)


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
