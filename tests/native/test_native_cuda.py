"""The launcher on a device, as far as a stand-in for the CUDA driver goes."""

from __future__ import annotations

import pytest
import torch

from cpu_kernels import operands, signature
from fake_driver import LEAVES_ANOTHER_DEVICE_CURRENT, FakeDriver
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.launch.loading import native

CUDA = """
import ctypes, functools, os, torch, tvm_ffi
import cpu_kernels, fake_driver
from pathlib import Path
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.gemm.target import Target
lib = native.load()
driver = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
@functools.cache
def load(behaviour):
    directory = Path(os.environ["LD_LIBRARY_PATH"])
    return cpu_kernels.load(cpu_kernels.signature(), directory, behaviour)
def register(behaviour="", arch="sm_90a", mark=""):
    kernel = load(behaviour)
    return lib.register_kernel(id=kernel.id + mark, function_address=kernel.address,
        signature=cpu_kernels.signature(), alignment_bytes=16, target=Target(arch=arch))
def on(tensor, device=0):
    return tvm_ffi.from_dlpack(fake_driver.OnDevice(tensor, device))
a, b, out = torch.randn(8, 8), torch.randn(8, 8), torch.full((8, 8), float("nan"))
def launch(handle, device=0):
    lib.launch(handle, on(a, device), on(b, device), on(out, device))
"""


def test_cuda_makes_the_device_current_and_restores_the_one_before(driver: FakeDriver) -> None:
    script = f"""{CUDA}
handle = register({LEAVES_ANOTHER_DEVICE_CURRENT!r})
current = ctypes.c_void_p()
for before in (None, 0x1000, 0x1001):
    driver.cuCtxSetCurrent(ctypes.c_void_p(before))
    for _ in range(2):
        out.fill_(float("nan"))
        launch(handle)
        driver.cuCtxGetCurrent(ctypes.byref(current))
        assert current.value == before, (current.value, before)
        torch.testing.assert_close(out, a @ b)
"""
    driver.run(script)


def test_cuda_fills_with_zeros_on_the_current_stream(driver: FakeDriver) -> None:
    script = f"""{CUDA}
empty_a, empty_b, buffer = torch.empty(8, 0), torch.empty(0, 8), torch.ones(8, 16)
with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77):
    lib.launch(register(), on(empty_a), on(empty_b), on(buffer[:, 4:12]))
assert (buffer[:, 4:12] == 0).all() and buffer.sum() == 64
print(ctypes.c_int.in_dll(driver, "nvgemm_emulated_memsets").value,
      ctypes.c_void_p.in_dll(driver, "nvgemm_emulated_last_stream").value)
"""
    assert driver.run(script).split() == ["1", str(0x77)]


def test_cuda_runs_only_on_architectures_of_the_target(driver: FakeDriver) -> None:
    archs = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_100f", "sm_103f", "sm_120f")
    capabilities = (80, 89, 90, 100, 103, 120, 121)
    script = f"""{CUDA}
for capability in {capabilities}:
    fake_driver.set_capability(capability)
    for arch in {archs}:
        handle = register("", arch, f"{{arch}} on {{capability}}")
        for _ in range(2):  # a refusal is not forgotten
            try:
                launch(handle)
                message = ""
            except ValueError as error:
                message = str(error)
        print(message)
"""
    printed = iter(driver.run(script).split("\n"))
    for capability in capabilities:
        for arch in archs:
            major, minor = divmod(capability, 10)
            message = next(printed)
            assert (message == "") == Target(arch=arch).runs_on((major, minor)), message
            said = f"cuda:0 has compute capability {major}.{minor}; a kernel for {arch} runs on"
            assert message == "" or said in message


def test_cuda_reports_what_the_driver_says(driver: FakeDriver) -> None:
    script = f"""{CUDA}
from nvgemm_runtime.errors import DriverError
for device in (2, 64):
    try:
        launch(register(), device)
    except DriverError as error:
        print(error)
"""
    assert driver.run(script).splitlines() == [
        "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101)",
        "tensors are on cuda:64; must be in 0..63",
    ]


def test_cuda_refuses_operands_on_two_devices(driver: FakeDriver) -> None:
    script = f"""{CUDA}
for operands in ((on(a), on(b, 1), on(out)), (on(a), on(b), out)):
    try:
        lib.launch(register(), *operands)
    except ValueError as error:
        print(error)
"""
    first, second = driver.run(script).splitlines()
    assert first.endswith("b is on cuda:1 and a on cuda:0; all must be on one device")
    assert second.endswith("out is on cpu; the kernel runs on cuda")


