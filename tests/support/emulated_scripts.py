"""Scripts on an emulated GPU whose launches numpy computes, in processes of their own."""

PRELUDE = """
import os, sys, torch
os.environ["NVGEMM_AOT_BUNDLES"] = sys.argv[1]
from nvgemm_aot.emulator.session import emulated_device
from nvgemm_aot.targets.profile import load_profile
fault = None
def multiply(launch, cubin, regions):
    if fault is not None:
        raise fault
    memory = {region.name: torch.frombuffer(region.data, dtype=dtype) for region in regions}
    a, b, out = memory["a"].view(*a_shape), memory["b"].view(*b_shape), memory["out"]
    product = torch.matmul(a.float(), b.float().mT if b_is_transposed else b.float())
    out.view(product.shape).copy_(product)
    return "multiplied"
emulated = emulated_device.start(load_profile("B200"), multiply)
import nvgemm_runtime
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError
from nvgemm_runtime.errors import DriverError
def values(*shape):
    return torch.randint(-3, 4, shape).to(dtype)
"""

PROBLEM = """
m, n, k, dtype, b_is_transposed = 40, 96, 64, torch.bfloat16, True
a_shape, b_shape = (m, k), (n, k)
a, b = values(m, k), values(n, k).t()
expected = (a.float() @ b.float()).to(dtype)
"""
"""One that the bundle of real kernels serves, without having been declared."""

IMPORTS = """
import torch, tvm_ffi, numpy
import nvgemm_aot.emulator.session.emulated_device
import nvgemm_runtime.launch.api
torch.set_num_threads(1)
"""
