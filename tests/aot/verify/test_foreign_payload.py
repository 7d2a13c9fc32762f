"""Kernels that another machine compiled are checked as a build checks its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.verify.foreign_payload import payload_fault
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.target import Target

OTHER = {"sm_100f": "sm_90a", "sm_90a": "sm_100f"}


def kernels(path: Path) -> tuple[Target, list[tuple[bytes, str, str]]]:
    with Bundle(path) as bundle:
        return bundle.header.target, [
            (bundle.payload(kernel), kernel.calling_convention, kernel.provider)
            for kernel in bundle.header.kernels
        ]


@pytest.mark.parametrize("arch", ["sm_100f", "sm_90a"])
def test_accepts_real_kernels_for_their_own_target_alone(
    real_bundles: dict[str, Path], arch: str
) -> None:
    target, built = kernels(real_bundles[arch])
    others = {
        "device code is for": replace(
            target, arch={"sm_100f": "sm_90a", "sm_90a": "sm_100f"}[arch]
        ),
        "compiled with CUDA 13": replace(target, cuda="cu12"),
        "must be EM_AARCH64": replace(target, platform="linux_aarch64"),
    }
    assert len(built) == 3
    for payload, convention, provider in built:
        assert payload_fault(payload, convention, target, provider=provider) is None
        for reason, other in others.items():
            fault = payload_fault(payload, convention, other, provider=provider)
            assert fault is not None
            assert reason in fault


def test_refuses_what_is_no_kernel_of_this_toolchain(real_bundles: dict[str, Path]) -> None:
    target, ((payload, convention, provider), *_) = kernels(real_bundles["sm_90a"])
    damaged = {
        "cannot be read as ELF": payload[:2000],
        "the image starts with": b"#!/bin/sh\n" + payload,
        "needs the libraries": payload.replace(b"libtvm_ffi.so", b"libevil_xy.so"),
        "no device code": payload.replace(b"\x7fELF", b"\x7fELX").replace(
            b"\x7fELX", b"\x7fELF", 1
        ),
    }
    for reason, changed in damaged.items():
        fault = payload_fault(changed, convention, target, provider=provider)
        assert fault is not None
        assert reason in fault
    assert payload_fault(payload, "anything", target, provider=provider) is not None
