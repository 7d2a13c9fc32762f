"""What a provider of another package returns is checked, and what it raises names it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fake_provider import FakeProvider, candidate
from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.providers import Candidate, Enumeration, Rejection, load_provider
from nvgemm_aot.providers.base import BlockShape, RuntimeModel
from nvgemm_aot.providers.checking import checked
from nvgemm_aot.providers.checking.checked import BLAME, Checked
from nvgemm_aot.providers.checking.listing_faults import listing_faults
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.bundle.format import ClusterLimit
from nvgemm_runtime.errors import CompileError, ToolchainError
from nvgemm_runtime.gemm.problem import Problem, Signature

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
TARGET = build_target("sm_90a")
GOOD = candidate("one", SIGNATURE)


class Foreign(FakeProvider):
    """Answers as it is told to; one that raises is told an exception."""

    name = "test_checked:Foreign"
    answers: dict[str, Any] = {}  # noqa: RUF012 - each test has its own

    def _answer(self, method: str) -> Any:
        answer = self.answers[method]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def toolchain(self) -> dict[str, str]:
        return self._answer("toolchain") if "toolchain" in self.answers else super().toolchain()

    def prepare(self) -> None:
        if "prepare" in self.answers:
            self._answer("prepare")

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        return self._answer("enumerate")

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        return self._answer("model") if "model" in self.answers else super().runtime_model(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        return self._answer("compile")


def told(**answers: Any) -> Checked:
    provider = Foreign()
    provider.answers = answers
    return Checked(provider, Foreign.name)


def listing(*candidates: Any, **fields: Any) -> Enumeration:
    return Enumeration(candidates=candidates, **fields)


def designed(**fields: Any) -> Candidate:
    return replace(GOOD, design=replace(GOOD.design, **fields))


def shaped(**fields: Any) -> Candidate:
    return replace(GOOD, block_shape=replace(GOOD.block_shape, **fields))


class Odd:
    """A model that answers anything."""

    name = "odd 1"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass(frozen=True, kw_only=True)
class Marked(Candidate):
    """A candidate of a class that compiler processes do not know."""


FIELDS = {field: getattr(GOOD, field) for field in Candidate.__dataclass_fields__}

TOLD = "tvm_ffi:gemm(a,b,out,clusters,stream)"

NONSENSE: list[tuple[Any, str]] = [
    (None, "returned NoneType; must be an Enumeration"),
    ([GOOD], "returned list; must be an Enumeration"),
    (Enumeration(candidates={GOOD}), "returned set as candidates; must be a tuple"),  # type: ignore[arg-type]
    (listing("one"), "'one' in candidates; must be a Candidate"),
    (listing(Marked(**FIELDS)), "must be a Candidate, not a subclass"),
    (
        listing(designed(tile=(2**31, 64, 64))),
        "must be three integers (m, n, k) of 1 to 2147483647",
    ),
    (listing(designed(splits=2**31)), "splits is 2147483648, must be an integer of 1 to"),
    (listing(replace(GOOD, workspace_bytes=2**63)), "and at most 2**63 - 1"),
    (listing(replace(GOOD, preference=float("nan"))), "preference is nan, must be an integer"),
    (listing(GOOD, rejections=("old",)), "'old' in rejections; must be a Rejection"),
    (
        listing(GOOD, rejections=(Rejection(operator="old", reason=None),)),  # type: ignore[arg-type]
        "in rejections; must be a Rejection",
    ),
    (listing(absence=7), "returned 7 as absence; must be text or None"),
    (listing(GOOD, GOOD), "listed 'one' 2 times"),
    (listing(replace(GOOD, operator="")), "whose name must be printable ASCII"),
    (listing(replace(GOOD, operator="a\nb")), "whose name must be printable ASCII"),
    (listing(replace(GOOD, operator="x" * 301)), "at most 300 characters"),
    (listing(replace(GOOD, provider="quack")), "provider is 'quack', must be 'test_checked:"),
    (
        listing(replace(GOOD, signature=Signature.parse("mm/tn/fp16xfp16/fp32/fp16"))),
        "signature is mm/tn/fp16xfp16/fp32/fp16, must be the requested one",
    ),
    (listing(replace(GOOD, alignment_bytes=0)), "alignment_bytes is 0, must be a power of two"),
    (listing(replace(GOOD, alignment_bytes=24)), "alignment_bytes is 24, must be a power of two"),
    (listing(replace(GOOD, alignment_bytes=8192)), "from 1 to 4096"),
    (listing(replace(GOOD, alignment_bytes="16")), "alignment_bytes is '16'"),
    (listing(replace(GOOD, workspace_bytes=-1)), "workspace_bytes is -1, must be 0 or more"),
    (listing(replace(GOOD, workspace_bytes=1.5)), "workspace_bytes is 1.5"),
    (listing(replace(GOOD, workspace_bytes=4096)), "parameter workspace is passed never"),
    (listing(replace(GOOD, calling_convention="gemm(a)")), "calling_convention is 'gemm(a)'"),
    (listing(replace(GOOD, calling_convention=None)), "calling_convention is None"),
    (
        listing(replace(GOOD, calling_convention="tvm_ffi:gemm(a,out,stream)")),
        "parameter b is passed never, must be once",
    ),
    (listing(designed(tile=(0, 64, 64))), "tile is (0, 64, 64), must be three integers"),
    (listing(designed(tile=(64, 64))), "tile is (64, 64), must be three integers"),
    (listing(designed(tile=[64, 64, 64])), "tile is [64, 64, 64], must be three integers"),
    (listing(designed(tile=(64, 64.0, 64))), "tile is (64, 64.0, 64)"),
    (listing(designed(tile=(True, 64, 64))), "tile is (True, 64, 64)"),
    (listing(designed(cluster=(0, 1))), "cluster is (0, 1), must be two integers"),
    (listing(designed(cluster=(8, 4))), "together at most 16"),
    (listing(designed(fallback_cluster=(1,))), "fallback_cluster is (1,)"),
    (listing(designed(ctas_per_tile=3)), "ctas_per_tile is 3, must be 1 or 2"),
    (listing(designed(scheduler="mine")), "scheduler is 'mine', must be one of clc"),
    (listing(designed(swapped=1)), "swapped is 1, must be true or false"),
    (
        listing(
            designed(cluster_limits=(ClusterLimit(cluster_size=1, max_active=1, basis="measured"),))
        ),
        "cluster_limits are set, must be empty: the builder fills them in",
    ),
    (listing(replace(GOOD, design=None)), "design is NoneType, must be a KernelDesign"),
    (listing(replace(GOOD, block_shape=None)), "block_shape is NoneType, must be a BlockShape"),
    (
        listing(replace(GOOD, block_shape=BlockShape(tile=(0, 64, 64), cluster=(1, 1)))),
        "block_shape has tile (0, 64, 64)",
    ),
    (listing(shaped(splits="2")), "block_shape has splits '2', must be an integer of 1 to"),
    (listing(shaped(splits=0)), "block_shape has splits 0, must be an integer of 1 to"),
    (listing(shaped(splits=True)), "block_shape has splits True, must be an integer"),
    (listing(shaped(swapped="x")), "block_shape has swapped 'x', must be true or false"),
    (listing(replace(GOOD, cluster_sizes=(0,))), "cluster_sizes is (0,)"),
    (listing(replace(GOOD, cluster_sizes=(3,))), "cluster_sizes has 3; the device profile H200"),
    (
        listing(designed(scheduler="static_persistent", cluster=(2, 1))),
        "cluster_sizes is (), must be (2,) with scheduler static_persistent, or clusters in its",
    ),
    (
        listing(replace(designed(scheduler="dynamic_persistent"), cluster_sizes=(2,))),
        "cluster_sizes is (2,), must be (1,) with scheduler dynamic_persistent",
    ),
    (
        listing(replace(GOOD, cluster_sizes=(1,))),
        f"cluster_sizes is (1,), must be () with scheduler {GOOD.design.scheduler}",
    ),
    (listing(replace(GOOD, calling_convention=TOLD)), "takes no clusters"),
    (
        listing(
            replace(
                designed(scheduler="static_persistent"), calling_convention=TOLD, cluster_sizes=(1,)
            )
        ),
        "cluster_sizes is (1,), must be () if launches pass the number of clusters",
    ),
    (listing(replace(GOOD, preference="first")), "preference is 'first', must be an integer"),
    (listing(replace(GOOD, added_code=b"code")), "added_code is b'code', must be text"),
    (listing(replace(GOOD, traits="pingpong")), "traits is 'pingpong', must be a tuple of texts"),
    (ValueError("no\nlist"), "raised ValueError: no list ("),
    (SystemExit(1), "raised SystemExit: 1"),
]


def mine(answer: Any) -> Any:
    """The same listing with candidates of the provider that is asked, where they claim no other."""
    if not isinstance(answer, Enumeration) or not isinstance(answer.candidates, tuple):
        return answer
    own = tuple(
        replace(one, provider=Foreign.name)
        if isinstance(one, Candidate) and one.provider == FakeProvider.name
        else one
        for one in answer.candidates
    )
    return replace(answer, candidates=own)


@pytest.mark.parametrize(("answer", "said"), NONSENSE, ids=[said[:40] for _, said in NONSENSE])
def test_a_listing_that_is_nonsense_is_an_error(answer: Any, said: str) -> None:
    with pytest.raises(ToolchainError) as caught:
        told(enumerate=mine(answer)).enumerate(SIGNATURE, TARGET)
    text = str(caught.value)
    assert text.startswith(f"provider '{Foreign.name}': enumerate({SIGNATURE.key}, sm_90a) ")
    assert said in text
    assert text.endswith(BLAME)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({}, "listed 'one' in only one of two calls; must list the same each time"),
        ({"operator": "one"}, "listed 'one' with different facts in a second call"),
    ],
)
def test_listings_must_be_the_same_each_time(names: dict[str, str], said: str) -> None:
    good = replace(GOOD, provider=Foreign.name)
    other = replace(good, preference=7, **{"operator": "another", **names})
    listings = iter([listing(good), listing(other)])
    provider = told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Foreign, "enumerate", lambda *_: next(listings))
        with pytest.raises(ToolchainError, match=said):
            provider.enumerate(SIGNATURE, TARGET)


class Listener(logging.Handler):
    """Keeps messages; ``heard`` is set by the first."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.heard.set()


