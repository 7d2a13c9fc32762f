"""Run by a release in a process of its own, with the new wheel first on the path.

Loads the native part beside torch, and lets an operator of it fail: the error passes from the
wheel's C++ library to torch's.
"""

from __future__ import annotations

import sys

import torch

import nvgemm_runtime
from nvgemm_runtime.launch import native

native.load()
operand = torch.zeros(2, 2)
try:
    torch.ops.nvgemm_aot.mm(operand, operand, "0" * 64)
except RuntimeError as error:
    if "no kernel" not in str(error):
        raise
else:
    sys.exit("an operator did not fail without its kernel")
sys.stdout.write(nvgemm_runtime.__file__)
