"""What a header says of workspaces that are formulas, of determinism, and of dependent launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_bundle import header_of, with_header

from nvgemm_aot.bundle.content import BundleContent, read_content
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_aot.cli.bundle_texts import bundle_document, bundle_text
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.errors import BundleFormatError
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match, Miss
from synthetic_content import synthetic_content
from synthetic_facts import B200

WORKSPACE = TileWorkspace(
    tile=(128, 64),
    tiles_multiple=(2, 1),
    zeroed_once=128,
    zeroed_per_tile=4,
    scratch_per_tile=32768,
)
CONVENTION = "tvm_ffi:gemm(a,b,out,workspace,clusters,stream)"


def content(**changes: Any) -> BundleContent:
    """One kernel, ranked for two problems."""
    whole = synthetic_content(kernels=1, problems=2)
    (kernel,) = whole.kernels
    return replace(whole, kernels=(replace(kernel, **changes),))


def splitting() -> BundleContent:
    """One that splits k among four in any order."""
    (kernel,) = synthetic_content(kernels=1, problems=2).kernels
    design = replace(kernel.design, splits=4, dependent_launch=True, cluster_limits=())
    return content(
        workspace=WORKSPACE,
        is_deterministic=False,
        calling_convention=CONVENTION,
        design=design,
    )


def document() -> Any:
    return header_of(encode_bundle(splitting())[0])


def read(tmp_path: Path, header: Any) -> Bundle:
    path = tmp_path / "edited.nvgemm"
    path.write_bytes(with_header(encode_bundle(splitting())[0], header))
    return Bundle(path)


def kernel_of(bundle: Bundle) -> Kernel:
    (kernel,) = bundle.header.kernels
    return kernel


def test_a_kernel_without_these_says_nothing_about_them() -> None:
    (entry,) = header_of(encode_bundle(content())[0])["kernels"]
    assert not {"workspace", "deterministic", "requires", "is_deterministic"} & {*entry}
    assert not {"splits", "dependent_launch"} & {*entry["design"]}


def test_a_header_holds_the_formula_and_requires_that_readers_know_it(tmp_path: Path) -> None:
    header = document()
    (entry,) = header["kernels"]
    assert entry["workspace"] == {
        "tile": [128, 64],
        "tiles_multiple": [2, 1],
        "zeroed_bytes": [128, 4],
        "scratch_bytes": 32768,
    }
    assert entry["workspace_bytes"] == 0
    assert entry["deterministic"] is False
    assert entry["requires"] == ["tile_workspace", "timing_dependent"]
    assert (entry["design"]["splits"], entry["design"]["dependent_launch"]) == (4, True)
    with read(tmp_path, header) as bundle:
        kernel = kernel_of(bundle)
        assert kernel.workspace == WORKSPACE
        assert not kernel.is_deterministic
        assert kernel.design == splitting().kernels[0].design
        text = bundle_text(bundle_document(bundle))
        assert "static_persistent, k split in 4, any order" in text
        (shown,) = bundle_document(bundle)["kernels"]
        assert shown["workspace"]["scratch_per_tile"] == 32768
        assert shown["is_deterministic"] is False
        assert encode_bundle(read_content(bundle)) == encode_bundle(splitting())


@pytest.mark.parametrize("feature", ["tile_workspace", "timing_dependent"])
def test_readers_without_the_feature_leave_the_kernel_out(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nvgemm_runtime.bundle.decode.KNOWN_FEATURES",
        {"tile_workspace", "timing_dependent"} - {feature},
    )
    with read(tmp_path, document()) as bundle:
        assert not bundle.header.kernels
        (unknown,) = bundle.header.unknown_kernels
    assert unknown.why.startswith(f"requires {feature}, unknown to this release")


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("tile", [128, 0], "tile[1] must be an integer in 1"),
        ("tile", [128], "tile must be a list of 2"),
        ("tile", [128, 2**31], "tile[1] must be an integer in 1..2147483647"),
        ("tiles_multiple", [0, 1], "tiles_multiple[0] must be an integer in 1"),
        ("tiles_multiple", [2**63 - 1, 1], "tiles_multiple[0] must be an integer in 1..2147483647"),
        ("zeroed_bytes", [4], "zeroed_bytes must be a list of 2"),
        ("zeroed_bytes", [-1, 4], "zeroed_bytes[0] must be an integer in 0"),
        ("scratch_bytes", (64 << 20) + 1, "scratch_bytes must be an integer in 0..67108864"),
        ("scratch_bytes", "m*n*4", "scratch_bytes must be an integer"),
        ("scratch_bytes", None, "workspace.scratch_bytes must be an integer"),
    ],
)
def test_refuses_a_formula_that_is_none(
    member: str, value: object, said: str, tmp_path: Path
) -> None:
    header = document()
    header["kernels"][0]["workspace"][member] = value
    with pytest.raises(BundleFormatError) as error:
        read(tmp_path, header)
    assert error.value.rule == "header-field"
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda kernel: kernel["workspace"].pop("tile"), "workspace lacks tile"),
        (lambda kernel: kernel.update(workspace_bytes=8), "workspace_bytes must be 0 with"),
        (lambda kernel: kernel.update(deterministic=1), "deterministic must be false, or absent"),
        (lambda kernel: kernel.update(deterministic=True), "deterministic must be false, or absen"),
        (
            lambda kernel: kernel.update(requires=["timing_dependent"]),
            "requires must have tile_workspace, which the kernel's other fields need (got ['tim",
        ),
        (lambda kernel: kernel.update(requires=["tile_workspace"]), "must have timing_dependent"),
        (lambda kernel: kernel.pop("requires"), "must have tile_workspace, timing_dependent"),
        (lambda kernel: kernel["design"].update(splits=0), "splits must be an integer in 1"),
        (lambda kernel: kernel["design"].update(dependent_launch="yes"), "must be true or false"),
    ],
)
def test_refuses_what_contradicts_the_format(edit: Any, said: str, tmp_path: Path) -> None:
    header = document()
    edit(header["kernels"][0])
    with pytest.raises(BundleFormatError) as error:
        read(tmp_path, header)
    assert error.value.rule == "header-field"
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workspace": None}, "workspace is passed once, must be never"),
        (
            {"workspace": replace(WORKSPACE, zeroed_once=0, zeroed_per_tile=0, scratch_per_tile=0)},
            "its workspace has 0 bytes for every problem",
        ),
        (
            {"calling_convention": "tvm_ffi:gemm(a,b,out,clusters,stream)"},
            "workspace is passed never, must be once",
        ),
        (
            {"calling_convention": "tvm_ffi:gemm(a,b,out,workspace,clusters,clusters,stream)"},
            "clusters is passed 2 times, must be once",
        ),
        (
            {"design": replace(splitting().kernels[0].design, cluster=(17, 1))},
            "its cluster has 17 thread blocks, must have at most 16",
        ),
    ],
)
def test_kernels_that_cannot_be_called_are_left_out(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    whole = splitting()
    changed = replace(whole, kernels=(replace(whole.kernels[0], **changes),))
    path = tmp_path / "b.nvgemm"
    path.write_bytes(encode_bundle(changed)[0])
    with Bundle(path) as bundle:
        index = Index([BundleView(name="b", header=bundle.header)], B200)
        found = index.match(bundle.header.rankings[0].problem, 16)
    assert isinstance(found, Miss)
    assert any(said in reason for reason in found.reasons)


def test_programs_that_want_determinism_get_other_kernels(tmp_path: Path) -> None:
    path = tmp_path / "b.nvgemm"
    whole = synthetic_content(kernels=3, problems=2)
    first = whole.kernels[0]
    loose = replace(first, is_deterministic=False)
    path.write_bytes(encode_bundle(replace(whole, kernels=(loose, *whole.kernels[1:])))[0])
    strict_facts = replace(B200, wants_determinism=True)
    with Bundle(path) as bundle:
        usual, strict = (
            Index([BundleView(name="b", header=bundle.header)], facts)
            for facts in (B200, strict_facts)
        )
        for ranking in bundle.header.rankings:
            every, some = (index.match(ranking.problem, 16) for index in (usual, strict))
            assert isinstance(every, Match)
            assert isinstance(some, Match)
            kept = {served.kernel.id for served in some.kernels}
            assert {served.kernel.id for served in every.kernels} - kept == {first.id}
            if some.measured is not None:
                assert every.measured is not None
                assert some.measured.doubts == every.measured.doubts
    assert any("results depend on timing" in reason for reason in strict.refusals)


@pytest.mark.parametrize("op", [Op.GROUPED_MM, Op.K_GROUPED_MM])
@pytest.mark.parametrize(
    ("formula", "is_refused"),
    [
        (replace(WORKSPACE, zeroed_once=4, zeroed_per_tile=0, scratch_per_tile=0), False),
        (replace(WORKSPACE, zeroed_per_tile=4, scratch_per_tile=0), True),
        (replace(WORKSPACE, zeroed_per_tile=0, scratch_per_tile=64), True),
    ],
    ids=["counter", "a counter a tile", "scratch a tile"],
)
def test_of_groups_a_workspace_has_no_tiles(
    op: Op, formula: TileWorkspace, is_refused: bool
) -> None:
    fault = formula.fault(op)
    assert (fault is not None) is is_refused
    assert not is_refused or f"of {op.value}" in str(fault)
    assert formula.fault(Op.MM) is None
