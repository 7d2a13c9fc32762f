"""Changed programs of a small kernel, with verdicts that are known."""

import numpy as np
import pytest

from handwritten_kernels import aligned, module
from nvgemm_aot.emulator.machine.global_memory import Region
from nvgemm_aot.emulator.machine.launch import Launch, Schedule
from nvgemm_aot.emulator.mutants.changes import Kind, changed, removed
from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch, record
from nvgemm_aot.emulator.mutants.verdict import Outcome, Survival, is_checked, judge, why_survived
from nvgemm_aot.emulator.ptx.parser import parse

BODY = """
ld.param.u64 %d1, [a0];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, smem;
add.u32 %r3, %r3, %r2;
st.shared.b32 [%r3], %r1;
bar.sync 0;
xor.b32 %r4, %r2, 252;
mov.u32 %r5, smem;
add.u32 %r5, %r5, %r4;
ld.shared.b32 %r6, [%r5];
setp.lt.u32 %p1, %r1, 48;
@!%p1 bra DONE;
cvt.u64.u32 %d2, %r2;
add.u64 %d3, %d1, %d2;
st.global.b32 [%d3], %r6;
mov.b32 %r7, 5;
prefetch.global.L2 [%d3];
LOOP:
add.u32 %r7, %r7, 1;
setp.lt.u32 %p2, %r7, 8;
@%p2 bra LOOP;
DONE:
"""
"""Writes 48 numbers of 64 threads in reverse."""


ORDERING = """
ld.param.u64 %d1, [a0];
griddepcontrol.wait;
createpolicy.fractional.L2::evict_first.b64 %d4, 0f3F800000;
mov.u32 %r1, %tid.x;
mov.u32 %r3, smem;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r3], 5;
bar.sync 0;
mul.wide.u32 %d2, %r1, 4;
add.u64 %d3, %d1, %d2;
sub.u32 %r6, 63, %r1;
st.global.L2::cache_hint.b32 [%d3], %r6, %d4;
griddepcontrol.launch_dependents;
"""
"""Writes 64 numbers in reverse, with a barrier and a memory barrier that nothing needs."""


def recorded_of(body: str) -> tuple[RecordedLaunch, np.ndarray]:
    """Records a kernel of 64 threads; returns also the numbers that it writes."""
    result = aligned(64, np.uint32)
    result[:] = 99
    found = record(
        parse(module(body, ".param .u64 a0")),
        Launch(
            grid=(1, 1, 1),
            block=(64, 1, 1),
            shared_bytes=1024,
            parameters=result.ctypes.data.to_bytes(8, "little"),
        ),
        [Region(address=result.ctypes.data, data=result.view(np.uint8), name="c")],
    )
    return found, result


@pytest.fixture
def recorded() -> RecordedLaunch:
    found, left = recorded_of(BODY)
    assert left.tolist() == [63 - place for place in range(48)] + [99] * 16
    return found


def place_of(recorded: RecordedLaunch, text: str) -> int:
    (place,) = (
        number
        for number, each in enumerate(recorded.program.instructions)
        if each.text.startswith(text)
    )
    return place


def test_replaying_leaves_the_callers_memory_alone() -> None:
    """A workspace is freed behind a call, and its memory then belongs to someone else."""
    found, result = recorded_of(BODY)
    result[:] = 7
    assert judge(found, found.program, SCHEDULES).outcome is Outcome.SURVIVED
    why_survived([found], found.program, place_of(found, "add.u32 %r5"), SCHEDULES)
    assert set(result.tolist()) == {7}
    assert found.differing_bytes() == 0


SCHEDULES = [Schedule(limit=10_000)]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("xor.b32", Outcome.RESULT),
        ("bar.sync", Outcome.FINDING),
        ("st.shared", Outcome.FINDING),
        ("ld.param", Outcome.ERROR),
        ("add.u32 %r7", Outcome.DEADLOCK),
        ("prefetch", Outcome.SURVIVED),
    ],
)
def test_removed_instructions_are_judged(recorded, text, outcome):
    program = removed(recorded.program, place_of(recorded, text))
    assert judge(recorded, program, SCHEDULES).outcome is outcome
    assert judge(recorded, recorded.program, SCHEDULES).outcome is Outcome.SURVIVED


