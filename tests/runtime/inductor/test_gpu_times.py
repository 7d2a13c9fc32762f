"""What calls take on the GPU without their launches: a GPU and its host are imitated here."""

from __future__ import annotations

import itertools

import pytest

from imitated_gpu import Machine, imitate
from nvgemm_runtime.inductor.autotuning import gpu_times


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return imitate(monkeypatch)


@pytest.mark.parametrize("host_us", [1.0, 30.0, 400.0])
@pytest.mark.parametrize("gpu_us", [2.0, 12.6, 700.0])
def test_the_time_is_the_kernels_and_not_the_launches(
    machine: Machine, host_us: float, gpu_us: float
) -> None:
    """Of two events around a launch, the later waits for the host: 30 µs for a kernel of 2 µs."""
    time_ms = gpu_times.measure_ms(lambda: machine.run(host_us=host_us, gpu_us=gpu_us))
    launch_us = host_us + 7.0
    assert time_ms * 1e3 == pytest.approx(gpu_us + launch_us * gpu_times.LAUNCH_SHARE)


def test_half_of_the_time_is_of_calls_that_find_their_operands_in_the_cache(
    machine: Machine,
) -> None:
    flushes = 0

    def call() -> None:
        nonlocal flushes
        was_flushed, flushes = machine.flushes > flushes, machine.flushes
        machine.run(host_us=0.0, gpu_us=12.0 if was_flushed else 6.0)

    launch_us = 7.0  # the flush, and two events
    cold = 12.0 * gpu_times.MOST_CALLS
    warm = 6.0 * gpu_times.MOST_CALLS
    assert gpu_times.measure_ms(call) * 1e3 == pytest.approx(
        (cold + warm) / 2 / gpu_times.MOST_CALLS + launch_us * gpu_times.LAUNCH_SHARE
    )


def test_calls_that_something_disturbed_do_not_count(machine: Machine) -> None:
    """Of 30 calls behind a flush, a few that took ten times as long."""
    numbers = itertools.count()

    def call() -> None:
        disturbed = next(numbers) - 1 - gpu_times.TRIAL_CALLS in (3, 9, 17)
        machine.run(host_us=0.0, gpu_us=100.0 if disturbed else 10.0)

    assert gpu_times.measure_ms(call) * 1e3 == pytest.approx(10.0, abs=0.1)


def test_a_group_of_calls_that_another_process_disturbed_does_not_count(machine: Machine) -> None:
    """Of the calls that find their operands in the cache, six in a row took ten times as long."""
    calls_before = 1 + gpu_times.TRIAL_CALLS + gpu_times.MOST_CALLS
    numbers = itertools.count(-calls_before)

    def call() -> None:
        machine.run(host_us=0.0, gpu_us=100.0 if 6 <= next(numbers) < 12 else 10.0)

    assert gpu_times.measure_ms(call) * 1e3 == pytest.approx(10.0, abs=0.1)


def test_of_equal_kernels_the_cheaper_launch_wins_and_else_the_quicker_kernel(
    machine: Machine,
) -> None:
    def time_ms(host_us: float, gpu_us: float) -> float:
        return gpu_times.measure_ms(lambda: machine.run(host_us=host_us, gpu_us=gpu_us))

    assert time_ms(4.0, 10.5) < time_ms(20.0, 10.5) < time_ms(4.0, 10.6)


def test_a_host_that_falls_behind_is_waited_for(machine: Machine) -> None:
    """A launch that takes longer than it did in the trial: the first wait is not enough."""
    costs = itertools.chain([10.0] * 6, itertools.repeat(100.0))
    time_ms = gpu_times.measure_ms(lambda: machine.run(host_us=next(costs), gpu_us=3.0))
    assert time_ms * 1e3 == pytest.approx(3.0, abs=0.1)
    assert len(machine.waits_us) > 1


def test_a_call_that_waits_for_the_gpu_itself_still_gets_a_time(machine: Machine) -> None:
    def call() -> None:
        machine.run(host_us=10.0, gpu_us=10.0)
        machine.synchronize()

    assert 10.0 <= gpu_times.measure_ms(call) * 1e3 < 1000.0
    assert len(machine.waits_us) == gpu_times.ATTEMPTS


def test_no_call_has_the_gpu_wait_for_long(machine: Machine) -> None:
    gpu_times.measure_ms(lambda: machine.run(host_us=1e6, gpu_us=10.0))
    assert max(machine.waits_us) <= gpu_times.LONGEST_WAIT_MS * 1e3


@pytest.mark.parametrize(("gpu_ms", "calls"), [(0.01, 30), (1.0, 5), (100.0, 3)])
def test_slow_kernels_are_timed_less_often(machine: Machine, gpu_ms: float, calls: int) -> None:
    counted: list[None] = []

    def call() -> None:
        counted.append(None)
        machine.run(host_us=5.0, gpu_us=gpu_ms * 1e3)

    gpu_times.measure_ms(call)
    assert len(counted) == 1 + gpu_times.TRIAL_CALLS + 2 * calls


