"""Users' functions on an emulated GPU, by real kernels' own launchers, with numpy's arithmetic."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emulated_scripts import IMPORTS, PRELUDE, PROBLEM
from forked_scripts import ForkedScripts, forked_scripts
from nvgemm_aot.pipeline.linker import c_compiler

Run = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkedScripts]:
    """Processes that have imported the emulator, and loaded no driver."""
    with forked_scripts(IMPORTS) as scripts:
        yield scripts


@pytest.fixture(scope="module")
def run(scripts: ForkedScripts, real_bundles: dict[str, Path]) -> Run:
    """Runs a script on an emulated B200 that finds real kernels, and returns what it printed."""

    def run(script: str) -> list[str]:
        done = scripts.run(PRELUDE + PROBLEM + script, str(real_bundles["sm_100f"]))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_users_functions_find_and_launch_kernels(run: Run) -> None:
    run("""
found = nvgemm_runtime.explain(a, b)
assert found.facts.name == "NVIDIA B200" and found.match is not None, found
torch.testing.assert_close(nvgemm_runtime.mm(a, b), expected)
(call,) = emulated.calls
assert call.kernel_id == found.match.kernels[0].kernel.id
((launch, result),) = call.launches
assert result == "multiplied"
""")


def test_launches_say_how_kernels_were_built(run: Run) -> None:
    """Each kernel's design, as its entry in the bundle states it, and its device code."""
    run("""
from nvgemm_aot.verify.device.cubin import read_cubins
for served in nvgemm_runtime.explain(a, b).match.kernels:
    out = torch.full((m, n), float("nan"), dtype=dtype)
    nvgemm_runtime.mm(a, b, out=out, kernel=served.kernel.id)
    torch.testing.assert_close(out, expected)
    ((launch, _),) = emulated.calls[-1].launches
    design = served.kernel.design
    assert launch.cluster == (*design.cluster, 1)
    assert launch.is_dependent == design.dependent_launch
    assert 0 < launch.shared_bytes <= launch.most_shared_bytes == 232448
    (function,) = read_cubins(launch.image)[0].kernels
    assert function.name == launch.kernel
    assert function.threads == launch.block[0]
""")


def test_batches_are_launched(run: Run) -> None:
    run("""
dtype, b_is_transposed = torch.float16, False
a = values(3, 64, 128).mT
b = values(3, 64, 96)
a_shape, b_shape = (3, 64, 128), (3, 64, 96)
def multiply(launch, cubin, regions):
    memory = {region.name: torch.frombuffer(region.data, dtype=dtype) for region in regions}
    product = memory["a"].view(3, 64, 128).mT.float() @ memory["b"].view(3, 64, 96).float()
    memory["out"].view(3, 128, 96).copy_(product)
emulated._run = multiply
torch.testing.assert_close(nvgemm_runtime.bmm(a, b), (a.float() @ b.float()).to(dtype))
assert emulated.calls[0].launches[0][0].grid[2] == 3
""")


def test_a_fault_is_the_calls_error_and_not_the_next_ones(run: Run) -> None:
    said = run("""
for fault in (EmulationError("planted"), DeadlockError("waits"), ValueError("other"), None):
    try:
        nvgemm_runtime.mm(a, b)
        print("computed")
    except Exception as error:
        print(type(error).__name__, str(error).split(": ", 1)[1])
print(*(type(failure).__name__ for failure in emulated.failures))
""")
    assert said == [
        "EmulationError planted",
        "DeadlockError waits",
        "ValueError other",
        "computed",
        "EmulationError DeadlockError ValueError",
    ]


def test_bytes_between_a_results_rows_must_not_change(run: Run) -> None:
    said = run("""
buffer = torch.full((m, n + 16), 7.0, dtype=dtype)
def multiply(launch, cubin, regions):
    buffer[:, :n] = expected
    buffer[overwritten, n + 3 :] = 8.0
emulated._run = multiply
for overwritten in (slice(0, 0), slice(m - 2, m)):  # the last row's end is no gap
    try:
        nvgemm_runtime.mm(a, b, out=buffer[:, :n])
        print("computed")
    except Exception as error:
        print(type(error).__name__, str(error).split(": ", 1)[1])
torch.testing.assert_close(buffer[:, :n], expected)
assert len(emulated.failures) == 1
""")
    assert said == [
        "computed",
        # both bytes of 13 elements in one row
        "MemoryAccessError writes 26 bytes between the rows of out, the first at byte "
        f"{2 * (38 * 112 + 96 + 3)} behind its first element",
    ]


def test_operands_are_checked_as_for_any_kernel(run: Run) -> None:
    said = run("""
kernel = nvgemm_runtime.explain(a, b).match.kernels[0].kernel.id
for operands in ((a[:, 1:-7], b[1:-7]), (a.float(), b.float()), (a, b[:8])):
    try:
        nvgemm_runtime.mm(*operands, kernel=kernel)
    except (TypeError, ValueError, nvgemm_runtime.errors.NoKernelError) as error:
        print(type(error).__name__)
assert not emulated.calls
""")
    assert said == ["ValueError", "TypeError", "ValueError"]


def test_a_process_emulates_one_device(run: Run) -> None:
    (said,) = run("""
try:
    emulated_device.start(load_profile("GB300"), multiply)
except DriverError as error:
    print(error)
""")
    assert said == ("this process emulates B200 already; emulate GB300 in another one")


def test_other_devices_do_not_exist(run: Run) -> None:
    (said,) = run("""
from nvgemm_runtime.matching.device import device_facts
try:
    device_facts("cuda", 1)
except DriverError as error:
    print(error)
""")
    assert said == "tensors are on cuda:1; the emulated GPU takes CPU tensors"


def test_a_loaded_cuda_runtime_is_not_called(
    scripts: ForkedScripts, real_bundles: dict[str, Path], tmp_path: Path
) -> None:
    """Torch for CUDA loads one whose functions all libraries find first."""
    library = tmp_path / "libcudart.so.13"
    functions = ("cudaGetDevice", "cudaLibraryLoadData", "cudaLaunchKernelExC")
    source = "#include <stdlib.h>\n" + "".join(f"int {f}() {{ abort(); }}" for f in functions)
    (tmp_path / "runtime.c").write_text(source)
    command = [*c_compiler(), "-shared", "-fPIC", "-o", library, tmp_path / "runtime.c"]
    subprocess.run(command, check=True)
    load = f"import ctypes\nctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    multiply = "torch.testing.assert_close(nvgemm_runtime.mm(a, b), expected)\n"
    bundle = str(real_bundles["sm_100f"])
    done = scripts.run(load + PRELUDE + PROBLEM + multiply, bundle)
    assert done.returncode == 0, done.stderr


def test_a_loaded_driver_is_not_touched(scripts: ForkedScripts, tmp_path: Path) -> None:
    source, other = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }")
    soname = "-Wl,-soname,libcuda.so.1"
    command = [*c_compiler(), "-shared", "-fPIC", soname, "-o", other, source]
    subprocess.run(command, check=True)
    done = scripts.run(f"""
import ctypes
ctypes.CDLL({str(other)!r})
from nvgemm_aot.emulator.driver.stand_in import load_stand_in
from nvgemm_runtime.errors import DriverError
try:
    load_stand_in()
except DriverError as error:
    print(error)
""")
    assert "this process has loaded another CUDA driver" in done.stdout, done.stderr
