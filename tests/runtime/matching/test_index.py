from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from matching_headers import content, found, header, index, problem, reasons
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import Header, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import (
    CompileFailure,
    Conditions,
    Measured,
    Scope,
    UnservedReason,
)
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.problem import Layout, Problem, Signature
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.matching.device import DeviceFacts
from nvgemm_runtime.matching.index import MAX_WORKSPACE_BYTES, match_first_reading
from nvgemm_runtime.matching.matches import (
    Basis,
    BundleView,
    Match,
    MatchedKernel,
    Miss,
    newest_compiler_first,
)
from nvgemm_runtime.matching.refusals import refusal
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import B200, LIBRARY


def test_declared_problem_gets_its_own_ranking() -> None:
    wanted = [problem(1), problem(16), problem(1024)]
    built = header(*wanted)
    for asked in wanted:
        match = found(index(built).match(asked, 16))
        assert match.basis is Basis.DECLARED
        assert match.ranked_as == asked
        ranking = next(r for r in built.rankings if r.problem == asked)
        assert match.kernels[0].kernel == built.kernels[ranking.kernels[0].kernel]
        assert match.kernels[0].time_ns == ranking.kernels[0].time_ns


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        (problem(3), problem(2)),
        (problem(100), problem(64)),
        (problem(10**6), problem(1024)),
        (problem(64, n=5000), problem(64)),
        (problem(64, n=8192, k=8000), problem(2, n=8192, k=8192)),
    ],
)
def test_other_sizes_are_ranked_as_the_nearest_declared(asked: Problem, nearest: Problem) -> None:
    built = header(problem(2), problem(64), problem(1024), problem(2, n=8192, k=8192))
    match = found(index(built).match(asked, 16))
    assert match.basis is Basis.SIGNATURE
    assert match.ranked_as == nearest


def test_first_bundle_wins_where_two_declare_a_problem() -> None:
    first, second = header(problem(1)), header(problem(1), problem(2), seed=1)
    built = index(first, second)
    assert found(built.match(problem(1), 16)).kernels[0].bundle.name == "b0"
    assert found(built.match(problem(2), 16)).kernels[0].bundle.name == "b1"


def test_newest_compiler_is_preferred_then_the_name() -> None:
    def view(name: str, version: str) -> BundleView:
        built = replace(content(problem(1)), toolchain={"nvidia-cutlass-dsl": version})
        return BundleView(name=name, header=encode_bundle(built)[1])

    views = [view("b", "4.9.0"), view("c", "4.10.0"), view("a", "4.9.0")]
    assert [v.name for v in newest_compiler_first(views)] == ["c", "a", "b"]
    assert newest_compiler_first(views[::-1]) == newest_compiler_first(views)


def test_misaligned_operands_miss_with_both_numbers() -> None:
    built = index(header(problem(1)))
    assert isinstance(built.match(problem(1), 16), Match)
    assert "aligned to 8 bytes" in reasons(built.match(problem(1), 8))
    assert "need 16" in reasons(built.match(problem(1), 8))


def test_unknown_signature_lists_what_is_bundled() -> None:
    other = Signature.parse("mm/nn/fp16xfp16/fp32/fp16")
    said = reasons(index(header(problem(1))).match(problem(1, signature=other), 16))
    assert f"no bundled kernel computes {other.key} (bundled: {SIGNATURE.key})" in said


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(B200, capability=(9, 0), name="NVIDIA H200"), "sm_100f kernels do not run on NV"),
        (replace(B200, capability=(12, 0)), "compute capability 12.0"),
        (replace(B200, cuda="cu12"), "built for cu13, torch uses cu12"),
        (replace(B200, cuda=None), "torch uses no CUDA"),
        (replace(B200, cuda="cu11"), "torch uses cu11; install a torch for CUDA 13"),
        (replace(B200, platform="linux_aarch64"), "built for platform linux_x86_64"),
        (
            replace(B200, runtime_library=None),
            "pip install 'nvidia-cutlass-dsl-libs-cu13>=4.5.2,<4.9'",
        ),
        (
            replace(B200, runtime_library=replace(LIBRARY, exports=frozenset())),
            "kernels import CuteDSLRT_TVMFFISetRaisedCudaError, _cuKernelGetAttribute, ",
        ),
        (replace(B200, ffi_exports=frozenset()), "kernels import TVMFFIEnvGetStream, "),
        (replace(B200, kind="cpu", capability=None, name="cpu"), "built for sm_100f"),
    ],
)
def test_a_bundle_that_does_not_fit_the_device_says_why(facts: DeviceFacts, reason: str) -> None:
    built = replace(header(problem(1)), imports=None)
    assert reason in str(refusal(built, facts))
    said = reasons(index(built, facts=facts).match(problem(1), 16))
    assert reason in said
    assert "b0: " in said


