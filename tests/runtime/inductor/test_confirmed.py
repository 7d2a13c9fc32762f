"""Plain torch.compile with rankings of another torch, confirmed with this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_provider
import nvgemm_runtime
import tuning_bench
from confirmed_kernels import OTHER_TORCH, confirm_by, rewrite, user_file
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY, SQUARE, TIMES, WIDE, operands
from measured_bundles import ATEN, write_measured
from nvgemm_aot.bundle.content import ProblemRanking, read_content
from nvgemm_aot.bundle.wheel_set import encode_wheels
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.confirming.confirmed_output import write_confirmations
from nvgemm_runtime.bundle.reader import Bundle
from written_wheels import write_wheel

pytestmark = pytest.mark.usefixtures("counted_anew", "default_mode")

NOTHING = dict.fromkeys(COMPUTED_BY)
"""ATen at every m."""


@pytest.fixture
def default_mode(inductor: InductorSession, tmp_path: Path) -> Iterator[None]:
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    inductor.monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path / "confirmed"))
    with torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False):
        yield


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("confirmed")
    directory.chmod(0o755)
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    return tuning_bench.build(problems, directory / "built", kernel_cache)


@pytest.fixture
def elsewhere(built: Path, tmp_path: Path) -> Path:
    """A bundle whose kernels were measured beside another torch's ATen."""
    return write_measured(built, tmp_path / "measured" / "x.nvgemm", TIMES, torch=OTHER_TORCH)


def launched_by_m(inductor: InductorSession, *places: Path) -> Mapping[int, str | None]:
    """What a graph for any m launches in a process that has just started, None for ATen."""
    if places:
        inductor.use(*places)
    torch._dynamo.reset()
    a, b = operands(16)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = inductor.compile(torch.mm, a, b, dynamic=None)
    found: dict[int, str | None] = {}
    for m in COMPUTED_BY:
        a, b = operands(m)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        names = inductor.launched(compiled.function, a, b)
        found[m] = names[0] if names else None
    return found


def test_confirmed_kernels_run_with_another_torch_while_the_file_is_there(
    inductor: InductorSession, elsewhere: Path
) -> None:
    assert launched_by_m(inductor, elsewhere) == NOTHING
    confirmed = confirm_by(TIMES, elsewhere)
    assert len(confirmed.used) == 4, "ATen wins at m = 32"
    path = write_confirmations(confirmed.confirmations, None)
    assert path == user_file()
    assert launched_by_m(inductor, elsewhere) == COMPUTED_BY
    path.unlink()
    assert launched_by_m(inductor, elsewhere) == NOTHING


def test_a_table_follows_the_times_with_this_torch(
    inductor: InductorSession, elsewhere: Path
) -> None:
    """ATen is faster than it was at m = 12, so nothing bridges over it."""
    times = {**TIMES, 12: {**TIMES[12], ATEN: 290}}
    write_confirmations(confirm_by(times, elsewhere).confirmations, None)
    by_m = launched_by_m(inductor, elsewhere)
    assert [by_m[m] for m in (8, 10, 12, 16, 20)] == [WIDE, None, None, SQUARE, SQUARE]


@pytest.mark.parametrize("how", ["in doubt", "missing"])
def test_nothing_bridges_over_an_m_without_times(
    inductor: InductorSession, elsewhere: Path, how: str
) -> None:
    path = write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    key = cpu_provider.problem(sizes=(12, 32, 64)).key

    def change(document: dict[str, Any]) -> None:
        if how == "missing":
            del document["problems"][key]
        else:
            document["problems"][key]["doubts"] = ["it was hot"]

    rewrite(path, change)
    by_m = launched_by_m(inductor, elsewhere)
    assert [by_m[m] for m in (8, 10, 12, 16, 20)] == [WIDE, None, None, SQUARE, SQUARE]
    table = str(nvgemm_runtime.dispatch_table(*operands(16)))
    assert "nvgemm-aot confirm" in table
    assert ("it was hot" in table) == (how == "in doubt")


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu", "another CPU"), ("torch", "2.9.1"), ("cuda", "12.6")],
)
def test_a_file_for_another_gpu_torch_or_cuda_does_not_count(
    inductor: InductorSession, elsewhere: Path, name: str, value: str
) -> None:
    path = write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    rewrite(path, lambda document: document.update({name: value}))
    assert launched_by_m(inductor, elsewhere) == NOTHING


def test_another_patch_release_of_torch_counts(inductor: InductorSession, elsewhere: Path) -> None:
    path = write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    minor = ".".join(torch.__version__.split(".")[:2])
    rewrite(path, lambda document: document.update(torch=f"{minor}.9+cu999"))
    assert launched_by_m(inductor, elsewhere) == COMPUTED_BY


