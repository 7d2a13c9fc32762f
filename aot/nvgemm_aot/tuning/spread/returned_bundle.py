"""Keeps a bundle that a worker wrote, after a comparison with the bundles that were tuned."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError, TuningError

from ...storage.signed_files import write_signable
from ..rewrite import read_together
from ..state.facts import Facts
from ..state.journal import Journal, Line, reserved, state_path


def keep_returned(
    data: bytes, first: Line, bundles: Sequence[Bundle], output: Path, worker: str
) -> Header:
    """Writes a worker's bundle if its native code is that of the tuned bundles.

    The output's journal gets the bundle's key. Its measurements are the client's already.

    Args:
        data: The bundle.
        first: First line of the output's journal, if it has none.
        bundles: Bundles that were tuned.
        output: File to write.
        worker: The worker's address, for messages.

    Raises:
        TuningError: If it is no intact bundle, or has other kernels; nothing is written.
        StorageError: If a file cannot be read or written.
    """
    header = _checked(data, bundles, worker)
    with reserved(output):
        if any(ranking.measured is not None for ranking in header.rankings):
            journal = Journal(state_path(output), first)
            if header.build_key not in Facts(journal.facts).written:
                journal.append({"written": header.build_key})
            journal.close()
        write_signable({output: data})
    return header


def _checked(data: bytes, bundles: Sequence[Bundle], worker: str) -> Header:
    sent = {kernel.id: kernel for kernel in read_together(bundles).kernels}
    with tempfile.TemporaryDirectory(prefix="nvgemm-tune-") as directory:
        path = Path(directory) / "returned.nvgemm"
        path.write_bytes(data)
        try:
            with Bundle(path) as bundle:
                content = read_together([bundle])
                header = bundle.header
        except NvgemmError as error:
            raise TuningError(f"worker {worker} returned no intact bundle: {error}") from None
    for kernel in content.kernels:
        if kernel != sent.get(kernel.id):
            raise TuningError(
                f"worker {worker} returned kernel {kernel.id[:12]}, which is not as in the tuned "
                "bundles, so nothing is written; find out who can change that worker and the "
                "scheduler"
            )
    return header
