"""Launches as they are executed: parameters, and grids with fewer clusters than asked for."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from handwritten_kernels import module
from nvgemm_aot.emulator.driver.caught_launch import CaughtLaunch
from nvgemm_aot.emulator.machine.launch import Extent
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.session.ptx_runner import emulated_launch

STEPPING = parse(module("mov.u32 %r1, %nctaid.z;"))
"""A program that reads the number of blocks along z."""

CAUGHT = CaughtLaunch(
    image=b"",
    kernel="kernel",
    grid=(2, 1, 8),
    block=(32, 1, 1),
    cluster=(2, 1, 1),
    preferred_cluster=None,
    shared_bytes=0,
    most_shared_bytes=0,
    allows_big_clusters=False,
    is_dependent=False,
    is_cooperative=False,
    device=0,
    parameters=(ctypes.c_void_p * 1)(),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("most", "grid"),
    [(None, (2, 1, 8)), (1, (2, 1, 1)), (3, (2, 1, 3)), (9, (2, 1, 8))],
)
def test_a_kernel_that_steps_by_the_grid_gets_fewer_clusters(
    most: int | None, grid: Extent
) -> None:
    assert emulated_launch(CAUGHT, STEPPING, most).grid == grid


def test_a_kernel_with_a_preferred_cluster_keeps_its_grid() -> None:
    preferred = replace(CAUGHT, preferred_cluster=(2, 2, 1))
    assert emulated_launch(preferred, STEPPING, 1).grid == CAUGHT.grid


def test_whole_clusters_are_left_out() -> None:
    along_z = replace(CAUGHT, cluster=(2, 1, 2))
    assert emulated_launch(along_z, STEPPING, 1).grid == (2, 1, 2)


@pytest.mark.parametrize(
    ("body", "grid"),
    [
        ("", (2, 1, 8)),
        ("mov.u32 %r1, %nctaid.x;", (2, 1, 8)),
        ("mov.u32 %r1, %nctaid.z;", (4, 1, 8)),
    ],
)
def test_other_grids_are_as_the_launcher_asked(body: str, grid: Extent) -> None:
    program = parse(module(body))
    assert emulated_launch(replace(CAUGHT, grid=grid), program, 1).grid == grid
