"""Checks a kernel that another machine compiled as a build checks its own."""

from __future__ import annotations

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.gemm.target import CPU, Target

from .device.cubin import check_cubin, read_cubins
from .device.kernel_design import KNOWN_PROVIDERS
from .findings import Finding
from .host.elf import MalformedElfError
from .host.host_object import check_host_object, read_host_object


def payload_fault(
    payload: bytes, calling_convention: str, target: Target, *, provider: str
) -> str | None:
    """Returns the reason that a payload is no kernel for a target, or None.

    It must be a shared object for the target's platform that exports the calling convention's
    function alone and needs the runtime's libraries alone. Its device code must be for the target's
    architecture and CUDA, without spilled registers.

    Args:
        payload: The kernel.
        calling_convention: Its candidate's.
        target: Target to run on.
        provider: Its provider. Unlike those that come with nvgemm-aot, others may hide device code.
    """
    convention = parse_calling_convention(calling_convention)
    if convention is None:
        return f"calling convention {calling_convention!r:.80} is unknown"
    on_cpu = target.arch == CPU
    findings: list[Finding] = []
    try:
        host = read_host_object(payload)
        findings += check_host_object(
            host, convention.symbol, platform=target.platform, on_cpu=on_cpu
        )
    except MalformedElfError as error:
        return str(error)
    try:
        cubins = () if on_cpu else read_cubins(payload)
    except MalformedElfError as error:
        if provider in KNOWN_PROVIDERS:
            return str(error)
        cubins = ()
    for cubin in cubins:
        findings += check_cubin(cubin, target=target, profiles=(), launch_bytes=0)
    return "; ".join(finding.message for finding in findings) or None