@pytest.mark.parametrize("method", ["toolchain", "enumerate", "model"])
def test_a_provider_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It answers when the warning is there."""
    monkeypatch.setattr(checked, "SLOW_SECONDS", 0.01)
    listener = Listener()
    monkeypatch.setattr(checked._log, "handlers", [listener])

    def answer(self: Foreign, name: str) -> Any:
        assert listener.heard.wait(60), "no warning"
        return {"toolchain": {"x": "1"}, "enumerate": listing(), "model": Odd(1)}[name]

    monkeypatch.setattr(Foreign, "_answer", answer)
    provider = told(**{method: None})
    {
        "toolchain": provider.toolchain,
        "enumerate": lambda: provider.enumerate(SIGNATURE, TARGET),
        "model": lambda: provider.runtime_model(TARGET),
    }[method]()
    said = listener.messages[0]
    assert said.startswith(f"provider '{Foreign.name}': ")
    assert "has not returned for 0.01 s; still waiting" in said
    assert said.endswith(BLAME)


def test_a_listing_that_is_right_comes_through() -> None:
    answer = mine(listing(GOOD, rejections=[Rejection(operator="old", reason="old")]))
    found = told(enumerate=answer).enumerate(SIGNATURE, TARGET)
    assert found.candidates == answer.candidates
    assert found.rejections == tuple(answer.rejections)


@pytest.mark.parametrize("name", ["cutlass_operators", "quack", "gathered"])
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100f", marks=pytest.mark.slow)])
def test_providers_that_come_along_keep_the_rules(name: str, arch: str) -> None:
    provider, target = load_provider(name), build_target(arch)
    for signature in EVERY_SIGNATURE[::12]:
        found = provider.enumerate(signature, target)
        assert list(listing_faults(found, name, signature, target)) == []


@pytest.mark.parametrize(
    "answer",
    [
        *(None, {}, {"fake": 1}, {1: "1"}, {"fake": ""}, "1.0", RuntimeError("lost")),
        {"fake": "1", "recipe of cutlass_operators": "1"},
        *({"fake": "1\x1b[31m"}, {"fake\n": "1"}, {"fake": "1" * 1001}),
    ],
)
def test_versions_must_be_texts(answer: Any) -> None:
    with pytest.raises(ToolchainError, match=r"provider 'test_checked:Foreign': toolchain\(\) "):
        told(toolchain=answer).toolchain()


@pytest.mark.parametrize("answer", [0, -5, 1.5, "9", True, 2**63, 2**70, ArithmeticError("no")])
def test_estimates_must_be_nanoseconds(answer: Any) -> None:
    model = told(model=Odd(answer)).runtime_model(TARGET)
    problem = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m8n64k64")
    with pytest.raises(ToolchainError, match=r"estimate_ns\(mm/tn/.*m8n64k64\) "):
        model.estimate_ns(problem, GOOD.block_shape)


@pytest.mark.parametrize("answer", [None, object(), RuntimeError("no model")])
def test_a_model_must_be_one(answer: Any) -> None:
    with pytest.raises(ToolchainError, match=r"runtime_model\(\)"):
        told(model=answer).runtime_model(TARGET)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (KeyError("one"), "raised KeyError: 'one' (.*test_checked.py:"),
        (SystemExit("stop"), "raised SystemExit: stop"),
        (FileNotFoundError(errno.ENOENT, "no such file"), "raised FileNotFoundError"),
        (None, "gave None; must be the bytes of an object"),
        (b"", "gave b''; must be the bytes"),
        ("object", "gave 'object'; must be the bytes"),
    ],
)
def test_what_does_not_compile_is_that_kernels_failure(answer: Any, said: str) -> None:
    with pytest.raises(CompileError) as caught:
        told(compile=answer).compile(GOOD, TARGET)
    assert str(caught.value).startswith("one: compile() of provider 'test_checked:Foreign' ")
    assert said.partition(" (")[0] in str(caught.value)


@pytest.mark.parametrize("answer", [CompileError("as it says"), ToolchainError("missing")])
def test_errors_of_the_interface_come_through(answer: Exception) -> None:
    with pytest.raises(type(answer), match=str(answer)):
        told(compile=answer).compile(GOOD, TARGET)


def test_a_full_disk_is_no_fault_of_the_provider() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        told(compile=full).compile(GOOD, TARGET)


def manifest(name: str, *problems: str) -> Manifest:
    return Manifest(
        name="foreign",
        description="",
        targets=(TARGET,),
        declared=tuple(
            Declared(problem=Problem.parse(problem), candidates=8) for problem in problems
        ),
        providers=(name,),
    )


class Shuffled(FakeProvider):
    """Lists its operators in an order of its own each time."""

    name = "test_checked:Shuffled"
    turn = 0

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        Shuffled.turn += 1
        found = [replace(candidate(name, signature), provider=self.name) for name in "abcdef"]
        return listing(*found[Shuffled.turn % 6 :], *found[: Shuffled.turn % 6])


class HalfBroken(Shuffled):
    """Raises, in compiler processes, for some kernels."""

    name = "test_checked:HalfBroken"

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        if candidate.operator in "ac":
            raise OddError(1, 2)
        return super().compile(candidate, target)


class OddError(Exception):
    """One that does not unpickle, as many with arguments of their own."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Unprepared(Shuffled):
    """Cannot prepare a compiler process."""

    name = "test_checked:Unprepared"

    def prepare(self) -> None:
        raise OddError(3, 4)