@pytest.mark.parametrize(
    ("text", "kind", "survival"),
    [
        ("prefetch", Kind.REMOVED, Survival.PERFORMANCE),
        ("setp.lt.u32 %p1", Kind.QUALIFIER, Survival.SAME_EFFECTS),
        ("bra LOOP", Kind.PREDICATE, Survival.SAME_EFFECTS),
    ],
)
def test_survivors_are_classified(recorded, text, kind, survival):
    place = place_of(recorded, text)
    for seed in range(20):
        program = changed(recorded.program, place, kind, seed)
        if program is None or judge(recorded, program, SCHEDULES).outcome is not Outcome.SURVIVED:
            continue
        assert why_survived([recorded], program, place, SCHEDULES) is survival
        return
    raise AssertionError("no change survives")


@pytest.mark.parametrize(
    ("text", "kind", "survival"),
    [
        ("griddepcontrol.wait", Kind.REMOVED, Survival.UNCHECKED),
        ("griddepcontrol.launch_dependents", Kind.REMOVED, Survival.PERFORMANCE),
        ("createpolicy", Kind.REMOVED, Survival.PERFORMANCE),
        ("st.global", Kind.REGISTER, Survival.PERFORMANCE),
        ("mbarrier.init", Kind.REMOVED, Survival.UNUSED),
        ("mbarrier.init", Kind.CONSTANT, Survival.UNUSED),
        ("bar.sync", Kind.REMOVED, Survival.ORDERED),
    ],
)
def test_survivors_that_order_or_hint_are_classified(text, kind, survival):
    launch, left = recorded_of(ORDERING)
    assert left.tolist() == list(range(63, -1, -1))
    place = place_of(launch, text)
    assert is_checked(launch.program.instructions[place]) is (text != "griddepcontrol.wait")
    found = set()
    for seed in range(1 if kind is Kind.REMOVED else 20):
        program = changed(launch.program, place, kind, seed)
        if program and judge(launch, program, SCHEDULES).outcome is Outcome.SURVIVED:
            found.add(why_survived([launch], program, place, SCHEDULES))
    assert found == {survival}


def test_a_policy_in_another_register_does_not_count_as_a_hint():
    """It overwrites a register that is needed elsewhere, which the results need not show."""
    launch, _ = recorded_of(ORDERING)
    place = place_of(launch, "createpolicy")
    changes = (changed(launch.program, place, Kind.REGISTER, seed) for seed in range(20))
    found = {
        why_survived([launch], each, place, SCHEDULES)
        for each in changes
        if each and judge(launch, each, SCHEDULES).outcome is Outcome.SURVIVED
    }
    assert found
    assert found <= {Survival.SAME_EFFECTS, Survival.MISSED}


@pytest.mark.parametrize(
    ("statement", "changes"),
    [
        ("add.s32 %r1, %r1, %r1;", False),
        ("add.sat.s32 %r1, %r1, %r1;", True),
        ("mul.lo.s32 %r1, %r1, %r1;", True),
        ("setp.eq.u32 %p1, %r1, %r1;", True),
        ("setp.lt.u32 %p1, %r1, %r1;", True),
    ],
)
def test_signs_that_do_not_matter_are_not_changed(statement, changes):
    program = parse(module(statement, ""))
    found = {changed(program, 0, Kind.QUALIFIER, seed) for seed in range(30)}
    names = {each.instructions[0].qualifiers for each in found if each}
    assert bool(names) is changes
    if "lo" in statement or "eq" in statement:
        assert all(statement.split()[0].endswith(each[-1]) for each in names)


def test_changes_can_be_replayed(recorded):
    for kind in Kind:
        for place in range(len(recorded.program.instructions)):
            first, again = (changed(recorded.program, place, kind, 7) for _ in range(2))
            assert (first is None) == (again is None)
            if first is not None and again is not None:
                assert first.instructions == again.instructions
                differing = [
                    number
                    for number, pair in enumerate(
                        zip(first.instructions, recorded.program.instructions)
                    )
                    if pair[0] != pair[1]
                ]
                assert differing in ([place], [])