def test_family_kernels_serve_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    built = header(problem(1))
    assert refusal(built, replace(B200, capability=(10, 3), name="NVIDIA GB300")) is None
    exact = replace(built, target=Target(arch="sm_100a"))
    assert refusal(exact, replace(B200, capability=(10, 3))) is not None


def test_cpu_bundles_are_for_the_cpu_alone() -> None:
    built = replace(header(problem(1)), target=Target(arch="cpu"))
    cpu = replace(B200, kind="cpu", capability=None, multiprocessors=None)
    cpu = replace(cpu, name="cpu", runtime_library=None, cuda=None)
    assert refusal(built, cpu) is None
    assert "built for cpu" in str(refusal(built, B200))


def with_alignment(*alignments: int, seed: int = 0) -> Header:
    """A bundle whose kernels, all ranked for one problem, need these alignments."""
    base = synthetic_content(kernels=len(alignments), problems=1, seed=seed)
    kernels = tuple(
        replace(kernel, alignment_bytes=alignment)
        for kernel, alignment in zip(base.kernels, alignments)
    )
    places = tuple((sha256_hex(kernel.payload), None) for kernel in kernels)
    ranking = replace(base.rankings[0], problem=problem(16), kernels=places)
    return encode_bundle(replace(base, kernels=kernels, rankings=(ranking,)))[1]


def alignments_of(match: Match) -> list[int]:
    return [served.kernel.alignment_bytes for served in match.kernels]


def test_only_kernels_that_the_operands_are_aligned_for_are_served() -> None:
    built = index(with_alignment(16, 4, 8))
    assert alignments_of(found(built.match(problem(16), 16))) == [16, 4, 8]
    assert alignments_of(found(built.match(problem(16), 8))) == [4, 8]
    assert alignments_of(found(built.match(problem(5), 4))) == [4]
    assert "need 4" in reasons(built.match(problem(16), 2))


def test_another_bundle_serves_what_the_first_is_too_strictly_aligned_for() -> None:
    built = index(with_alignment(16), with_alignment(2, seed=1))
    match = found(built.match(problem(16), 8))
    assert (match.basis, match.kernels[0].bundle.name) == (Basis.DECLARED, "b1")
    assert found(built.match(problem(17), 8)).kernels[0].bundle.name == "b1"
    assert found(built.match(problem(17), 16)).kernels[0].bundle.name == "b0"


def test_another_problem_of_the_signature_serves_where_alignment_rules_out_the_own() -> None:
    loose = with_alignment(2, seed=1)
    ranking = replace(loose.rankings[0], problem=problem(2048))
    built = index(with_alignment(16), replace(loose, rankings=(ranking,)))
    match = found(built.match(problem(16), 4))
    assert (match.basis, match.ranked_as) == (Basis.SIGNATURE, problem(2048))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"calling_convention": "cuda:f(a,b)"}, "calling convention 'cuda:f(a,b)', this release"),
        ({"workspace_bytes": 64}, "parameter workspace is passed never, must be once"),
    ],
)
def test_kernels_that_this_release_cannot_launch_are_left_out_with_the_reason(
    change: dict[str, object], reason: str
) -> None:
    built = with_alignment(16, 16)
    worst = built.rankings[0].kernels[1]
    mixed = replace(built, kernels=tuple(
        replace(kernel, **change) if place != worst.kernel else kernel
        for place, kernel in enumerate(built.kernels)
    ))  # fmt: skip
    assert len(found(index(mixed).match(problem(16), 16)).kernels) == 1
    none = replace(built, kernels=tuple(replace(k, **change) for k in built.kernels))
    said = reasons(index(none).match(problem(16), 16))
    assert f"b0: 2 kernels are left out: {said.split('left out: ')[1]}" in said
    assert reason in said