KEY = "mm/tn/bf16xbf16/fp32/bf16/m8n64k64"


@pytest.mark.slow
def test_the_order_of_a_listing_does_not_matter(tmp_path: Any) -> None:
    bundles = [
        build(manifest(Shuffled.name, KEY), tmp_path / name, Cache(tmp_path / f"c{name}"), jobs=1)
        for name in ("first", "again")
    ]
    first, again = (one.bundles[0].path.read_bytes() for one in bundles)
    assert first == again


def test_kernels_that_raise_are_named_and_the_others_are_built(tmp_path: Any) -> None:
    result = build(manifest(HalfBroken.name, KEY), tmp_path, Cache(tmp_path / "cache"), jobs=1)
    (bundle,) = result.bundles
    assert "b" in {kernel.operator for kernel in bundle.header.kernels}
    reasons = {one.task.candidate.operator: one.reason for one in bundle.failures}
    said = "compile() of provider 'test_checked:HalfBroken' raised OddError: 1 and 2"
    assert reasons
    for operator, reason in reasons.items():
        assert reason.startswith(f"{operator}: {said}")


def test_processes_that_cannot_be_prepared_end_the_build_with_the_reason(tmp_path: Any) -> None:
    said = r"provider 'test_checked:Unprepared': prepare\(\) raised OddError: 3 and 4"
    with pytest.raises(ToolchainError, match=said):
        build(manifest(Unprepared.name, KEY), tmp_path, Cache(tmp_path / "cache"), jobs=1)


