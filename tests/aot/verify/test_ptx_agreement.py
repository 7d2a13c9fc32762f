"""Kept PTX and the device code that it belongs to, by every fact that both show."""

from __future__ import annotations

import pytest

from nvgemm_aot.verify.device.ptx_agreement import ptx_faults
from synthetic_cubin import (
    CLUSTER_LAUNCH_CONTROL_USED,
    KERNEL,
    TCGEN05_1CTA_USED,
    TCGEN05_2CTA_USED,
    synthetic_cubin,
)

PTX = f"""
// Cuda compilation tools, release 13.4, V13.4.59
.version 9.4
.target sm_100f
.address_size 64
.visible .entry {KERNEL}(
\t.param .u64 {KERNEL}_param_0
)
.reqntid 192, 1, 1
.minnctapersm 1
{{
\t.reg .b32 \t%r<4>;
\tclusterlaunchcontrol.try_cancel.async.shared::cta.b128 [%r1], [%r2];
\t@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p2;
\tret;
}}
"""


def payload(**facts: object) -> bytes:
    return b"\x7fELF host" + synthetic_cubin(**facts)  # type: ignore[arg-type]


def test_ptx_of_the_code_itself_has_no_fault() -> None:
    assert list(ptx_faults(PTX, payload())) == []


@pytest.mark.parametrize(
    ("ptx", "facts", "said"),
    [
        (PTX, {"compiled_for": "sm_100a", "accelerator": 1}, "target sm_100f, device code was"),
        (PTX.replace("sm_100f", "sm_90a"), {}, "target sm_90a, device code was compiled for"),
        (PTX.replace(".target", ".version"), {}, "no .target directive"),
        (PTX, {"cuda_version": 129}, "from CUDA 13.4, device code was compiled with 12.9"),
        (PTX.replace(KERNEL, "other"), {}, f"kernels other, device code has {KERNEL}"),
        (PTX, {"threads": (256, 1, 1)}, "192 threads a block, device code requires 256"),
        (
            PTX.replace(".minnctapersm 1", ".maxnreg 32"),
            {},
            "at most 32 registers, device code has 40",
        ),
        (
            PTX.replace(".minnctapersm 1", ".minnctapersm 9"),
            {},
            "9 blocks of 192 threads must fit a multiprocessor, device code has 40 registers",
        ),
        (
            PTX,
            {"uses": (TCGEN05_2CTA_USED, CLUSTER_LAUNCH_CONTROL_USED)},
            "tcgen05 by 1 CTAs together, device code by 2",
        ),
        (PTX, {"uses": (TCGEN05_1CTA_USED,)}, "has cluster launch control, device code has none"),
        (
            PTX.replace("clusterlaunchcontrol", "// "),
            {},
            "no cluster launch control, device code has",
        ),
    ],
)
def test_other_code_is_told_apart(ptx: str, facts: dict[str, object], said: str) -> None:
    (fault,) = ptx_faults(ptx, payload(**facts))
    assert said in fault


def test_payloads_without_one_cubin_have_no_ptx() -> None:
    (none,) = ptx_faults(PTX, b"\x7fELF host")
    assert none.startswith("the payload's device code cannot be read: no device code")
    (two,) = ptx_faults(PTX, payload() + synthetic_cubin())
    assert two == "the payload has 2 device codes, PTX belongs to one"
