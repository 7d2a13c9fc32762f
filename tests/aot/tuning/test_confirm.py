"""``nvgemm-aot confirm``: which kernels are timed, what counts, and what is written."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import cpu_provider
import tuning_bench
from confirmed_kernels import OTHER_TORCH, confirm_by, user_file
from kernels_by_m import SQUARE, TIMES, WIDE
from measured_bundles import ATEN, write_measured
from nvgemm_aot.bundle.confirmed_contents import read_confirmations
from nvgemm_aot.bundle.wheel_set import encode_wheels
from nvgemm_aot.cli.main import main
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.confirming import confirm_watched
from nvgemm_aot.tuning.confirming.confirm_kernels import Confirmed, confirm
from nvgemm_aot.tuning.confirming.confirmed_output import write_confirmations
from nvgemm_aot.tuning.measuring import problem_times
from nvgemm_aot.tuning.measuring.gpu import GpuState
from nvgemm_runtime.bundle.confirmations import Confirmations, ConfirmedTimes
from nvgemm_runtime.bundle.ranking_entries import Timing
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import PackagingError, RankingsError, TuningError
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.installed.signatures import file_subject, read_signatures, signature_path
from signing_keys import new_key, set_policy, sign_content
from tuning_bench import DictatedTimer, DictatedWatch, Sleeper, bench

BUSY = GpuState(utilization_percent=50, slowdowns=())


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    return tuning_bench.build(problems, tmp_path_factory.mktemp("confirm"), kernel_cache)


@pytest.fixture
def elsewhere(built: Path, tmp_path: Path) -> Path:
    return write_measured(built, tmp_path / "measured" / "x.nvgemm", TIMES, torch=OTHER_TORCH)


@pytest.fixture(autouse=True)
def user_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path / "confirmed"))
    return tmp_path / "confirmed"


def by_m(confirmed: Confirmed, path: Path) -> dict[int, list[str]]:
    """The operators that were timed, the fastest first."""
    with Bundle(path) as bundle:
        operators = {kernel.id: kernel.operator for kernel in bundle.header.kernels}
    return {
        int(key.rpartition("/m")[2].partition("n")[0]): [operators[id_] for id_ in times.kernels]
        for key, times in confirmed.confirmations.problems.items()
    }


def test_times_what_the_table_uses_at_each_m_and_beside_it(elsewhere: Path) -> None:
    """Also at m = 32, where ATen won, so that nothing bridges over it."""
    confirmed = confirm_by(TIMES, elsewhere)
    timed = by_m(confirmed, elsewhere)
    assert timed[8] == timed[12] == [WIDE]
    assert timed[16] == timed[24] == [SQUARE]
    assert timed[32] in ([WIDE], [SQUARE])
    assert len(confirmed.used) == 4
    conditions = confirmed.confirmations.conditions
    assert (conditions.torch, conditions.launches) == (torch.__version__, "apart")


@pytest.mark.parametrize("measured", [True, False])
def test_without_a_measurement_on_this_product_it_times_the_first_kernels(
    built: Path, tmp_path: Path, measured: bool
) -> None:
    path = write_measured(
        built, tmp_path / "m" / "x.nvgemm", TIMES if measured else {}, gpu="another CPU"
    )
    assert all(len(names) == 3 for names in by_m(confirm_by(TIMES, path), path).values())


def test_a_kernel_that_was_never_measured_is_checked_first(
    kernel_cache: Cache, tmp_path: Path
) -> None:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    path = tuning_bench.build(problems, tmp_path / "lazy", kernel_cache, tuning_bench.Lazy())
    confirmed = confirm_by(TIMES, path)
    assert all(WIDE not in names for names in by_m(confirmed, path).values())
    assert len(confirmed.rejected) == 1


def test_two_bundles_are_confirmed_together(
    elsewhere: Path, built: Path, kernel_cache: Cache, tmp_path: Path
) -> None:
    confirmed = confirm_by(TIMES, elsewhere, built)
    assert len(by_m(confirmed, elsewhere)[8]) == 3
    assert len(confirmed.used) == 4


class Passes:
    """Times of kernels, in thousands of ATen's, that differ between the passes."""

    def __init__(self, *kernel_ns: int) -> None:
        self.kernel_ns = kernel_ns

    def __call__(self, path: Path, **how: Any) -> Confirmed:
        number = -1

        def at(m: int, name: str) -> float:
            nonlocal number
            if name == ATEN:
                number += 1  # the first that each pass prepares
                return 1000.0
            return self.kernel_ns[number]

        with pytest.MonkeyPatch.context() as patch, Bundle(path) as bundle:
            timer = DictatedTimer({"": [1.0]}, times_at=at)
            timer.watch_runs(patch)
            return confirm([bundle], how.pop("on", None) or bench(timer), **how)