class Panic(BaseException):
    """What libraries in Rust raise, beside every Exception."""


@pytest.mark.parametrize("method", ["toolchain", "prepare", "enumerate", "model"])
def test_what_is_no_exception_is_the_providers_error_too(method: str) -> None:
    provider = told(**{method: Panic("index out of bounds")})
    call = {
        "toolchain": provider.toolchain,
        "prepare": provider.prepare,
        "enumerate": lambda: provider.enumerate(SIGNATURE, TARGET),
        "model": lambda: provider.runtime_model(TARGET),
    }[method]
    with pytest.raises(ToolchainError, match=r"raised Panic: index out of bounds"):
        call()


def test_a_panic_is_that_kernels_failure() -> None:
    with pytest.raises(CompileError, match=r"one: compile\(\) of provider .* raised Panic: broken"):
        told(compile=Panic("broken")).compile(GOOD, TARGET)


def test_interrupts_stay_interrupts() -> None:
    for method in ("toolchain", "compile"):
        provider = told(**{method: KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            provider.toolchain() if method == "toolchain" else provider.compile(GOOD, TARGET)


def test_what_else_hangs_on_a_candidate_goes_no_further() -> None:
    good = replace(GOOD, provider=Foreign.name)
    marked = replace(good)
    object.__setattr__(marked, "speed", lambda: 11)  # could not be sent to a compiler process
    (found,) = told(enumerate=listing(marked)).enumerate(SIGNATURE, TARGET).candidates
    assert found == good
    assert not hasattr(found, "speed")


class Named:
    def __init__(self, name: Any) -> None:
        self.name = name

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int:
        return 1


@pytest.mark.parametrize("model", [None, Named("a\nb"), Named(""), Named(7), Named("x" * 1001)])
def test_a_model_must_have_a_name_that_headers_can_have(model: Any) -> None:
    with pytest.raises(ToolchainError, match=r"a name that is printable text of 1 to 1000"):
        told(model=model).runtime_model(TARGET)
