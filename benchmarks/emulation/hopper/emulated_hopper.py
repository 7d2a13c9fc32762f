"""An emulated H100 that runs kernels from PTX that lies beside their objects."""

from __future__ import annotations

from pathlib import Path

from nvgemm_aot.emulator.session.emulated_device import start
from nvgemm_aot.emulator.session.kept_programs import KeptPrograms
from nvgemm_aot.emulator.session.ptx_runner import PtxRunner
from nvgemm_aot.targets.profile import load_profile

PRODUCT = "H100"


def start_hopper(folder: Path) -> PtxRunner:
    """Starts the device with all PTX of a folder.

    Args:
        folder: Holds a folder for each kernel, with its ``kernel.o`` and one ``.ptx``.
    """
    programs = KeptPrograms()
    for item in sorted(folder.glob("*/kernel.o")):
        (text,) = item.parent.glob("*.ptx")
        programs.add(item.read_bytes(), text.read_text())
    runner = PtxRunner(programs)
    start(load_profile(PRODUCT), runner)
    return runner