def test_other_sizes_get_no_kernel_that_allocates_much_if_others_serve() -> None:
    workspace = TileWorkspace(
        tile=(64, 16),
        tiles_multiple=(1, 1),
        zeroed_once=0,
        zeroed_per_tile=4,
        scratch_per_tile=4096,
    )
    splitting = {
        "workspace": workspace,
        "calling_convention": "tvm_ffi:gemm(a,b,out,workspace,stream)",
    }
    built = with_alignment(16, 16)
    best = built.rankings[0].kernels[0].kernel
    mixed = index(replace(built, kernels=tuple(
        replace(kernel, **splitting) if place == best else kernel
        for place, kernel in enumerate(built.kernels)
    )))  # fmt: skip
    few, many = problem(17), problem(8192)
    assert workspace.size_bytes(few) <= MAX_WORKSPACE_BYTES < workspace.size_bytes(many)
    for asked in (problem(16), few):
        assert found(mixed.match(asked, 16)).kernels[0].kernel.id == built.kernels[best].id
    (kept,) = found(mixed.match(many, 16)).kernels
    assert kept.kernel.id != built.kernels[best].id
    alone = index(replace(built, kernels=tuple(replace(k, **splitting) for k in built.kernels)))
    assert len(found(alone.match(many, 16)).kernels) == 2


def test_kernels_without_strides_serve_compact_operands_alone() -> None:
    compact = {"calling_convention": "tvm_ffi:gemm(a*,b*,out*,mnkl,stream)"}
    built = with_alignment(16, 16)
    best = built.rankings[0].kernels[0].kernel
    mixed = index(replace(built, kernels=tuple(
        replace(kernel, **compact) if place == best else kernel
        for place, kernel in enumerate(built.kernels)
    )))  # fmt: skip
    for asked in (problem(16), problem(17)):
        assert len(found(mixed.match(asked, 16)).kernels) == 2
        (strided,) = found(mixed.match(asked, 16, False)).kernels
        assert strided.kernel.id != built.kernels[best].id
    none = index(replace(built, kernels=tuple(replace(k, **compact) for k in built.kernels)))
    for asked in (problem(16), problem(17)):
        assert len(found(none.match(asked, 16, True)).kernels) == 2
        said = reasons(none.match(asked, 16, False))
        assert (
            "gaps between rows or matrices, and the kernels for mm/tn/bf16xbf16/fp32/bf16" in said
        )


def test_an_alignment_miss_names_the_bundles_that_were_refused_too() -> None:
    other = replace(with_alignment(2), target=Target(arch="sm_90a"))
    said = reasons(index(with_alignment(16), other).match(problem(16), 8))
    assert "need 16" in said
    assert "b1: sm_90a kernels do not run on" in said


def test_a_problem_of_a_refused_bundle_was_declared_and_says_so() -> None:
    served, refused = problem(16), problem(32)
    other = replace(header(refused), target=Target(arch="sm_90a"))
    found = index(header(served), other)
    assert found.missing_sizes(served) == found.missing_sizes(problem(64))
    ((m, said),) = found.missing_sizes(served).items()
    assert m == 32
    assert said.startswith("b1: sm_90a kernels do not run on")
    assert not found.missing_sizes(replace(refused, n=8))


