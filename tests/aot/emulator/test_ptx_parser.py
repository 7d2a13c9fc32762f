"""PTX that the parser reads, and PTX that it must refuse by name."""

from __future__ import annotations

import pytest

from nvgemm_aot.emulator.emulation_errors import UnsupportedPtxError
from nvgemm_aot.emulator.instructions.decoding import plan_of
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.ptx.ptx_operands import Immediate, Register, Vector
from tests.support.handwritten_kernels import module

GOOD = module("mov.b32 %r0, 1;")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no .version and .target"),
        (GOOD.replace(".version 8.8", ".version 7.8"), "7.8, must be 8.0 to 9.4"),
        (GOOD.replace(".version 8.8", ".version 12.0"), "12.0, must be 8.0 to"),
        (GOOD.replace("sm_100a", "sm_80"), "'sm_80', must be one of sm_90a"),
        (GOOD.replace("sm_100a", "sm_120a"), "'sm_120a', must be one of"),
        (GOOD + GOOD[GOOD.index(".visible") :], "2 kernels, must have 1"),
        (GOOD[: GOOD.index(".visible")], "0 kernels, must have 1"),
        (GOOD[: GOOD.index("ret")], "ends within its kernel"),
        (GOOD[: GOOD.index("ret") + 2], "ends within its kernel"),
        (GOOD.replace("{\n.reg", ".noreturn {\n.reg", 1), "directive .noreturn"),
        (module(".local .b8 spill[16];"), ".local .b8 spill"),
        (GOOD.replace(".visible", ".global .b32 counter;\n.visible"), ".global .b32 counter"),
        (GOOD.replace(".visible", ".func helper() { ret; }\n.visible"), ".func helper"),
        (module("bra NOWHERE;"), "line 13: bra NOWHERE: NOWHERE is not known"),
        (module("mov.b32 %r0, %x7;"), "special register %x7"),
        (module("mov.b32 undeclared, 0;"), "undeclared is not known"),
        (module(".reg .v3 .b32 t;"), ".reg .v3 .b32 t"),
        (module(".reg .quarter t;"), ".reg .quarter t"),
        (GOOD.replace("kernel()", "kernel(.param .texref t)"), "parameter '.param .texref t'"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(UnsupportedPtxError, match=message):
        plan_of(parse(text))


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("frobnicate.b32 %r0, %r1;", "opcode frobnicate"),
        ("add.sideways.s32 %r0, %r1, %r2;", "qualifier .sideways"),
        ("add.s32.x %r0, %r1, %r2;", "qualifier .x"),
        ("add.s32 %r0, %r1, %d2;", "%d2 of type .b64 as .s32"),
        ("add.s32 %d0, %r1, %r2;", "%d0 of type .b64 for .s32"),
        ("add.s32 %r0, %r1;", "2 operands"),
        ("add.f32 %r0, %r1, 1;", "constant 0x1 as .f32"),
        ("add.rn.ftz.bf16 %h0, %h1, %h2;", "combination .rn.ftz.bf16"),
        ("fma.f32 %r0, %r1, %r2, %r3;", "qualifier .f32"),
        ("shl.u32 %r0, %r1, 1;", "qualifier .u32"),
        ("setp.lo.s32 %p0, %r1, %r2;", "comparison .lo of .s32"),
        ("setp.lt.b32 %p0, %r1, %r2;", "comparison .lt of .b32"),
        ("lop3.b32 %r0, %r1, %r2, %r3, 256;", "table"),
        ("mov.b64 %d0, {%r0, %r1, %r2};", "a vector of 3 as .b64"),
        ("mov.b64 %d0, {%h0, %h1};", "%h0 of type .b16 as .b32"),
        ("ld.global.v3.b32 {%r0, %r1, %r2}, [%d0];", "qualifier .v3"),
        ("ld.global.v2.b32 {%r0, %r1, %r2}, [%d0];", "a vector of 3"),
        ("ld.shared.nc.b32 %r0, [%r1];", "qualifier .nc"),
        ("ld.global.b64 %r0, [%d0];", "result"),
        ("ld.acquire.b32 %r0, [%d0];", "qualifier .b32"),
        ("ld.global.b32 %r0, [%r1];", "address %r1 of type .b32"),
        ("st.release.gpu.global.v4.b64 [%d0], {%d1, %d2, %d3};", "a vector of 3"),
        ("st.global.nc.b32 [%d0], %r0;", "qualifier .nc"),
        ("shfl.sync.around.b32 %r0, %r1, 0, 31, -1;", "qualifier .around"),
        ("bar.red.popc.u32 %r0, 1, %p0;", "qualifier .red"),
        ("fence.proxy.everything;", "qualifier .everything"),
        ("fence.mbarrier_init.release.gpu;", "qualifier .gpu"),
        ("ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r0}, [%r1];", "qualifier .x3"),
        ("stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r1], {%r0};", "without .trans"),
        ("setmaxnreg.inc.sync.aligned.u32 100;", "multiple of 8"),
        ("cp.async.cg.shared.global [%r0], [%d0], 8;", "size 8"),
        ("barrier.cluster.arrive.acquire;", "qualifier .acquire"),
        ("prefetch.L3 [%d0];", "qualifier .L3"),
        ("redux.sync.add.f32 %r0, %r1, -1;", "qualifier .f32"),
        ("elect.sync %r0, -1;", "result"),
        ("tanh.f32 %r0, %r1;", "qualifier .f32"),
    ],
)
def test_names_what_it_does_not_know(statement: str, named: str) -> None:
    with pytest.raises(UnsupportedPtxError) as caught:
        plan_of(parse(module(statement)))
    assert named in str(caught.value)
    assert str(caught.value).startswith("line 13: ")