def test_cuda_is_refused_in_a_child_of_a_process_that_used_it(driver: FakeDriver) -> None:
    script = f"""{CUDA}
handle = register()
def child():
    if os.fork() == 0:
        try:
            launch(handle)
            print("runs", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
child()
launch(handle)
child()
launch(handle)
"""
    first, second = driver.run(script).splitlines()
    assert first == "runs"
    assert "was forked from one that had launched on CUDA" in second


def test_cuda_says_why_it_cannot_start_in_a_child_of_a_process_that_used_it_by_others(
    driver: FakeDriver,
) -> None:
    script = f"""{CUDA}
from nvgemm_runtime.errors import DriverError
fake_driver.set_variable("init_result", 3)
try:
    launch(register())
except DriverError as error:
    print(error)
fake_driver.set_variable("init_result", 0)
launch(register())  # a failure is not for ever
"""
    (said,) = driver.run(script).splitlines()
    assert "cuInit failed: CUDA_ERROR_NOT_INITIALIZED (3)" in said
    assert "forked from one that had used CUDA; start it with the 'spawn' start method" in said


def test_refuses_tensors_of_the_cpu_for_cuda(lib: native.Native, plain: tuple[str, int]) -> None:
    handle = lib.register_kernel(
        id="for cuda",
        function_address=1,
        signature=signature(),
        alignment_bytes=4,
        target=Target(arch="sm_90a"),
    )
    with pytest.raises(ValueError, match="a is on cpu; the kernel runs on cuda"):
        lib.launch(handle, *operands())


FAILS = """
  { extern char *getenv(const char *);
    if (getenv("FAKE_LOAD_FAILS")) return raise("RuntimeError", "no kernel image is available"); }
"""


@pytest.mark.parametrize("keeps_lock", [True, False])
def test_after_a_failed_load_nothing_is_loaded_by_a_library_that_keeps_its_lock(
    driver: FakeDriver, keeps_lock: bool
) -> None:
    """As libcute_dsl_runtime.so 4.7.1 does, with which the last launch hung on an H200."""
    script = f"""{CUDA}
from nvgemm_runtime.errors import DriverError
lib.set_library_keeps_lock({keeps_lock})
loaded, failing, other = (register({FAILS!r} + mark) for mark in ("", "/* 2 */", "/* 3 */"))
launch(loaded)
os.environ["FAKE_LOAD_FAILS"] = "1"
try:
    launch(failing)
except RuntimeError as error:
    print(error)
del os.environ["FAKE_LOAD_FAILS"]
launch(loaded)
for handle in (other, failing):
    out.fill_(float("nan"))
    try:
        launch(handle)
        torch.testing.assert_close(out, a @ b)
    except DriverError as error:
        print(error)
"""
    first, *others = driver.run(script).splitlines()
    assert "no kernel image is available" in first
    assert len(others) == 2 * keeps_lock
    for other in others:
        assert "cannot be loaded: a kernel failed to load in this process" in other
        assert "run: pip install 'nvidia-cutlass-dsl-libs-cu13>=4.8,<4.9', or with" in other


def test_arguments_that_cannot_be_made_do_not_stop_loading(driver: FakeDriver) -> None:
    """A workspace needs a stream of torch's, which neither of its builds gives without a driver."""
    said = driver.run(f"""{CUDA}
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.errors import DriverError
lib.set_library_keeps_lock(True)
kernel = load("")
needy = lib.register_kernel(id="needy " + kernel.id, function_address=kernel.address,
    signature=cpu_kernels.signature(), alignment_bytes=16, target=Target(arch="sm_90a"),
    workspace_bytes=64,
    convention=parse_calling_convention("tvm_ffi:gemm(a,b,out,workspace,stream)"))
try:
    launch(needy)
except (DriverError, RuntimeError) as error:
    print(error)
launch(register())
torch.testing.assert_close(out, a @ b)
""")
    is_cpu_build = torch.version.cuda is None
    assert ("this torch has no" if is_cpu_build else "get_current_cuda_stream failed") in said


REFUSES = 'return raise("ValueError", "not these");'


def test_operands_that_a_kernel_refuses_do_not_stop_loading(driver: FakeDriver) -> None:
    script = f"""{CUDA}
lib.set_library_keeps_lock(True)
try:
    launch(register({REFUSES!r}))
except ValueError as error:
    print(error)
launch(register())
torch.testing.assert_close(out, a @ b)
"""
    assert "not these" in driver.run(script)