def with_tiles(*tiles: tuple[int, int], times_ns: tuple[int | None, ...]) -> Header:
    """A bundle with one kernel a tile, all ranked for m 128, n 128 * 100."""
    base = synthetic_content(kernels=len(tiles), problems=1)
    kernels = tuple(
        replace(
            kernel,
            design=replace(kernel.design, tile=(*tile, 64), cluster=(1, 1), ctas_per_tile=1),
        )
        for kernel, tile in zip(base.kernels, tiles)
    )
    places = tuple((sha256_hex(kernel.payload), time) for kernel, time in zip(kernels, times_ns))
    ranking = replace(base.rankings[0], problem=problem(128, n=12800), kernels=places)
    return encode_bundle(replace(base, kernels=kernels, rankings=(ranking,)))[1]


def tiles_of(match: Match) -> list[tuple[int, int]]:
    return [served.kernel.design.tile[:2] for served in match.kernels]


def test_other_sizes_order_kernels_by_the_waves_they_need() -> None:
    """On 100 multiprocessors m 192 costs tiles of 128 rows a second wave, and those of 192 none."""
    facts = replace(B200, multiprocessors=100)
    short, tall = (128, 128), (192, 128)
    built = index(with_tiles(short, tall, times_ns=(1000, 1400)), facts=facts)
    assert tiles_of(found(built.match(problem(128, n=12800), 16))) == [short, tall]
    match = found(built.match(problem(192, n=12800), 16))
    assert tiles_of(match) == [tall, short]
    assert [served.time_ns for served in match.kernels] == [1400, 1000], "as ranked, not scaled"


def test_equal_guesses_and_unknown_times_keep_the_shipped_order() -> None:
    facts = replace(B200, multiprocessors=100)
    first, second = (128, 128), (128, 64)
    asked = problem(192, n=12800)
    equal = index(with_tiles(first, second, times_ns=(1000, 1000)), facts=facts)
    assert tiles_of(found(equal.match(problem(64, n=12800), 16))) == [first, second]
    unknown = index(with_tiles(first, (192, 128), times_ns=(1000, None)), facts=facts)
    assert tiles_of(found(unknown.match(asked, 16))) == [first, (192, 128)]


@pytest.mark.parametrize(
    ("scope", "beside"),
    [
        (Scope.SIGNATURE, "b0: no such operator"),
        (Scope.PROBLEM, "another problem of this signature, {key}: b0: no such operator"),
        (None, "another problem of this signature, {key}: b0: no such operator"),
    ],
)
def test_a_miss_says_why_the_build_made_no_kernel_and_of_what(
    scope: Scope | None, beside: str
) -> None:
    built = with_alignment(16)
    left_out = Problem(signature=replace(problem(16).signature, layout=Layout.NN), m=16, n=8, k=8)
    why = UnservedReason(text="no such operator", scope=scope)
    partial = replace(built, unserved={left_out: why})
    said = index(partial).match(left_out, 16)
    assert isinstance(said, Miss)
    assert said.reasons[0] == "b0: no such operator"
    other = index(partial).match(replace(left_out, m=17), 16)
    assert isinstance(other, Miss)
    assert other.reasons[0] == beside.format(key=left_out.key)
    found(index(partial).match(problem(16), 16))


@pytest.mark.parametrize("is_transient", [True, False])
def test_a_match_says_whether_its_ranking_may_get_more_kernels(is_transient: bool) -> None:
    made = content(problem(16))
    failure = CompileFailure(operator="o", reason="why", is_transient=is_transient)
    rankings = tuple(replace(ranking, missing=(failure,)) for ranking in made.rankings)
    incomplete = encode_bundle(replace(made, rankings=rankings))[1]
    assert found(index(incomplete).match(problem(16), 16)).is_complete is not is_transient
    assert found(index(header(problem(16))).match(problem(16), 16)).is_complete


