"""Launches as the emulated driver hands them over, and what a driver would refuse."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handwritten_kernels import module
from nvgemm_aot.emulator.driver import runtime_archive
from nvgemm_aot.emulator.driver.caught_launch import (
    CaughtLaunch,
    LaunchStruct,
    read_image,
    read_launch,
)
from nvgemm_aot.emulator.driver.runtime_archive import link_archive
from nvgemm_aot.emulator.driver.stand_in import LIBRARY
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError
from nvgemm_aot.emulator.machine.global_memory import Region
from nvgemm_aot.emulator.machine.launch import Schedule
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.session.kept_programs import KeptPrograms
from nvgemm_aot.emulator.session.launch_limits import check_limits, cubin_of, static_shared_bytes
from nvgemm_aot.emulator.session.ptx_runner import PtxRunner
from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_aot.targets.profile import load_profile
from nvgemm_aot.verify.device.cubin import read_cubins
from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS
from nvgemm_runtime.errors import DriverError, ToolchainError
from nvgemm_runtime.gemm.target import CUDA_VERSIONS
from nvgemm_runtime.matching.shared_library import exported_symbols
from synthetic_cubin import KERNEL, synthetic_cubin

CUBIN = synthetic_cubin()
CONTAINER = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(CUBIN)) + CUBIN


class HandedOver:
    """A launch in C's form."""

    def __init__(self, *attributes: tuple[int, tuple[int, ...]], image: bytes = CUBIN) -> None:
        packed = [struct.pack("<i4x16I", id, *values, *[7] * (16 - len(values)))
                  for id, values in attributes]  # fmt: skip
        self._attributes = ctypes.create_string_buffer(b"".join(packed))
        self._image = ctypes.create_string_buffer(image)
        self._values = [ctypes.create_string_buffer(value) for value in (b"abcd", b"efghijkl")]
        addresses = [ctypes.addressof(value) for value in self._values]
        self.launch = LaunchStruct(
            image=ctypes.addressof(self._image),
            kernel=KERNEL.encode(),
            grid=(8, 3, 2),
            block=(192, 1, 1),
            shared_bytes=1 << 17,
            attributes=ctypes.addressof(self._attributes),
            attribute_count=len(attributes),
            most_shared_bytes=232448,
            allows_big_clusters=1,
            parameters=(ctypes.c_void_p * 3)(*addresses, None),
        )

    def read(self) -> CaughtLaunch:
        return read_launch(self.launch)


@pytest.mark.parametrize("image", [CUBIN, CONTAINER])
def test_reads_a_launch(image: bytes) -> None:
    launch = HandedOver((6, (1,)), (4, (2, 1, 1)), (2, (0,)), image=image).read()
    assert (launch.grid, launch.block, launch.cluster) == ((8, 3, 2), (192, 1, 1), (2, 1, 1))
    assert (launch.is_dependent, launch.is_cooperative) == (True, False)
    assert (launch.preferred_cluster, launch.shared_bytes) == (None, 1 << 17)
    assert launch.image == image
    assert cubin_of(launch.image, launch.kernel).content == CUBIN


def test_reads_a_launch_without_attributes() -> None:
    launch = HandedOver().read()
    assert (launch.cluster, launch.is_dependent, launch.is_cooperative) == ((1, 1, 1), False, False)


def test_refuses_an_attribute_that_could_change_what_runs() -> None:
    with pytest.raises(DriverError, match=r"launch attributes \[13\] .* knows \[2, 4, 6, 11\]"):
        HandedOver((13, (1,))).read()


def test_places_parameters_at_their_offsets() -> None:
    kept = HandedOver()
    launch = kept.read()
    assert launch.parameter_bytes([(0, 4), (8, 8)], 20) == b"abcd\0\0\0\0efghijkl\0\0\0\0"
    with pytest.raises(DriverError, match="no value for parameter 2"):
        launch.parameter_bytes([(0, 4), (8, 8), (16, 4)], 20)


def test_refuses_what_is_not_device_code() -> None:
    image = ctypes.create_string_buffer(b"// PTX, say".ljust(64))
    with pytest.raises(DriverError, match="begins with 0x50202f2f: neither"):
        read_image(ctypes.addressof(image))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"cluster": (16, 1, 1), "allows_big_clusters": False},
            "16 blocks in a cluster, at most 8",
        ),
        ({"cluster": (8, 4, 1)}, "32 blocks in a cluster, at most 16"),
        ({"block": (1025, 1, 1)}, "1025 threads in a block, at most 1024"),
        ({"most_shared_bytes": 232449}, "232449 bytes of shared memory on B200, at most 232448"),
        ({"shared_bytes": 232449}, "bytes of shared memory that it allows, at most 232448"),
        ({"grid": (6, 3, 2)}, "6 blocks along x, must be a positive multiple of the cluster's 4"),
        (
            {"preferred_cluster": (3, 1, 1)},
            "preferred cluster of 3 blocks along x, must divide the grid's 8 and be a multiple of "
            "the cluster's 4",
        ),
        ({"preferred_cluster": (4, 2, 1)}, "preferred cluster of 2 blocks along y"),
        ({"preferred_cluster": (8, 3, 1)}, "24 blocks in a cluster, at most 16"),
        ({"grid": (8, 0, 2)}, "0 blocks along y, must be a positive multiple of the cluster's 1"),
    ],
)
def test_refuses_what_a_driver_refuses(changes: dict[str, Any], said: str) -> None:
    launch = HandedOver((4, (4, 1, 1))).read()
    check_limits(launch, load_profile("B200"))
    with pytest.raises(EmulationError, match=said):
        check_limits(replace(launch, **changes), load_profile("B200"))


