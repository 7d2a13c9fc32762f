"""Launches, as a kernel's launcher asked the driver for them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from nvgemm_runtime.errors import DriverError

from ...verify.host.elf import HEADER, MAGIC, cubin_bytes
from ..machine.launch import Extent

_COOPERATIVE, _CLUSTER_DIMENSION, _DEPENDENT_LAUNCH = 2, 4, 6
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION
(cuda.h, CUlaunchAttributeID)."""

_PREFERRED_CLUSTER_DIMENSION = 11
"""CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION (cuda.h, CUlaunchAttributeID)."""

_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_HEADER = struct.Struct("<IHHQ")
"""Header of CUDA's container for device code (fatbinary_section.h): magic, version, header bytes,
and bytes that follow."""


class LaunchStruct(ctypes.Structure):
    """``Launch`` in csrc/emulated_cuda/device.h."""

    _fields_ = (
        ("image", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("most_shared_bytes", ctypes.c_int),
        ("allows_big_clusters", ctypes.c_int),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
    )


class _AttributeStruct(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


@dataclass(frozen=True, kw_only=True)
class CaughtLaunch:
    """One launch.

    Attributes:
        image: Device code from which the kernel comes: a cubin, or a container with one.
        kernel: Name of the kernel function.
        grid: Blocks along x, y, z.
        block: Threads along x, y, z.
        cluster: Blocks of a cluster along x, y, z.
        preferred_cluster: Blocks of the preferred cluster, if the launch names one.
        shared_bytes: Dynamic shared memory per block.
        most_shared_bytes: Most dynamic shared memory that the launcher allowed the kernel.
        allows_big_clusters: True if it allowed more than 8 blocks in a cluster.
        is_dependent: True if the launch may begin before earlier ones end.
        is_cooperative: True if all blocks must be resident at once.
        device: Device's ordinal.
        parameters: Addresses of the first parameters' values; valid while the launch runs.
    """

    image: bytes
    kernel: str
    grid: Extent
    block: Extent
    cluster: Extent
    preferred_cluster: Extent | None
    shared_bytes: int
    most_shared_bytes: int
    allows_big_clusters: bool
    is_dependent: bool
    is_cooperative: bool
    device: int
    parameters: ctypes._Pointer[ctypes.c_void_p]

    def parameter_bytes(self, layout: Sequence[tuple[int, int]], size: int) -> bytes:
        """Returns the kernel's parameter space, given each parameter's offset and size in bytes."""
        space = bytearray(size)
        for number, (offset, length) in enumerate(layout):
            address = self.parameters[number]
            if not address:
                raise DriverError(f"{self.kernel}: the launch has no value for parameter {number}")
            space[offset : offset + length] = ctypes.string_at(address, length)
        return bytes(space)


def read_launch(launch: LaunchStruct) -> CaughtLaunch:
    """Reads a launch as the stand-in hands it over.

    Raises:
        DriverError: If it has an attribute that the emulator does not know.
    """
    kernel = launch.kernel.decode()
    array = ctypes.POINTER(_AttributeStruct)
    attributes = ctypes.cast(launch.attributes, array)
    values = {
        attributes[number].id: attributes[number].value for number in range(launch.attribute_count)
    }
    known = {_COOPERATIVE, _CLUSTER_DIMENSION, _DEPENDENT_LAUNCH, _PREFERRED_CLUSTER_DIMENSION}
    if unknown := values.keys() - known:
        raise DriverError(
            f"{kernel}: launch attributes {sorted(unknown)} (CUlaunchAttributeID) are not known; "
            f"the emulator knows {sorted(known)}"
        )
    preferred = values.get(_PREFERRED_CLUSTER_DIMENSION)
    return CaughtLaunch(
        image=read_image(launch.image),
        kernel=kernel,
        grid=_extent(launch.grid),
        block=_extent(launch.block),
        cluster=_extent(values.get(_CLUSTER_DIMENSION, (1, 1, 1))),
        preferred_cluster=None if preferred is None else _extent(preferred),
        shared_bytes=launch.shared_bytes,
        most_shared_bytes=launch.most_shared_bytes,
        allows_big_clusters=bool(launch.allows_big_clusters),
        is_dependent=bool(values.get(_DEPENDENT_LAUNCH, (0,))[0]),
        is_cooperative=bool(values.get(_COOPERATIVE, (0,))[0]),
        device=launch.device,
        parameters=launch.parameters,
    )


def read_image(address: int) -> bytes:
    """Returns device code in memory: a container for cubins, or a single one.

    Raises:
        DriverError: If it is neither.
    """
    magic, _, header_bytes, size = _FATBIN_HEADER.unpack(
        ctypes.string_at(address, _FATBIN_HEADER.size)
    )
    if magic == _FATBIN_MAGIC:
        return ctypes.string_at(address, header_bytes + size)
    if magic == int.from_bytes(MAGIC[:4], "little"):
        header = HEADER.unpack(ctypes.string_at(address, HEADER.size))
        return ctypes.string_at(address, cubin_bytes(header))
    raise DriverError(f"device code begins with {magic:#010x}: neither a container nor a cubin")


def _extent(values: Sequence[int]) -> Extent:
    x, y, z = values[:3]
    return x, y, z
