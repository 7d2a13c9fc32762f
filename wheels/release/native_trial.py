"""Run by a release in a process of its own, with the new wheel first on the path.

Loads the launcher beside torch, and lets an operator of it fail: the error passes from the wheel's
C++ library to torch's. Then loads each native part, named by its path in the wheel.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def main() -> None:
    """Print which installation was found; try it if it is the wheel's."""
    # An editable installation has a finder of its own, which would come before the path.
    sys.meta_path.insert(0, PathFinder)

    import torch

    import nvgemm_runtime

    sys.stdout.write(nvgemm_runtime.__file__)
    if not Path(nvgemm_runtime.__file__).is_relative_to(os.environ["PYTHONPATH"]):
        return

    from nvgemm_runtime.launch.loading import native

    native.load()
    operand = torch.zeros(2, 2)
    try:
        torch.ops.nvgemm_aot.mm(operand, operand, "0" * 64)
    except RuntimeError as error:
        if "no kernel" not in str(error):
            raise
    else:
        sys.exit("an operator did not fail without its kernel")
    for part in sys.argv[1:]:
        ctypes.CDLL(str(Path(os.environ["PYTHONPATH"], part)))


if __name__ == "__main__":
    main()
