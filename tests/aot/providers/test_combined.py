"""Several providers as one, without a compiler."""

from __future__ import annotations

import pytest

from fake_provider import FakeProvider, candidate
from nvgemm_aot.pipeline.assemble import toolchain
from nvgemm_aot.pipeline.compiler import make_tasks
from nvgemm_aot.providers import load_provider, provider_parts
from nvgemm_aot.providers.base import Candidate, Enumeration, Rejection
from nvgemm_aot.providers.combined import Combined
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Signature

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


class Other(FakeProvider):
    """Like the fake provider, but for its name, its versions and what it lists."""

    name = "test_combined:Other"
    recipe = "2"

    def __init__(self, found: Enumeration | None = None) -> None:
        self.found = found or Enumeration()

    def toolchain(self) -> dict[str, str]:
        return {"other": "7"}

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        return self.found

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        return candidate.operator.encode()


def test_a_name_with_a_plus_is_that_of_both_in_order() -> None:
    both = load_provider("quack+cutlass_operators")
    assert [part.name for part in provider_parts(both)] == ["quack", "cutlass_operators"]
    assert both.name == "quack+cutlass_operators"
    assert set(both.toolchain()) >= {"quack-kernels", "nvidia-cutlass-operators"}
    alone = load_provider("quack")
    assert provider_parts(alone) == (alone,)


class Contradicting(Other):
    """States another version of what the fake provider states."""

    name = "test_combined:Contradicting"

    def toolchain(self) -> dict[str, str]:
        return {name: f"{version}.1" for name, version in FakeProvider().toolchain().items()}


def test_versions_that_differ_are_an_error_that_names_both() -> None:
    fake, same = FakeProvider(), FakeProvider()
    assert Combined((fake, same)).toolchain() == fake.toolchain()
    said = f"provider '{fake.name}' gives .* version .*, provider 'test_combined:Contradicting' giv"
    with pytest.raises(ToolchainError, match=said):
        Combined((fake, Contradicting())).toolchain()


class OtherZstd(Other):
    """States a version of what nvgemm-aot itself packs bundles with."""

    name = "test_combined:OtherZstd"

    def toolchain(self) -> dict[str, str]:
        return {"zstd": "0.1"}


def test_a_provider_cannot_replace_the_versions_of_nvgemm_aot() -> None:
    target = build_target("sm_90a").target
    assert "zstd" in toolchain(FakeProvider(), target)
    with pytest.raises(ToolchainError, match=r"gives 'zstd' version '0\.1', nvgemm-aot gives it"):
        toolchain(OtherZstd(), target)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Provider", "cannot be created: ModuleNotFoundError"),
        ("os:nothing", "cannot be created: AttributeError"),
        ("os:path", "is a module, must be a class"),
        ("builtins:dict", "is not a provider: it lacks interface, name, recipe, toolchain"),
        ("cutlass_operators+nonesuch", "unknown provider 'nonesuch'"),
    ],
)
def test_says_why_a_name_gives_no_provider(name: str, said: str) -> None:
    with pytest.raises(ToolchainError, match=said):
        load_provider(name)


def test_lists_the_candidates_and_rejections_of_all() -> None:
    found = Enumeration(
        candidates=(candidate("theirs", SIGNATURE),),
        rejections=(Rejection(operator="worse", reason="spills"),),
    )
    more = Enumeration(candidates=(candidate("more", SIGNATURE),), absence=None)
    both = Combined((Other(found), Other(more))).enumerate(SIGNATURE, build_target("sm_90a"))
    assert [one.operator for one in both.candidates] == ["theirs", "more"]
    assert [one.operator for one in both.rejections] == ["worse"]


@pytest.mark.parametrize(
    ("absences", "said"),
    [(("no fp6", "no fp6 here"), "no fp6; no fp6 here"), (("no fp6", None), None)],
)
def test_a_signature_is_absent_only_where_all_lack_it(
    absences: tuple[str | None, ...], said: str | None
) -> None:
    parts = tuple(Other(Enumeration(absence=absence)) for absence in absences)
    assert Combined(parts).enumerate(SIGNATURE, build_target("sm_90a")).absence == said


def test_each_candidate_is_compiled_and_keyed_by_its_own_provider() -> None:
    target = build_target("sm_90a")
    fake, other = FakeProvider(), Other()
    mine = candidate("one", SIGNATURE)
    theirs = Candidate(**{**vars(mine), "provider": Other.name})
    both = make_tasks([mine, theirs], target, Combined((fake, other)))
    alone = (*make_tasks([mine], target, fake), *make_tasks([theirs], target, other))
    assert [task.key for task in both] == [task.key for task in alone]
    assert both[0].key != both[1].key
    assert Combined((fake, other)).compile(theirs, target) == b"one"
