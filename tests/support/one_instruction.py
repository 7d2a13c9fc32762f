"""Runs single PTX instructions on many operands, one thread for each."""

from __future__ import annotations

import numpy as np

from nvgemm_aot.emulator.machine.global_memory import GlobalMemory, Region
from nvgemm_aot.emulator.machine.launch import Launch
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.run import execute

_LETTERS = {1: "h", 2: "h", 4: "r", 8: "d"}


def evaluate(
    text: str, result: object, *operands: np.ndarray, target: str = "sm_100a"
) -> np.ndarray:
    """Returns what an instruction gives for each row of its operands.

    Args:
        text: Instructions; ``{0}`` stands for the result's register, ``{1}`` and on for operands.
        result: numpy type of the result; bool for predicates.
        operands: One array for each operand, all of one length; bool for predicates.
        target: Architecture.
    """
    count = len(operands[0]) if operands else 32
    threads = min(-(-count // 32) * 32, 1024)
    blocks = -(-count // threads)
    dtype = np.dtype(result)
    rows = threads * blocks
    inputs = [np.zeros(rows, each.dtype) for each in operands]
    for padded, each in zip(inputs, operands):
        padded[:count] = each
    output = np.zeros(rows, dtype)
    body, names = [], []
    for place, each in enumerate([output, *inputs]):
        size = each.itemsize
        kind = f"b{8 * size}"
        body += [
            f"ld.param.u64 %d{place}, [a{place}];",
            f"mad.wide.u32 %d{place}, %r0, {size}, %d{place};",
        ]
        register = f"%{_LETTERS[size]}{place + 20}"
        if place:
            body.append(f"ld.global.{kind} {register}, [%d{place}];")
            if each.dtype.kind == "b":
                body.append(f"setp.ne.b16 %p{place}, {register}, 0;")
                register = f"%p{place}"
        elif dtype.kind == "b":
            register = "%p0"
        names.append(register)
    body.append(text.format(*names))
    if dtype.kind == "b":
        body.append("selp.b16 %h20, 1, 0, %p0;")
    store = "%h20" if dtype.kind == "b" else names[0]
    body.append(f"st.global.b{8 * dtype.itemsize} [%d0], {store};")
    parameters = ", ".join(f".param .u64 a{place}" for place in range(len(names)))
    lines = "\n".join(body)
    program = parse(
        f"""
.version 8.8
.target {target}
.address_size 64
.visible .entry kernel({parameters})
{{
.reg .pred %p<32>;
.reg .b16 %h<64>;
.reg .b32 %r<64>;
.reg .b64 %d<64>;
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.u32 %r0, %r1, %r2, %r0;
{lines}
ret;
}}
"""
    )
    arrays = [output, *inputs]
    memory = GlobalMemory(
        Region(address=each.ctypes.data, data=each.view(np.uint8), name=f"a{place}")
        for place, each in enumerate(arrays)
    )
    launch = Launch(
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        parameters=b"".join(each.ctypes.data.to_bytes(8, "little") for each in arrays),
    )
    execute(program, launch, memory)
    return output[:count]