def gaining(least: float) -> dict[int, dict[str, int]]:
    """Times in which the fastest kernel gains this on ATen."""
    return {
        m: {**times, ATEN: round(min(times[WIDE], times[SQUARE]) / (1 - least)) + 1}
        for m, times in TIMES.items()
    }


@pytest.mark.parametrize(("gain", "on_this_product", "runs"), [
    (0.03, True, True), (0.01, True, False), (0.03, False, False), (0.09, False, True),
])  # fmt: skip
def test_the_gain_that_counts_depends_on_what_vouches_for_the_kernels(
    inductor: InductorSession, built: Path, tmp_path: Path, gain: float,
    on_this_product: bool, runs: bool,
) -> None:  # fmt: skip
    gpu = None if on_this_product else "a GPU that nobody here has"
    output = tmp_path / "measured" / "x.nvgemm"
    bundle = write_measured(built, output, TIMES, torch=OTHER_TORCH, gpu=gpu)
    confirmed = confirm_by(gaining(gain), bundle)
    assert len(confirmed.used) == (5 if runs else 0)
    write_confirmations(confirmed.confirmations, None)
    by_m = launched_by_m(inductor, bundle)
    assert (by_m[8] == WIDE and by_m[16] == SQUARE) if runs else by_m == NOTHING
    if gain == 0.03 and not on_this_product:
        inductor.monkeypatch.setenv("NVGEMM_AOT_REPEATED_RANKINGS", "1")
        assert launched_by_m(inductor, bundle)[8] == WIDE


def test_estimates_can_be_confirmed(inductor: InductorSession, built: Path, tmp_path: Path) -> None:
    bundle = write_measured(built, tmp_path / "measured" / "x.nvgemm", {})
    write_confirmations(confirm_by(TIMES, bundle).confirmations, None)
    assert launched_by_m(inductor, bundle) == COMPUTED_BY


def without_kernel(path: Path, output: Path, operator: str) -> Path:
    """A bundle without a kernel, which other rankings lose."""
    with Bundle(path) as bundle:
        content = read_content(bundle)
    kept = tuple(kernel for kernel in content.kernels if kernel.operator != operator)
    ids = {kernel.id for kernel in kept}

    def keep(ranking: ProblemRanking) -> ProblemRanking:
        assert ranking.measured is not None
        spreads = [
            spread
            for (id_, _), spread in zip(ranking.kernels, ranking.measured.spreads_ns)
            if id_ in ids
        ]
        return replace(
            ranking,
            kernels=tuple(entry for entry in ranking.kernels if entry[0] in ids),
            measured=replace(ranking.measured, spreads_ns=tuple(spreads)),
        )

    write_bundle(
        output, replace(content, kernels=kept, rankings=tuple(map(keep, content.rankings)))
    )
    return output


def test_kernels_that_are_gone_are_left_out(
    inductor: InductorSession, elsewhere: Path, built: Path
) -> None:
    write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    less = without_kernel(elsewhere, elsewhere.with_name("less.nvgemm"), WIDE)
    by_m = launched_by_m(inductor, less)
    assert WIDE not in by_m.values()
    assert by_m[16] == SQUARE
    assert by_m[8] is None
    inductor.use()
    assert launched_by_m(inductor) == NOTHING


def test_a_wheel_brings_confirmations(
    inductor: InductorSession, elsewhere: Path, tmp_path: Path
) -> None:
    file = write_confirmations(
        confirm_by(TIMES, elsewhere).confirmations, tmp_path / "any.confirmed.json"
    )
    [wheel] = encode_wheels([elsewhere], name="model", version="1.0", confirmed=[file])
    (tmp_path / wheel.filename).write_bytes(wheel.data)
    file.unlink()
    inductor.use_wheels(tmp_path / wheel.filename)
    assert launched_by_m(inductor) == COMPUTED_BY
    inductor.use_wheels(write_wheel([elsewhere], name="model", version="2.0", out_dir=tmp_path))
    assert launched_by_m(inductor) == NOTHING


def test_a_named_file_or_directory_brings_confirmations(
    inductor: InductorSession, elsewhere: Path
) -> None:
    confirmations = confirm_by(TIMES, elsewhere).confirmations
    file = write_confirmations(confirmations, elsewhere.with_name("a.confirmed.json"))
    assert launched_by_m(inductor, elsewhere) == NOTHING
    assert launched_by_m(inductor, elsewhere, file) == COMPUTED_BY
    assert launched_by_m(inductor, elsewhere.parent) == COMPUTED_BY


