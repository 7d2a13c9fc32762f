"""Generates the native copy of the element type table; CMake runs it.

The argument is the output file. Runs the table by path, because the package is not installed yet.
"""

import runpy
import sys
from pathlib import Path

TABLE = Path(__file__).parents[2] / "nvgemm_runtime" / "gemm" / "types.py"


def native_rows() -> str:
    """Returns the table as an initialiser for ``kElementTypes`` in element_types.h."""
    rows = [dtype.row for dtype in runpy.run_path(str(TABLE))["DType"]]
    return "".join(
        f'{{"{row.torch_name}", {row.torch_number}, '
        f"{{{row.dlpack_code}, {row.bits}, {row.packed}}}}},\n"
        for row in rows
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(native_rows(), encoding="utf-8")