def partly_measured() -> tuple[Header, Measured]:
    """A bundle that declares m 16, and of which m 64 was measured and not declared."""
    source = replace(content(problem(16)).rankings[0].source, kind="measurement")
    source = replace(
        source,
        gpu=B200.name,
        conditions=Conditions(driver="580", torch="2.11.0", cuda="13.0", date="2026-11-21"),
    )
    measured = Measured(spreads_ns=(1,), aten=None, triton=None, doubts=())
    base = content(problem(16), problem(64))
    declared, between = base.rankings
    between = replace(between, source=source, measured=measured, is_declared=False)
    return encode_bundle(replace(base, rankings=(declared, between)))[1], measured


def test_what_was_measured_and_not_declared_counts_as_another_size_with_its_own_ranking() -> None:
    partly, measured = partly_measured()
    match = found(index(partly).match(problem(64), 128))
    assert (match.basis, match.ranked_as) == (Basis.SIGNATURE, problem(64))
    assert match.measured == measured
    refused = index(partly, facts=replace(B200, capability=(9, 0)))
    assert list(refused.missing_sizes(problem(1))) == [16]


def declaring_64() -> Header:
    return header(problem(64), seed=1)


@pytest.mark.parametrize(
    "declaring",
    [
        pytest.param(declaring_64, id="served"),
        pytest.param(
            lambda: replace(declaring_64(), target=replace(declaring_64().target, arch="sm_90a")),
            id="refused",
        ),
        pytest.param(
            lambda: replace(
                header(problem(32), seed=1),
                unserved={problem(64): UnservedReason(text="none", scope=Scope.PROBLEM)},
            ),
            id="unserved",
        ),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_what_any_bundle_declares_is_declared_and_the_measurement_of_another_is_preferred(
    declaring: Callable[[], Header], is_first: bool
) -> None:
    partly, measured = partly_measured()
    other = declaring()
    made = index(*(other, partly) if is_first else (partly, other))
    match = found(made.match(problem(64), 128))
    assert (match.basis, match.measured) == (Basis.DECLARED, measured)
    assert all(one.ranking.is_declared for one in made.ranked_sizes(problem(1))[64])


def test_every_declared_problem_without_a_kernel_here_is_left_out_with_the_reason() -> None:
    """Also where the bundle serves others, and where its build made no kernel for it."""
    built = header(problem(16), problem(64))
    kernels = list(built.kernels)
    gone = next(one for one in built.rankings if one.problem == problem(64)).kernels[0].kernel
    kernels[gone] = replace(kernels[gone], calling_convention="of the future")
    partly = index(replace(built, kernels=tuple(kernels)))
    assert found(partly.match(problem(16), 16)).basis is Basis.DECLARED
    ((m, why),) = partly.missing_sizes(problem(1)).items()
    assert (m, why.startswith("b0: 1 kernel is left out: ")) == (64, True)
    unserved = {problem(32): UnservedReason(text="none", scope=Scope.PROBLEM)}
    refused = index(replace(built, unserved=unserved), facts=replace(B200, capability=(9, 0)))
    assert sorted(refused.missing_sizes(problem(1))) == [16, 32, 64]


def test_kernels_for_which_groups_are_too_large_are_left_out() -> None:
    """Matching goes by signature: a bundle may have kernels that were built for fewer columns."""
    signature = Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16")
    wide = Problem(signature=signature, m=64, n=65536, k=64, groups=8)
    match = found(index(header(problem(1), problem(2))).match(problem(1), 16))
    (first,) = match.kernels
    other = replace(first, rank=1)

    def served(problem: Problem, *kernels: MatchedKernel) -> Match | Miss:
        request = Request(problem=problem, alignment_bytes=16)
        return match_first_reading(lambda *_: replace(match, kernels=kernels), [request])[1]

    quack = replace(first, kernel=replace(first.kernel, provider="quack"))
    assert found(served(wide, quack, other)).kernels == (other,)
    assert "lie 131072 bytes apart" in reasons(served(wide, quack))
    assert found(served(replace(wide, n=49152), quack)).kernels == (quack,)
