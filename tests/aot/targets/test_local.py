"""Device profiles from what a driver tells."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from nvgemm_aot.targets.local import Device, profile_of, targets_for
from nvgemm_aot.targets.profile import load_profile
from nvgemm_runtime.errors import TargetError

H200 = Device(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    shared_memory_bytes=232448,
    platform="linux_x86_64",
    cuda="cu13",
)
CPU = replace(H200, kind="cpu", name="cpu", capability=None, multiprocessors=None, cuda=None)


def test_a_shipped_product_has_its_shipped_profile() -> None:
    assert profile_of(H200) is load_profile("H200")
    assert profile_of(replace(H200, shared_memory_bytes=None)) is load_profile("H200")
    assert profile_of(replace(H200, name="NVIDIA H100 80GB HBM3")) is load_profile("H100")


def test_a_slice_of_a_product_has_the_numbers_of_the_driver() -> None:
    """As where a GPU is shared: the name is the product's, the multiprocessors are fewer."""
    whole, profile = load_profile("H200"), profile_of(replace(H200, multiprocessors=60))
    assert profile.name == profile.driver_name == "NVIDIA H200"
    assert profile.heuristics_gpu == whole.heuristics_gpu
    assert (profile.sm_count.value, profile.sm_count.basis) == (60, "measured")
    capacities = {size: fact.value for size, fact in profile.max_active_clusters.items()}
    assert capacities == {1: 60, 2: 30, 4: 13, 8: 6, 16: 3}
    assert profile.cluster_capacity(4).basis == "estimated"
    assert profile.cluster_capacity(4).source == ("H200's number times 60 of 132 SMs, rounded down")
    assert profile.shared_memory_per_block_bytes.source == "read from the driver of this machine"


def test_an_unknown_product_is_taken_for_the_usual_one_of_its_capability() -> None:
    other = replace(H200, name="NVIDIA GH200 480GB", shared_memory_bytes=232448)
    assert profile_of(other).heuristics_gpu == load_profile("H200").heuristics_gpu
    assert profile_of(other).name == "NVIDIA GH200 480GB"
    b300 = replace(H200, name="NVIDIA B300", capability=(10, 3), multiprocessors=148)
    assert profile_of(b300).heuristics_gpu == load_profile("GB300").heuristics_gpu


def test_numbers_are_never_larger_than_the_multiprocessors_allow() -> None:
    for count in (1, 7, 132, 160):
        profile = profile_of(replace(H200, name="NVIDIA X", multiprocessors=count))
        for size, fact in profile.max_active_clusters.items():
            assert 1 <= fact.value <= max(1, count // size)


def test_less_shared_memory_than_shipped_is_believed() -> None:
    profile = profile_of(replace(H200, shared_memory_bytes=100_000))
    assert profile.shared_memory_per_block_bytes.value == 100_000


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((9, 0), ["sm_90a"]),
        ((10, 0), ["sm_100f", "sm_100a"]),
        ((10, 3), ["sm_100f", "sm_103a"]),
    ],
)
def test_targets_are_those_that_the_device_runs_family_first(
    capability: tuple[int, int], archs: list[str]
) -> None:
    targets = targets_for(replace(H200, name="NVIDIA X", capability=capability))
    assert [target.target.arch for target in targets] == archs
    assert {target.device.name for target in targets} == {"NVIDIA X"}
    assert all(target.target.runs_on(capability) for target in targets)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"platform": "linux_riscv64"},
            "platform linux_riscv64: kernels are compiled for linux_x86_64 and linux_aarch64 only",
        ),
        (
            {"cuda": "cu11"},
            "CUDA version of torch cu11: kernels are compiled for cu13 and cu12 only",
        ),
        ({"cuda": None}, "CUDA version of torch None"),
        ({"capability": (12, 0)}, r"compute capability 12\.0: kernels are compiled for sm_100a, "),
        ({"capability": None}, "compute capability unknown"),
        ({"multiprocessors": None}, "the driver reports no number of multiprocessors"),
    ],
)
def test_what_nothing_is_compiled_for_is_said(change: dict[str, object], reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        targets_for(replace(H200, **change))  # type: ignore[arg-type]


def test_targets_are_for_the_platform_and_cuda_of_the_process() -> None:
    (target,) = targets_for(replace(H200, platform="linux_aarch64", cuda="cu12"))
    assert target.target.key == "sm_90a-linux_aarch64-cu12"


@pytest.mark.parametrize(
    ("platform", "base"), [("linux_x86_64", "B200"), ("linux_aarch64", "GB200")]
)
def test_an_unknown_product_is_derived_from_the_usual_one_of_its_platform(
    platform: str, base: str
) -> None:
    unknown = replace(
        H200, name="NVIDIA X", capability=(10, 0), multiprocessors=140, platform=platform
    )
    profile = profile_of(unknown)
    assert (profile.name, profile.sm_count.value) == ("NVIDIA X", 140)
    assert profile.max_active_clusters[2].source.startswith(f"{base}'s number times 140 of ")


def test_the_host_is_a_target_for_providers_that_have_kernels_for_it() -> None:
    (target,) = targets_for(CPU)
    assert target.target.key == "cpu-linux_x86_64-cu13"


def test_devices_are_read_from_json() -> None:
    document = {**asdict(H200), "capability": [9, 0]}
    assert Device.from_json(document) == H200
    assert Device.from_json({**asdict(CPU)}) == CPU
