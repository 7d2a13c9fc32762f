"""How scripts call the launchers of a bundle's kernels with a stand-in for the CUDA driver.

A compiled kernel checks its arguments before it calls CUDA. So a call that is wrong ends in its
message, and one that is right gets as far as CUDA, which the stand-in is not.
"""

REACHES_CUDA = "Got Cuda Runtime Error: cudaErrorInsufficientDriver"

PRELUDE = """
import ctypes, sys, torch, tvm_ffi
from dataclasses import replace
import fake_driver
from edges import problem_of
from gemm_arguments import random_arguments
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.launch.loading.loader import KernelLoader
driver = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
lib, library, bundle = native.load(), KernelLoader(), Bundle(sys.argv[1])
def on(tensor):
    return tvm_ffi.from_dlpack(fake_driver.OnDevice(tensor))
def tensors(signature, m):
    arguments = random_arguments(problem_of(signature, m, 64, 256), "cpu")
    return [on(tensor) for tensor in (*arguments.operands(), *arguments.others)]
def say(kernel, function, *arguments):
    try:
        function(*arguments)
        message = "returned"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    print(kernel.signature.key, message.replace("\\n", " "), sep="|")
"""
