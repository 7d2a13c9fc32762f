"""The kernels of installed wheels that this machine's GPU can run."""

from __future__ import annotations

import torch
from gemm_arguments import Arguments

from nvgemm_runtime import bundles
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.launch.select import load_kernel
from nvgemm_runtime.matching.device import device_facts


def installed_kernels() -> list[tuple[Bundle, Kernel]]:
    """Every kernel of the installed bundles that this GPU can run, each once, by id."""
    if not torch.cuda.is_available():
        return []
    facts = device_facts("cuda", 0)
    usable = [found.bundle for found in bundles() if found.refusal(facts) is None]
    kernels = {
        kernel.id: (bundle, kernel)
        for bundle in usable
        if bundle is not None
        for kernel in bundle.header.kernels
    }
    return [kernels[key] for key in sorted(kernels)]


def launch(kernel: Kernel, arguments: Arguments, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run a kernel as compiled graphs do."""
    out = arguments.out if out is None else out
    load_kernel(kernel.id).launch(arguments.a, arguments.b, out, *arguments.others)
    return out