def test_names_all_unknown_instructions_at_once() -> None:
    with pytest.raises(UnsupportedPtxError, match="2 unknown instructions") as caught:
        plan_of(parse(module("one.b32 %r0;\nmov.b32 %r0, 1;\ntwo.b32 %r0;")))
    assert "line 13: one.b32" in str(caught.value)
    assert "line 15: two.b32" in str(caught.value)


def test_names_equal_unknown_instructions_once() -> None:
    body = "one.b32 %r0;\none.b32 %r1;\none.b64 %d0;\none.b32 %r2;"
    with pytest.raises(UnsupportedPtxError, match="4 unknown instructions") as caught:
        plan_of(parse(module(body)))
    message = str(caught.value)
    assert "line 13: one.b32 %r0: opcode one is not known to the emulator (2 more alike)" in message
    assert "line 15: one.b64" in message
    assert "%r1" not in message


def test_reads_constants_and_vector_registers() -> None:
    program = parse(
        module(
            "mov.b32 %r0, 0x1F; mov.b32 %r0, -5; mov.b32 %r0, 017; mov.b32 %r0, 0b101U;"
            "mov.f32 %r0, 0f3F800000; mov.f32 %r0, 1.5; mov.b32 %r0, WARP_SZ;"
            "{ .reg .v2 .s32 pair; mov.s32 pair.y, 3; st.shared.v2.b32 [smem], pair; }"
        )
    )
    constants = [each.operands[1] for each in program.instructions[:7]]
    assert constants[:4] == [Immediate(31), Immediate(-5), Immediate(15), Immediate(5)]
    assert constants[4] == Immediate(0x3F800000, 32)
    assert constants[5] == Immediate(0x3FF8 << 48, 64)
    assert constants[6] == Immediate(32)
    stored = program.instructions[8].operands[1]
    assert isinstance(stored, Vector)
    assert program.instructions[7].operands[0] == stored.elements[1]


def test_names_in_braces_hide_outer_ones() -> None:
    program = parse(module("{ .reg .b32 %r0; L: mov.b32 %r0, 1; bra L; }\nmov.b32 %r0, 2;"))
    inner, _, outer, _ = program.instructions
    assert isinstance(inner.operands[0], Register)
    assert isinstance(outer.operands[0], Register)
    assert inner.operands[0].number != outer.operands[0].number


def test_lines_of_the_source_hide_no_instruction() -> None:
    text = module(
        "mov.b32 %r0, 1;\n.loc 1 5 3\nmov.b32 %r1, 2;\n"
        ".loc 1 7 3, function_name $L__info_string0, inlined_at 1 2 3\nmov.b32 %r2, 3;"
    )
    text += '.file 1 "sources//kernel.py"\n.section .debug_str\n{\n.b8 65, 0\n}\n'
    program = parse(text)
    names = [each.operands[0] for each in program.instructions[:3]]
    assert [each.name for each in names if isinstance(each, Register)] == ["%r0", "%r1", "%r2"]
    assert [each.line for each in program.instructions[:3]] == [13, 15, 17]


def test_comments_keep_line_numbers() -> None:
    program = parse(module("/* one\ntwo */ mov.b32 %r0, 1; // three\nmov.b32 %r1, 1;"))
    assert [each.line for each in program.instructions[:2]] == [14, 15]