@pytest.fixture
def single(kernel_cache: Cache, tmp_path: Path) -> Path:
    """A bundle with one problem, measured with another torch."""
    built = tuning_bench.build(
        [cpu_provider.problem(sizes=(8, 32, 64))], tmp_path / "built", kernel_cache
    )
    return write_measured(built, tmp_path / "measured" / "x.nvgemm", TIMES, torch=OTHER_TORCH)


def test_the_smaller_gain_of_two_counts(single: Path) -> None:
    confirmed = Passes(960, 990)(single)
    (gain,) = confirmed.gains.values()
    assert gain == pytest.approx(0.01)
    assert confirmed.used == ()


@pytest.mark.parametrize(("kernel_ns", "doubts"), [
    ((500, 700, 710), 0), ((500, 700, 900), 2), ((500, 501), 0),
])  # fmt: skip
def test_two_that_disagree_need_a_third(
    single: Path, kernel_ns: tuple[int, ...], doubts: int
) -> None:
    confirmed = Passes(*kernel_ns)(single)
    (times,) = confirmed.confirmations.problems.values()
    assert len(times.doubts) == doubts
    assert len(confirmed.used) == (not doubts)
    assert all("two runs disagree" in doubt for doubt in times.doubts)


@pytest.mark.parametrize("when", ["before", "afterwards"])
def test_other_work_on_the_gpu_is_a_doubt(elsewhere: Path, when: str) -> None:
    states = [BUSY] if when == "before" else [tuning_bench.IDLE]
    watch = DictatedWatch(states)
    sleeper = Sleeper()

    def sleep(seconds: float) -> None:
        sleeper(seconds)
        if len(sleeper.naps) == 2:  # the last look
            watch.states = [BUSY]

    timer = DictatedTimer({"": [1.0]}, times_at=lambda m, name: TIMES[m][name])
    with pytest.MonkeyPatch.context() as patch:
        timer.watch_runs(patch)
        on = replace(bench(timer, watch), sleep=sleep)
        confirmed = confirm_by(TIMES, elsewhere, on=on)
    assert confirmed.used == ()
    assert all(
        any("busy with other work" in doubt for doubt in times.doubts)
        for times in confirmed.confirmations.problems.values()
    )


def test_the_budget_leaves_out_whole_tables(kernel_cache: Cache, tmp_path: Path) -> None:
    problems = [cpu_provider.problem(sizes=(m, n, 64)) for n in (32, 64) for m in (8, 16)]
    path = tuning_bench.build(problems, tmp_path / "built", kernel_cache)
    times = {m: TIMES[m] for m in (8, 16)}
    ticks = iter([0.0, 1.0, 6.0, *[7.0] * 20])
    confirmed = confirm_by(times, path, budget_s=10.0, clock=ticks.__next__)
    assert {key.partition("/m")[2][-6:] for key in confirmed.left_out} == {"n64k64"}
    assert len(confirmed.left_out) == len(confirmed.confirmations.problems) == 2


