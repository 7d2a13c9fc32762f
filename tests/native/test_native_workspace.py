"""Workspaces whose size depends on the problem's, and numbers that come from the device."""

from __future__ import annotations

import threading

import pytest
import torch

from cpu_kernels import Register, operands, signature
from fake_driver import FakeDriver
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.problem import Op, Problem
from nvgemm_runtime.launch.loading import native

PLAIN = signature()
BATCHED = signature(op=Op.BMM)

FLAGS_AND_PARTIALS = TileWorkspace(
    tile=(64, 16), tiles_multiple=(1, 2), zeroed_once=0, zeroed_per_tile=4, scratch_per_tile=4096
)
ALL_ZEROED = TileWorkspace(
    tile=(3, 5), tiles_multiple=(4, 1), zeroed_once=128, zeroed_per_tile=64, scratch_per_tile=0
)
ONE_COUNTER = TileWorkspace(
    tile=(128, 192), tiles_multiple=(2, 1), zeroed_once=4, zeroed_per_tile=0, scratch_per_tile=0
)
FORMULAS = (FLAGS_AND_PARTIALS, ALL_ZEROED, ONE_COUNTER)


@pytest.mark.parametrize(
    ("workspace", "sizes", "zeroed", "total"),
    [
        (FLAGS_AND_PARTIALS, (1, 1, 16, 1), 128, 128 + 2 * 4096),
        (FLAGS_AND_PARTIALS, (64, 17, 16, 3), 128, 128 + 3 * 2 * 4096),
        (FLAGS_AND_PARTIALS, (65, 33, 16, 9), 384, 384 + 9 * 2 * 4 * 4096),
        (ALL_ZEROED, (1, 1, 16, 1), 384, 384),
        (ALL_ZEROED, (13, 11, 16, 2), 3200, 3200),  # 128 + 64 * 2 * 8 * 3
        (ONE_COUNTER, (4096, 4096, 16, 1), 128, 128),
    ],
)
def test_the_formula_counts_tiles(
    workspace: TileWorkspace, sizes: tuple[int, int, int, int], zeroed: int, total: int
) -> None:
    m, n, k, batch = sizes
    problem = Problem(signature=BATCHED, m=m, n=n, k=k, batch=batch)
    assert workspace.zeroed_bytes(problem) == zeroed
    assert workspace.size_bytes(problem) == total


@pytest.mark.parametrize("workspace", FORMULAS)
@pytest.mark.parametrize("m", [1, 8, 65, 130])
def test_every_launch_gets_a_workspace_of_its_size_with_zeros_in_front(
    lib: native.Native, register: Register, workspace: TileWorkspace, m: int
) -> None:
    """The kernel checks both, and leaves the memory full of ones."""
    _, handle = register(PLAIN, workspace=workspace)
    for n in (1, 16, 40):
        for _ in range(3):  # torch's allocator gives back the memory of the launch before
            a, b, out = operands(m, n, 8)
            lib.launch(handle, a, b, out)
            torch.testing.assert_close(out, a @ b)


def test_batches_have_tiles_of_their_own(lib: native.Native, register: Register) -> None:
    _, handle = register(BATCHED, workspace=FLAGS_AND_PARTIALS)
    for batch in (1, 2, 33):
        a, b, out = operands(5, 20, 8, batch=batch)
        lib.launch(handle, a, b, out)
        torch.testing.assert_close(out, a @ b)


def test_no_launch_means_no_workspace(lib: native.Native, register: Register) -> None:
    """A kernel that would refuse its workspace is not called for an empty sum or result."""
    _, handle = register(PLAIN, 'return raise("ValueError", "called");', workspace=ALL_ZEROED)
    out = torch.full((4, 4), float("nan"))
    lib.launch(handle, torch.empty(4, 0), torch.empty(0, 4), out)
    assert (out == 0).all()
    lib.launch(handle, torch.empty(0, 4), torch.empty(4, 4), torch.empty(0, 4))