def test_finds_a_kernel_and_its_static_shared_memory() -> None:
    assert static_shared_bytes(CUBIN, KERNEL) == 0
    assert static_shared_bytes(synthetic_cubin(shared_bytes=1024 + 160), KERNEL) == 160
    with pytest.raises(DriverError, match="has no kernel other"):
        static_shared_bytes(CUBIN, "other")


PTX = f""".version 9.0
.target sm_100f
.address_size 64
.visible .entry {KERNEL}()
{{
    ret;
}}
"""


def test_programs_belong_to_their_cubins() -> None:
    programs, payload = KeptPrograms(), b"host code" + CUBIN
    (cubin,) = read_cubins(payload)
    with pytest.raises(DriverError, match=f"kernel {KERNEL} has no PTX in this session"):
        programs(cubin, KERNEL)
    programs.add(payload, PTX)
    assert programs(cubin, KERNEL).entry == KERNEL
    assert programs(cubin, KERNEL) is programs(cubin, KERNEL)
    with pytest.raises(DriverError, match=r"kernel other is launched, .* the PTX is another"):
        programs(cubin, "other")


def test_names_the_archive_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime_archive, "find_runtime_library", lambda cuda: None)
    with pytest.raises(ToolchainError, match=r"static\.a for cu13, .* is not installed; run: pip"):
        link_archive("cu13", tmp_path / "driver.so", tmp_path)


@pytest.mark.parametrize("cuda", CUDA_VERSIONS)
def test_links_the_archive_of_each_cuda_version(cuda: str, tmp_path: Path) -> None:
    stand_in = Path(str(files("nvgemm_aot.emulator.driver").joinpath(LIBRARY)))
    exported = exported_symbols(link_archive(cuda, stand_in, tmp_path))
    assert exported is not None
    assert exported >= DEVICE_SYMBOLS


def test_names_functions_that_the_stand_in_lacks(tmp_path: Path) -> None:
    empty = tmp_path / "empty.so"
    subprocess.run([*c_compiler(), "-shared", "-o", empty, "-x", "c", "/dev/null"], check=True)
    with pytest.raises(ToolchainError, match=r"(?s)cannot link .*cuda[A-Z].* the command was: "):
        link_archive("cu13", empty, tmp_path)


class Counting:
    """A kernel with a pointer to a count in ``%d1``, launched with that pointer."""

    def __init__(self, body: str, *attributes: tuple[int, tuple[int, ...]]) -> None:
        self.program = parse(module("ld.param.u64 %d1, [a0];" + body, ".param .u64 a0"))
        self.count = np.zeros(2, np.uint32)
        self._pointer = ctypes.c_uint64(self.count.ctypes.data)
        self.launch = replace(
            HandedOver(*attributes).read(),
            grid=(8, 1, 1),
            block=(1, 1, 1),
            parameters=(ctypes.c_void_p * 1)(ctypes.addressof(self._pointer)),
        )

    def run(self, schedule: Schedule, **changes: Any) -> int:
        """Launches it; returns the count."""
        self.count[:] = 0
        data = self.count.view(np.uint8)
        region = Region(address=self.count.ctypes.data, data=data, name="count")
        [cubin] = read_cubins(b"\0" + CUBIN)
        runner = PtxRunner(lambda cubin, kernel: self.program, schedule)
        runner(replace(self.launch, **changes), cubin, (region,))
        return int(self.count[0])


def test_blocks_of_a_cooperative_launch_can_wait_for_each_other() -> None:
    kernel = Counting(
        "mov.u32 %r0, %nctaid.x; red.release.gpu.global.add.u32 [%d1], 1;"
        "MORE: ld.acquire.gpu.global.u32 %r1, [%d1]; setp.lt.u32 %p0, %r1, %r0; @%p0 bra MORE;"
    )
    assert kernel.run(Schedule(resident=2), is_cooperative=True) == 8
    with pytest.raises(DeadlockError):
        kernel.run(Schedule(resident=2, limit=20_000))


def test_odd_seeds_form_preferred_clusters() -> None:
    body = "mov.u32 %r0, %cluster_nctarank; red.global.add.u32 [%d1], %r0;"
    kernel = Counting(body, (4, (2, 1, 1)), (11, (4, 1, 1)))
    assert [kernel.run(Schedule(seed=seed)) for seed in range(3)] == [16, 32, 16]