def test_a_problem_that_does_not_fit_into_memory_is_left_out(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sets = problem_times.make_sets

    def make(problem: Any, *arguments: Any, **how: Any) -> Any:
        if problem.m == 24:
            raise torch.OutOfMemoryError("CUDA out of memory\nTried to allocate")
        return make_sets(problem, *arguments, **how)

    monkeypatch.setattr(problem_times, "make_sets", make)
    confirmed = confirm_by(TIMES, elsewhere)
    ((key, why),) = confirmed.left_out.items()
    assert "m24n32k64" in key
    assert "do not fit into GPU memory: CUDA out of memory" in why
    assert len(confirmed.confirmations.problems) == 4


def test_without_a_bundle_that_serves_the_gpu_it_says_so(
    elsewhere: Path,
) -> None:
    with pytest.raises(TuningError, match="none is installed"):
        confirm_by(TIMES)
    facts = replace(bench().facts, kind="cuda", capability=(9, 0))
    with pytest.raises(TuningError, match=r"no installed bundle serves this GPU \(.*x.nvgemm: "):
        confirm_by(TIMES, elsewhere, on=bench(facts=facts))


Command = Callable[..., Any]


@pytest.fixture
def command(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process, by times that `TIMES` dictates."""
    monkeypatch.setattr(
        confirm_watched, "confirm_watched", lambda **how: confirm_by(TIMES, elsewhere)
    )

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["confirm", *arguments])

    return run


def test_the_command_writes_the_users_file(command: Command) -> None:
    result = command()
    assert result.exit_code == 0, result.output
    assert "plain torch.compile uses kernels for 4 of 5 measured problems" in result.output
    assert str(user_file()) in result.output
    assert f"--confirmed {user_file()}" in result.output
    assert len(read_confirmations(user_file()).problems) == 5
    assert [path.name for path in user_file().parent.iterdir()] == [user_file().name]


def test_the_command_prints_json_and_writes_elsewhere(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "new" / "a.confirmed.json"
    document = json.loads(command("--json", "-o", str(out)).stdout)
    assert document["path"] == str(out)
    assert len(document["used"]) == 4
    assert document["problems"].keys() == read_confirmations(out).problems.keys()
    assert not user_file().exists()


def test_the_command_signs_what_it_writes(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(tmp_path, "ci")
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": key})
    result = command()
    assert result.exit_code == 0
    assert f"{user_file()}: no key that counts in the policy" in result.stderr
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", str(tmp_path / "ci.pem"))
    result = command()
    assert (result.exit_code, "no key that counts" in result.stderr) == (0, False)
    (signature,) = read_signatures(user_file())
    assert signature.is_for(file_subject(user_file().read_bytes()))


def test_times_that_the_policy_refuses_do_not_stay(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmations = confirm_by(TIMES, elsewhere).confirmations
    write_confirmations(confirmations, None)
    first, *_ = confirmations.problems
    now = replace(confirmations, problems={first: confirmations.problems[first]})
    key = new_key(tmp_path, "ci")
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": key})
    sign_content(user_file(), key)
    write_confirmations(now, None)
    assert len(read_confirmations(user_file()).problems) == len(confirmations.problems)
    signature_path(user_file()).unlink(missing_ok=True)
    write_confirmations(now, None)
    assert [*read_confirmations(user_file()).problems] == [first]


def test_the_command_refuses_another_suffix(command: Command, tmp_path: Path) -> None:
    result = command("-o", str(tmp_path / "a.json"))
    assert result.exit_code == 2
    assert "NAME.confirmed.json" in result.output


def test_the_command_refuses_a_directory_that_others_can_write(
    command: Command, user_directory: Path
) -> None:
    user_directory.mkdir()
    user_directory.chmod(0o777)
    result = command()
    assert result.exit_code == 16
    assert "can be written by others" in result.output
    assert list(user_directory.iterdir()) == []


def test_an_interrupted_command_leaves_the_file(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command()
    before = user_file().read_bytes()

    def interrupt(**how: Any) -> Confirmed:
        raise KeyboardInterrupt

    monkeypatch.setattr(confirm_watched, "confirm_watched", interrupt)
    result = command()
    assert result.exit_code == 130
    assert "no file is written or changed" in result.output
    assert user_file().read_bytes() == before


def other_results(
    confirmed: Confirmed, change: Callable[[ConfirmedTimes], ConfirmedTimes], keys: Collection[str]
) -> Confirmed:
    """The same measurement with only these problems, each changed."""
    problems = {key: change(confirmed.confirmations.problems[key]) for key in keys}
    return replace(confirmed, confirmations=replace(confirmed.confirmations, problems=problems))


def test_the_users_file_keeps_what_was_not_measured_now(elsewhere: Path) -> None:
    """As when another environment has other wheels."""
    first = confirm_by(TIMES, elsewhere)
    write_confirmations(first.confirmations, None)
    before = read_confirmations(user_file()).problems
    changed, doubted, *others = before
    faster = replace(before[changed], aten=Timing(time_ns=7, spread_ns=1))
    in_doubt = replace(before[doubted], doubts=("other work",))
    now = replace(first.confirmations, problems={changed: faster, doubted: in_doubt})
    write_confirmations(now, None)
    after = read_confirmations(user_file()).problems
    assert after == {**before, changed: faster}
    assert len(others) == 3
    dropped = next(iter(before[others[0]].kernels))
    write_confirmations(now, None, rejected=[dropped])
    left = read_confirmations(user_file()).problems
    assert others[0] not in left
    assert left[changed] == faster
    elsewhere_file = user_file().with_name("a.confirmed.json")
    write_confirmations(now, elsewhere_file)
    assert read_confirmations(elsewhere_file).problems == now.problems


def test_a_damaged_users_file_is_replaced(elsewhere: Path) -> None:
    confirmed = confirm_by(TIMES, elsewhere)
    user_file().parent.mkdir()
    user_file().write_text("{")
    write_confirmations(confirmed.confirmations, None)
    assert read_confirmations(user_file()).problems == confirmed.confirmations.problems


@pytest.mark.parametrize("reason", ["other work on the GPU", "the budget is spent"])
def test_results_of_which_none_can_count_leave_the_file(
    command: Command, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    command()
    before = user_file().read_bytes()
    found = confirm_by(TIMES, elsewhere)
    problems = found.confirmations.problems
    if reason == "the budget is spent":
        useless = replace(
            other_results(found, lambda times: times, ()),
            left_out=dict.fromkeys(problems, reason),
        )
    else:
        useless = other_results(found, lambda times: replace(times, doubts=(reason,)), problems)
    monkeypatch.setattr(confirm_watched, "confirm_watched", lambda **how: useless)
    result = command()
    assert result.exit_code == TuningError.exit_code
    assert f"no file is written or changed: {reason} (5 of 5 problems)" in result.output
    assert user_file().read_bytes() == before


BENCHES = "watched_benches"


def watched(
    bench_name: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> Confirmed:
    """Confirm in a process of its own, as the command does."""
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(elsewhere))
    return confirm_watched.confirm_watched(bench=f"{BENCHES}:{bench_name}", hang_s=6.0, **how)


def test_measures_in_a_process_of_its_own(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed = watched("sound", elsewhere, monkeypatch)
    assert len(confirmed.used) == 2, "only Cpu_8x32 is faster than ATen by the bench's times"
    assert confirmed.rejected == {}


@pytest.mark.slow
@pytest.mark.parametrize("bench_name", ["hangs_when_timed", "dies_when_timed", "breaks_the_device"])
def test_goes_on_without_a_kernel_that_hangs_dies_or_breaks_the_gpu(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, bench_name: str
) -> None:
    confirmed = watched(bench_name, elsewhere, monkeypatch)
    assert all(WIDE not in names for names in by_m(confirmed, elsewhere).values())
    assert len(confirmed.rejected) == 1


@pytest.mark.slow
def test_gives_up_where_aten_or_everything_hangs(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("aten_hangs", "everything_hangs", "always_dies"):
        with pytest.raises(TuningError, match="nothing is written"):
            watched(name, elsewhere, monkeypatch)


def test_a_wheel_takes_only_confirmations_that_fit(
    command: Command, elsewhere: Path, kernel_cache: Cache, tmp_path: Path
) -> None:
    file = tmp_path / "a.confirmed.json"
    command("-o", str(file))
    with pytest.raises(PackagingError, match="the second file for"):
        encode_wheels([elsewhere], name="x", version="1", confirmed=[file, file])
    other = cpu_provider.problem("tn", sizes=(8, 32, 64))
    unlike = tuning_bench.build([other], tmp_path / "other", kernel_cache)
    with pytest.raises(PackagingError, match="confirms none of the bundles' 3 kernels"):
        encode_wheels([unlike], name="x", version="1", confirmed=[file])
    file.write_text("{}")
    with pytest.raises(RankingsError, match="no confirmations"):
        encode_wheels([elsewhere], name="x", version="1", confirmed=[file])


def test_the_wheel_command_packs_confirmations(
    command: Command, elsewhere: Path, tmp_path: Path
) -> None:
    command()
    arguments = [str(elsewhere), "--name", "x", "-o", str(tmp_path / "dist")]
    result = CliRunner().invoke(main, ["wheel", *arguments, "--confirmed", str(user_file())])
    assert result.exit_code == 0, result.output
    (wheel,) = (tmp_path / "dist").glob("nvgemm_kernels_x-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"nvgemm_kernels_x/{user_file().name}" in names


def test_a_reader_beside_writers_sees_one_of_their_files(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(elsewhere))
    lost = {m: {**times, ATEN: 100} for m, times in TIMES.items()}
    both = [confirm_by(times, elsewhere).confirmations for times in (TIMES, lost)]
    write_confirmations(both[0], None)

    def write(confirmations: Confirmations) -> None:
        for _ in range(20):
            write_confirmations(confirmations, None)

    threads = [threading.Thread(target=write, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        (found,) = Installation().confirmed_files()
        assert found.problem is None
        assert found.confirmations in both
    assert [path.name for path in user_file().parent.iterdir()] == [user_file().name]
