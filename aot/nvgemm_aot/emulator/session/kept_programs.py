"""PTX of the kernels that a session may launch, by their device code."""

from __future__ import annotations

from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.errors import DriverError

from ...verify.device.cubin import Cubin, read_cubins
from ..ptx.parser import parse
from ..ptx.program import Program


class KeptPrograms:
    """PTX by the digest of the cubin that was assembled from it; parsed at the first launch."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._parsed: dict[str, Program] = {}

    def add(self, payload: bytes, ptx: str) -> None:
        """Adds the PTX from which a payload's device code was assembled.

        Raises:
            MalformedElfError: If the payload has no device code.
        """
        for cubin in read_cubins(payload):
            digest = sha256_hex(cubin.content)
            if self._texts.get(digest) != ptx:
                self._texts[digest] = ptx
                self._parsed.pop(digest, None)

    def __call__(self, cubin: Cubin, kernel: str) -> Program:
        """Returns a cubin's kernel.

        Raises:
            DriverError: If no PTX was added for the cubin, or it is another kernel's.
            UnsupportedPtxError: If it has a part that the emulator does not know.
        """
        digest = sha256_hex(cubin.content)
        if digest not in self._parsed:
            if digest not in self._texts:
                raise DriverError(
                    f"kernel {kernel} has no PTX in this session (its cubin is {digest[:12]}); "
                    "build it with its PTX kept"
                )
            self._parsed[digest] = parse(self._texts[digest])
        program = self._parsed[digest]
        if program.entry != kernel:
            raise DriverError(
                f"kernel {kernel} is launched, and the PTX of its cubin {digest[:12]} has "
                f"{program.entry}; the PTX is another kernel's"
            )
        return program

    def only_program(self, payload: bytes) -> Program:
        """Returns the program of a payload with one cubin, whose PTX was added."""
        [cubin] = read_cubins(payload)
        return self(cubin, cubin.kernels[0].name)