def test_threads_have_workspaces_of_their_own(lib: native.Native, register: Register) -> None:
    _, handle = register(PLAIN, workspace=FLAGS_AND_PARTIALS)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for m in (3, 70, 9, 130):
                a, b, out = operands(m, 24, 16)
                for _ in range(5):
                    out.fill_(float("nan"))
                    lib.launch(handle, a, b, out)
                    torch.testing.assert_close(out, a @ b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_size_beyond_all_numbers_is_an_error(lib: native.Native, register: Register) -> None:
    huge = TileWorkspace(
        tile=(1, 1),
        tiles_multiple=(2**31 - 1, 2**31 - 1),
        zeroed_once=0,
        zeroed_per_tile=64,
        scratch_per_tile=64,
    )
    id, _ = register(PLAIN, workspace=FLAGS_AND_PARTIALS)
    kernel = lib.register_kernel(
        id="huge " + id,
        function_address=1,
        signature=PLAIN,
        alignment_bytes=4,
        target=None,
        workspace=huge,
        convention=native.CallingConvention(
            name="gemm", parameters=("a", "b", "out", "workspace", "stream")
        ),
    )
    with pytest.raises(ValueError, match="needs a workspace of more than 9223372036854775807"):
        lib.launch(kernel, *operands())
    assert not lib.try_launch(kernel, *operands())


def test_a_workspace_that_cannot_be_allocated_is_torchs_error(
    lib: native.Native, register: Register
) -> None:
    _, handle = register(PLAIN, workspace_bytes=2**62)
    with pytest.raises(torch.OutOfMemoryError, match=f"{2**62} bytes cannot be allocated: .*memor"):
        lib.launch(handle, *operands())


CLUSTERS = """
import ctypes, os, torch, tvm_ffi
import cpu_kernels, fake_driver
from pathlib import Path
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.gemm.target import Target
lib = native.load()
driver = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
REPORTS = "store_fp32(out->data, 0, (float)arguments[AT_CLUSTERS].v.i); return 0;"
kernel = cpu_kernels.load(cpu_kernels.signature(), Path(os.environ["LD_LIBRARY_PATH"]), REPORTS,
                          takes_clusters=True)
def clusters(size, device=0):
    handle = lib.register_kernel(id=f"{kernel.id} {size}", function_address=kernel.address,
        signature=cpu_kernels.signature(), alignment_bytes=16, target=Target(arch="sm_90a"),
        cluster_size=size, convention=parse_calling_convention(kernel.convention))
    a, b, out = (tvm_ffi.from_dlpack(fake_driver.OnDevice(x, device)) for x in (x, y, z))
    lib.launch(handle, a, b, out)
    return int(z[0, 0])
x, y, z = torch.randn(8, 8), torch.randn(8, 8), torch.full((8, 8), float("nan"))
"""


def test_clusters_are_as_many_as_the_device_runs_at_once(driver: FakeDriver) -> None:
    said = driver.run(f"""{CLUSTERS}
print([clusters(size) for size in (1, 2, 4, 8, 16)], [clusters(size, 1) for size in (1, 2, 16)])
asked = ctypes.c_int.in_dll(driver, "nvgemm_emulated_occupancy_questions").value
print([clusters(size) for size in (1, 2, 4, 8, 16)])
print(asked, ctypes.c_int.in_dll(driver, "nvgemm_emulated_occupancy_questions").value,
      ctypes.c_int.in_dll(driver, "nvgemm_emulated_modules").value)
""").splitlines()
    assert said[0] == "[132, 66, 32, 16, 8] [112, 56, 7]"
    assert said[1] == "[132, 66, 32, 16, 8]"
    assert said[2] == "6 6 0", "each size is asked once a device, and no module stays"


def test_without_the_compiler_of_ptx_multiprocessors_bound_the_clusters(driver: FakeDriver) -> None:
    said = driver.run(f"""{CLUSTERS}
fake_driver.set_variable("rejects_ptx", 1)
print([clusters(size) for size in (1, 2, 16)])
""")
    assert said.strip() == "[132, 66, 8]"


def test_a_cluster_of_a_size_that_no_device_has_is_refused(driver: FakeDriver) -> None:
    said = driver.run(f"""{CLUSTERS}
try:
    clusters(17)
except ValueError as error:
    print(error)
""")
    assert "clusters of 17 thread blocks on cuda:0; must be of 1..16" in said


def test_on_a_cpu_one_cluster_runs(
    lib: native.Native, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import cpu_kernels
    from nvgemm_runtime.bundle.calling_convention import parse_calling_convention

    reports = "store_fp32(out->data, 0, (float)arguments[AT_CLUSTERS].v.i); return 0;"
    kernel = cpu_kernels.load(PLAIN, tmp_path_factory.mktemp("k"), reports, takes_clusters=True)
    convention = parse_calling_convention(kernel.convention)
    assert convention is not None
    handle = lib.register_kernel(
        id=kernel.id,
        function_address=kernel.address,
        signature=PLAIN,
        alignment_bytes=4,
        target=None,
        cluster_size=2,
        convention=convention,
    )
    a, b, out = operands()
    lib.launch(handle, a, b, out)
    assert out[0, 0] == 1