def test_the_users_own_file_precedes_a_wheels(inductor: InductorSession, elsewhere: Path) -> None:
    confirmations = confirm_by(TIMES, elsewhere).confirmations
    file = write_confirmations(confirmations, elsewhere.with_name("a.confirmed.json"))
    lost = {m: {**times, ATEN: 100} for m, times in TIMES.items()}
    write_confirmations(confirm_by(lost, elsewhere).confirmations, None)
    assert launched_by_m(inductor, elsewhere, file) == NOTHING


def test_a_stale_file_of_the_user_does_not_hide_a_wheels(
    inductor: InductorSession, elsewhere: Path
) -> None:
    confirmations = confirm_by(TIMES, elsewhere).confirmations
    file = write_confirmations(confirmations, elsewhere.with_name("a.confirmed.json"))
    own = write_confirmations(confirmations, None)

    def rename_kernels(document: dict[str, Any]) -> None:
        for problem in document["problems"].values():
            problem["kernels"] = [["f" * 64, 1, 0]]

    rewrite(own, rename_kernels)
    assert launched_by_m(inductor, elsewhere, file) == COMPUTED_BY


def test_a_kernel_of_another_signature_is_ignored(
    inductor: InductorSession, tmp_path: Path, kernel_cache: Cache
) -> None:
    problems = [
        cpu_provider.problem(layout, sizes=(m, 32, 64)) for layout in ("tt", "tn") for m in TIMES
    ]
    built = tuning_bench.build(problems, tmp_path / "both", kernel_cache)
    path = write_measured(built, tmp_path / "measured" / "x.nvgemm", TIMES, torch=OTHER_TORCH)
    file = write_confirmations(confirm_by(TIMES, path).confirmations, None)

    def swap_layouts(document: dict[str, Any]) -> None:
        kinds = {"/tt/": "/tn/", "/tn/": "/tt/"}
        document["problems"] = {
            key.replace(key[2:6], kinds[key[2:6]]): value
            for key, value in document["problems"].items()
        }

    assert launched_by_m(inductor, path) == COMPUTED_BY
    rewrite(file, swap_layouts)
    assert launched_by_m(inductor, path) == NOTHING


def test_confirmed_with_the_measured_torch_it_replaces_the_measurement(
    inductor: InductorSession, built: Path, tmp_path: Path
) -> None:
    bundle = write_measured(
        built, tmp_path / "measured" / "x.nvgemm", gaining(0.05), confirmed_by=(), repeated=200
    )
    assert launched_by_m(inductor, bundle) == NOTHING, "5 % are too few for one GPU's repetition"
    write_confirmations(confirm_by(gaining(0.05), bundle).confirmations, None)
    assert launched_by_m(inductor, bundle)[8] == WIDE


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": "nvgemm-aot rankings"}'],
)
def test_a_damaged_file_is_left_out_with_one_warning(
    inductor: InductorSession, elsewhere: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    path.write_bytes(content)
    caplog.clear()
    assert launched_by_m(inductor, elsewhere) == NOTHING
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (said,) = [text for text in warnings if "confirmations left out" in text]
    assert str(path) in said
    assert "run: nvgemm-aot confirm" in said


def test_a_file_that_others_can_write_is_refused(
    inductor: InductorSession, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    path.chmod(0o666)
    assert launched_by_m(inductor, elsewhere) == NOTHING
    assert "can be written by others" in caplog.text
    path.chmod(0o644)
    path.parent.chmod(0o777)
    assert launched_by_m(inductor, elsewhere) == NOTHING
    path.parent.chmod(0o755)
    assert launched_by_m(inductor, elsewhere) == COMPUTED_BY


def test_max_autotune_takes_the_confirmed_winner_alone(
    inductor: InductorSession, elsewhere: Path
) -> None:
    inductor.use(elsewhere)
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    inductor.use(elsewhere)
    with torch._inductor.config.patch(max_autotune_gemm=True), inductor.watch_choices() as seen:
        compiled = inductor.compile(torch.mm, *operands(16))
    assert compiled.launched == (SQUARE,)
    assert seen == [] or all(len(names) == 1 for names in seen)


def test_required_accepts_confirmed_problems(inductor: InductorSession, elsewhere: Path) -> None:
    options = {"nvgemm_aot_mode": "required"}
    inductor.use(elsewhere)
    with pytest.raises(Exception, match="run: nvgemm-aot confirm"):
        inductor.compile(torch.mm, *operands(16), options=options)
    write_confirmations(confirm_by(TIMES, elsewhere).confirmations, None)
    inductor.use(elsewhere)
    assert inductor.compile(torch.mm, *operands(16), options=options).launched == (SQUARE,)
    torch._dynamo.reset()
    inductor.use(elsewhere)
    assert inductor.compile(torch.mm, *operands(32), options=options).launched == ()