@pytest.mark.parametrize("boost", [0.86, 1.0, 1.2])
@pytest.mark.parametrize("worked_us", [0.0, 70e3, 200e3])
def test_calls_that_take_turns_are_compared_at_whatever_clocks(
    machine: Machine, boost: float, worked_us: float
) -> None:
    machine.boost, machine.worked_us = boost, worked_us

    def work(gpu_us: float) -> None:
        machine.run(host_us=40.0, gpu_us=gpu_us)

    own, other = gpu_times.measure_in_turns_ms(lambda: work(2300.0), lambda: work(2500.0))
    assert own / other == pytest.approx(0.92, rel=0.002)
    assert min(boost, 1.0) * 2.5 <= other * 1.001
    assert other <= max(boost, 1.0) * 2.5 * 1.001


@pytest.mark.parametrize("gpu_us", [150.0, 2500.0])
def test_calls_take_turns_under_a_load_that_lasts(machine: Machine, gpu_us: float) -> None:
    machine.boost = 0.86

    def call() -> None:
        machine.run(host_us=5.0, gpu_us=gpu_us)

    own, other = gpu_times.measure_in_turns_ms(call, call, load_ms=110.0)
    assert [own * 1e3, other * 1e3] == pytest.approx([gpu_us, gpu_us], rel=1e-3)
    assert machine.worked_us < 200e3, "no longer than that"


@pytest.mark.parametrize("load_ms", [0.0, 60.0])
def test_the_gpu_works_while_the_host_sends_calls_in_turns(
    machine: Machine, load_ms: float
) -> None:
    """While it spins, its clocks rise. Here the host takes most of the time that the GPU takes."""
    own, other = gpu_times.measure_in_turns_ms(
        lambda: machine.run(host_us=20.0, gpu_us=160.0),
        lambda: machine.run(host_us=150.0, gpu_us=170.0),
        load_ms=load_ms,
    )
    assert not machine.waits_us
    assert [own * 1e3, other * 1e3] == pytest.approx([160.0, 170.0], rel=0.01)


def test_it_spins_where_the_host_is_the_slower(machine: Machine) -> None:
    own, other = gpu_times.measure_in_turns_ms(
        lambda: machine.run(host_us=300.0, gpu_us=160.0),
        lambda: machine.run(host_us=300.0, gpu_us=170.0),
        load_ms=60.0,
    )
    assert machine.waits_us
    assert [own * 1e3, other * 1e3] == pytest.approx([160.0, 170.0], rel=0.01)


def test_a_turn_that_another_process_disturbed_does_not_count(machine: Machine) -> None:
    numbers = itertools.count()

    def call() -> None:
        machine.run(host_us=10.0, gpu_us=3000.0 if next(numbers) in (6, 10) else 300.0)

    own, other = gpu_times.measure_in_turns_ms(
        call, lambda: machine.run(host_us=10.0, gpu_us=310.0)
    )
    assert own * 1e3 == pytest.approx(300.0, rel=0.01)
    assert other * 1e3 == pytest.approx(310.0, rel=0.01)


def test_calls_in_turns_wait_for_the_host(machine: Machine) -> None:
    costs = itertools.chain([10.0] * 4, itertools.repeat(300.0))
    own, _ = gpu_times.measure_in_turns_ms(
        lambda: machine.run(host_us=next(costs), gpu_us=300.0),
        lambda: machine.run(host_us=10.0, gpu_us=310.0),
    )
    assert own * 1e3 == pytest.approx(300.0, rel=0.01)
    assert len(machine.waits_us) > 1


def test_what_a_call_gains_by_its_place_both_gain(machine: Machine) -> None:
    """Of calls that find what the one before left, every second is quicker."""
    places = itertools.count()

    def work(gpu_us: float) -> None:
        machine.run(host_us=10.0, gpu_us=gpu_us * (0.9 if next(places) % 2 else 1.0))

    own, other = gpu_times.measure_in_turns_ms(lambda: work(230.0), lambda: work(250.0))
    assert own / other == pytest.approx(0.92, rel=0.001)


@pytest.mark.parametrize(("gpu_ms", "calls", "ahead"), [(0.05, 30, 30), (0.5, 10, 2), (50.0, 8, 2)])
def test_slow_calls_take_fewer_turns(
    machine: Machine, gpu_ms: float, calls: int, ahead: int
) -> None:
    """And so do those that the GPU is busy with until the host has sent the timed ones."""
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        machine.run(host_us=5.0, gpu_us=gpu_ms * 1e3)

    gpu_times.measure_in_turns_ms(lambda: call("own"), lambda: call("other"))
    assert order.count("own") == order.count("other") == 4 + ahead + calls
    assert order[:4] == order[-4:] == ["own", "other", "other", "own"]
