"""Versions of the bundle format: bundles of the first are read, and what later releases add to the
second costs what needs it, and nothing else.

``tests/data/format-1`` holds bundles that commit 6cd3419 wrote, the last before version 2:
``cpu.nvgemm`` is `cpu_provider.build_bundle` of `CPU_PROBLEMS`; ``synthetic.nvgemm`` is
`synthetic_content(kernels=3, problems=2)` with a problem in ``unserved``; ``sm_90a.nvgemm`` was
built with cutlass-dsl 4.8.1 for sm_90a: two candidates of bf16, TN, 16 x 5120 x 2560.
"""

from __future__ import annotations

import copy
import itertools
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from test_bundle import header_of, with_header

import cpu_provider
import nvgemm_runtime
from installed_bundles import use
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_aot.cli.bundle_texts import bundle_document, bundle_text, installed_document
from nvgemm_aot.cli.main import main
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_runtime.bundle.format import KNOWN_FEATURES, Header, Span
from nvgemm_runtime.bundle.ranking_entries import UnservedReason
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import UnknownTarget
from nvgemm_runtime.installed.discover import InstalledBundle
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Basis, BundleView, Match, Miss
from nvgemm_runtime.matching.trust import why_order_is_open
from repository import TESTS
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import B200
from synthetic_payload import shared_object

FORMAT_1 = TESTS / "data/format-1"

CPU_PROBLEMS = (cpu_provider.problem(), cpu_provider.problem(sizes=(32, 32, 64)))

Edit = Callable[[Any], object]


@pytest.mark.parametrize("name", ["cpu", "synthetic", "sm_90a"])
def test_bundles_of_version_1_are_read_whole(name: str) -> None:
    with Bundle(FORMAT_1 / f"{name}.nvgemm") as bundle:
        bundle.check_body()
        header = bundle.header
        assert header.format_version == 1
        assert header.imports is None
        assert all(kernel.imports is None for kernel in header.kernels)
        assert header.unknown_kernels == header.unknown_rankings == ()
        assert all(bundle.payload(kernel) for kernel in header.kernels)
        assert all(header.is_complete(ranking) for ranking in header.rankings)
        text = bundle_text(bundle_document(bundle))
        assert "format version" in text
        for provider in {kernel.provider for kernel in header.kernels}:
            assert f"provider {provider} " in text


def test_a_kernel_of_a_version_1_bundle_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A copy, for others may be able to write where this repository lies.
    path = tmp_path / "cpu.nvgemm"
    path.write_bytes((FORMAT_1 / "cpu.nvgemm").read_bytes())
    path.chmod(0o600)
    use(monkeypatch, path)
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    torch.testing.assert_close(nvgemm_runtime.mm(a, b), a @ b)


def test_reasons_of_version_1_do_not_say_what_they_hold_for() -> None:
    with Bundle(FORMAT_1 / "synthetic.nvgemm") as bundle:
        (reason,) = bundle.header.unserved.values()
    assert reason == UnservedReason(text="n = 4100 is not a multiple of 8", scope=None)


def test_a_version_1_bundle_is_written_again_as_version_2_with_its_imports(tmp_path: Path) -> None:
    with Bundle(FORMAT_1 / "sm_90a.nvgemm") as bundle:
        content = read_content(bundle)
    (tmp_path / "new.nvgemm").write_bytes(encode_bundle(content)[0])
    with Bundle(tmp_path / "new.nvgemm") as bundle:
        header = bundle.header
    assert header.format_version == 2
    assert header.imports is not None
    assert "TVMFFIErrorSetRaisedFromCStr" in header.imports
    assert "CuteDSLRT_TVMFFISetRaisedCudaError" in header.imports
    assert list(header.imports) == sorted(header.imports)
    assert verify_bundle(tmp_path / "new.nvgemm", disassemble=False).ok


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        (lambda names: names[1:], "missing CuteDSLRT_TVMFFISetRaisedCudaError, extra none"),
        (lambda names: [*names, "zoo"], "missing none, extra zoo"),
    ],
)
def test_imports_that_are_not_those_of_the_payloads_are_found(
    imports: Callable[[list[str]], list[str]], said: str, tmp_path: Path
) -> None:
    with Bundle(FORMAT_1 / "sm_90a.nvgemm") as bundle:
        content = read_content(bundle)
    data = encode_bundle(content)[0]
    document = header_of(data)
    document["imports"] = imports(document["imports"])
    path = tmp_path / "other.nvgemm"
    path.write_bytes(with_header(data, document))
    report = verify_bundle(path, disassemble=False)
    assert {finding.check.value for finding in report.findings} == {"imports"}
    assert {finding.kernel for finding in report.findings} == {k["id"] for k in document["kernels"]}
    assert all(said in finding.message for finding in report.findings)


def test_a_kernel_that_imports_other_symbols_states_them_itself(tmp_path: Path) -> None:
    with Bundle(FORMAT_1 / "sm_90a.nvgemm") as bundle:
        content = read_content(bundle)
    source = "int _cudaNew(void); int __tvm_ffi_gemm(void) { return _cudaNew(); }"
    other = replace(content.kernels[0], payload=shared_object(tmp_path, source), operator="other")
    path = tmp_path / "mixed.nvgemm"
    path.write_bytes(encode_bundle(replace(content, kernels=(*content.kernels, other)))[0])
    with Bundle(path) as bundle:
        header = bundle.header
    assert header.imports is not None
    assert "_cudaNew" not in header.imports
    assert {kernel.id: kernel.imports for kernel in header.kernels} == {
        **{kernel.id: None for kernel in content.kernels},
        other.id: ("_cudaNew",),
    }
    report = verify_bundle(path, disassemble=False)
    assert "imports" not in {finding.check.value for finding in report.findings}
    assert "of 1 kernel others" in bundle_text(bundle_document(Bundle(path)))


# What later releases add.


def edited(tmp_path: Path, *edits: Edit) -> Header:
    """The header of a bundle of 4 kernels that was written with additions."""
    data = encode_bundle(synthetic_content(kernels=4, problems=4))[0]
    document = header_of(data)
    for edit in edits:
        edit(document)
    path = tmp_path / "later.nvgemm"
    path.write_bytes(with_header(data, document))
    with Bundle(path) as bundle:
        bundle.check_body()
        assert bundle_text(bundle_document(bundle))
        return bundle.header


def plain(tmp_path: Path) -> Header:
    return edited(tmp_path)


def without_places(header: Header) -> Header:
    """A header without what its own length shifts."""
    nowhere = Span(offset=0, stored_bytes=0, content_bytes=0)
    kernels = tuple(replace(kernel, span=nowhere) for kernel in header.kernels)
    return replace(header, dictionary=None, kernels=kernels)


def holders(document: Any) -> list[Any]:
    """Every object of a header, but for those whose members are names of the user's own."""
    if isinstance(document, list):
        return [found for item in document for found in holders(item)]
    if not isinstance(document, dict):
        return []
    inner = [value for key, value in document.items() if key != "toolchain"]
    return [document, *holders(inner)]


def test_unknown_members_are_ignored_in_every_object(tmp_path: Path) -> None:
    def add_everywhere(document: Any) -> None:
        for holder in holders(document):
            holder["confirmations"] = [{"gpu": "NVIDIA B300", "agrees": True}]

    before = plain(tmp_path)
    assert without_places(edited(tmp_path, add_everywhere)) == without_places(before)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda kernel: kernel.update(requires=["workspace-formula"], workspace_bytes="m*n*4"),
         "requires workspace-formula, unknown to this release; upgrade"),
        (lambda kernel: (kernel.update(requires=["stream-k"]), kernel.pop("design")),
         "requires stream-k"),
        (lambda kernel: kernel.update(signature="grouped_wgrad/tn/bf16xbf16/fp32/bf16"),
         "has a signature unknown to this release"),
        (lambda kernel: kernel.update(signature="mm/tn/bf16xbf16/fp32/bf16/swiglu(1.7)"), "swiglu"),
        (lambda kernel: kernel.update(signature="mm/tn/fp6_e3m2xbf16/fp32/bf16"), "fp6_e3m2"),
        (lambda kernel: kernel.update(signature="mm/tn/bf16xbf16/fp32/bf16/fp32_128x128"), "128"),
    ],
)  # fmt: skip
def test_a_kernel_that_is_not_understood_costs_itself_alone(
    edit: Edit, said: str, tmp_path: Path
) -> None:
    before = plain(tmp_path)
    header = edited(tmp_path, lambda h: edit(h["kernels"][1]))
    (unknown,) = header.unknown_kernels
    assert unknown.id == before.kernels[1].id
    assert said in unknown.why
    assert [kernel.id for kernel in header.kernels] == [
        kernel.id for kernel in before.kernels if kernel.id != unknown.id
    ]
    assert header.unknown_rankings == ()
    for ranking, whole in zip(header.rankings, before.rankings, strict=True):
        assert [header.kernels[place.kernel].id for place in ranking.kernels] == [
            before.kernels[place.kernel].id
            for place in whole.kernels
            if before.kernels[place.kernel].id != unknown.id
        ]
        if ranking.measured is not None and whole.measured is not None:
            assert len(ranking.measured.spreads_ns) == len(ranking.kernels)
    index = Index([BundleView(name="later", header=header)], B200)
    assert any("1 kernel is left out" in refusal for refusal in index.refusals)
    for ranking in header.rankings:
        match = index.match(ranking.problem, 16)
        assert isinstance(match, Match)
        assert unknown.id not in {served.kernel.id for served in match.kernels}


def test_a_measurement_that_lost_a_kernel_is_in_doubt(tmp_path: Path) -> None:
    before = plain(tmp_path)
    measured = next(one for one in before.rankings if one.measured is not None)
    winner = measured.kernels[0].kernel
    header = edited(
        tmp_path,
        lambda h: h["kernels"][winner].update(requires=["pdl"]),
        lambda h: [one["measured"].update(doubts=[]) for one in h["rankings"] if "measured" in one],
    )
    (ranking,) = [one for one in header.rankings if one.problem == measured.problem]
    assert ranking.measured is not None
    why = why_order_is_open(ranking.measured, header.sources[ranking.source], B200, ())
    assert why is not None
    assert "1 of 3 measured kernels need a newer nvgemm-aot" in why


def test_a_ranking_all_of_whose_kernels_are_unknown_is_left_out(tmp_path: Path) -> None:
    header = edited(
        tmp_path, lambda h: [kernel.update(requires=["pdl"]) for kernel in h["kernels"]]
    )
    assert header.kernels == header.rankings == ()
    assert len(header.unknown_kernels) == len(header.unknown_rankings) == 4
    index = Index([BundleView(name="later", header=header)], B200)
    miss = index.match(Problem(signature=SIGNATURE, m=1, n=4096, k=4096), 16)
    assert isinstance(miss, Miss)
    assert any("4 kernels are left out: requires pdl" in reason for reason in miss.reasons)


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h["rankings"][0].update(requires=["dispatch"], source={"any": "thing"}),
        lambda h: h["rankings"][0].update(problem="mm/tn/bf16xbf16/fp32/bf16/dswiglu/m1n8k8"),
        lambda h: h["rankings"][0].update(problem="mm/tn/bf16xbf16/fp32/bf16/e2m1n8k8"),
    ],
)
def test_a_ranking_that_is_not_understood_costs_its_problem_alone(
    edit: Edit, tmp_path: Path
) -> None:
    before, header = plain(tmp_path), edited(tmp_path, edit)
    assert header.kernels != ()
    assert header.rankings == before.rankings[1:]
    assert len(header.unknown_rankings) == 1


def test_a_source_that_is_not_understood_costs_its_rankings_alone(tmp_path: Path) -> None:
    before = plain(tmp_path)
    header = edited(tmp_path, lambda h: h["sources"][0].update(requires=["x"], kind=None))
    assert header.sources == before.sources[1:]
    assert [ranking.problem for ranking in header.rankings] == [
        ranking.problem for ranking in before.rankings if ranking.source == 1
    ]
    assert {ranking.source for ranking in header.rankings} == {0}
    assert "its source requires x" in header.unknown_rankings[0].why


def test_a_bundle_that_requires_an_unknown_feature_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        BundleFormatError,
        match=r"\[feature\] the bundle requires remote-payloads, unknown to this release; upgrade",
    ):
        edited(tmp_path, lambda h: (h.update(requires=["remote-payloads"]), h.pop("target")))


@pytest.mark.parametrize("names", [[], ["pdl"], ["pdl", "stream-k"]])
def test_features_that_a_release_knows_cost_nothing(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KNOWN_FEATURES | {"pdl", "stream-k"}
    monkeypatch.setattr("nvgemm_runtime.bundle.decode.KNOWN_FEATURES", known)
    parts = ("kernels", "rankings", "sources")
    header = edited(
        tmp_path,
        lambda h: [
            one.update(requires=names)
            for one in (h, *itertools.chain.from_iterable(h[part] for part in parts))
        ],
    )
    assert without_places(header) == without_places(plain(tmp_path))


def test_one_unknown_feature_among_known_ones_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvgemm_runtime.bundle.decode.KNOWN_FEATURES", frozenset({"pdl"}))
    header = edited(tmp_path, lambda h: h["kernels"][0].update(requires=["pdl", "stream-k"]))
    (unknown,) = header.unknown_kernels
    assert unknown.why.startswith("requires stream-k, unknown")


@pytest.mark.parametrize(("part", "text"), [("arch", "gfx950"), ("cuda", "cuda-14.x")])
def test_a_target_of_an_unknown_form_serves_no_device_and_can_be_looked_at(
    part: str, text: str, tmp_path: Path
) -> None:
    header = edited(tmp_path, lambda h: h["target"].update({part: text}))
    assert isinstance(header.target, UnknownTarget)
    index = Index([BundleView(name="later", header=header)], B200)
    (refusal,) = index.refusals
    assert f"target {header.target.key} is unknown to this release; upgrade" in refusal


def test_an_unknown_convention_is_never_called(tmp_path: Path) -> None:
    later = "tvm_ffi:gemm(a,b,out,semaphores,tiles,stream)"
    header = edited(tmp_path, lambda h: h["kernels"][0].update(calling_convention=later))
    index = Index([BundleView(name="later", header=header)], B200)
    assert any(later in refusal for refusal in index.refusals)
    for ranking in header.rankings:
        match = index.match(ranking.problem, 16)
        assert isinstance(match, Match)
        assert header.kernels[0].id not in {served.kernel.id for served in match.kernels}
        assert match.basis is Basis.DECLARED
        lost = any(place.kernel == 0 for place in ranking.kernels)
        if ranking.measured is not None:
            assert match.measured is not None
            doubt = "1 of 3 measured kernels cannot be launched here"
            assert (doubt in match.measured.doubts) is lost
    assert any(
        place.kernel == 0 for one in header.rankings if one.measured for place in one.kernels
    )


def test_an_unknown_scope_or_problem_among_the_unserved_is_no_error(tmp_path: Path) -> None:
    entries = [
        {"problem": "mm/nn/bf16xbf16/fp32/bf16/m1n8k8", "reason": "r", "scope": "layout"},
        {"problem": "conv/nhwc", "reason": "r", "scope": "signature"},
    ]
    header = edited(tmp_path, lambda h: h.update(unserved=copy.deepcopy(entries)))
    assert header.unserved == {
        Problem.parse("mm/nn/bf16xbf16/fp32/bf16/m1n8k8"): UnservedReason(text="r", scope=None)
    }


def test_a_verification_says_which_kernels_it_did_not_look_at(tmp_path: Path) -> None:
    edited(tmp_path, lambda h: h["kernels"][0].update(requires=["pdl"]))
    report = verify_bundle(tmp_path / "later.nvgemm", disassemble=False)
    assert len(report.kernels) == 3
    assert any(note.startswith("only digests were checked of 1 kernel: ") for note in report.notes)


UNKNOWN_ENTRY = {"problem": "conv/nhwc/m1", "reason": "r", "requires": ["convolutions"]}


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda h: h["kernels"][0].update(requires=["pdl"]), "requires pdl"),
        (lambda h: h["rankings"][0].update(requires=["dispatch"]), "requires dispatch"),
        (lambda h: h.update(unserved=[UNKNOWN_ENTRY]), "requires convolutions"),
        (lambda h: h.update(unserved=[{"problem": "conv/nhwc/m1", "reason": "r"}]),
         "names a problem unknown to this release"),
        (lambda h: h["sources"].append({"requires": ["energy"]}), "requires energy"),
        (lambda h: h["sources"].append({"kind": "confirmation", "by": "b", "gpu": "g"}),
         "is of the kind 'confirmation', unknown to this release"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_not_lost_in_a_copy(edit: Edit, why: str, tmp_path: Path) -> None:
    edited(tmp_path, edit)
    path = tmp_path / "later.nvgemm"
    with (
        Bundle(path) as bundle,
        pytest.raises(BundleFormatError, match=rf"\[feature\] 1 kernels, .* {re.escape(why)}"),
    ):
        read_content(bundle)
    with Bundle(path) as bundle:
        assert why in bundle_text(bundle_document(bundle))


def test_a_source_of_an_unknown_kind_counts_as_an_estimate(tmp_path: Path) -> None:
    before = plain(tmp_path)
    (place,) = [i for i, source in enumerate(before.sources) if source.kind == "measurement"]
    changed = [i for i, ranking in enumerate(before.rankings) if ranking.source == place]
    assert all(before.rankings[i].measured for i in changed)
    header = edited(tmp_path, lambda h: h["sources"][place].update(kind="confirmation"))
    assert header.sources[place] == replace(before.sources[place], kind="estimate", conditions=None)
    assert header.unknown_rankings == ()
    for number, (ranking, whole) in enumerate(zip(header.rankings, before.rankings, strict=True)):
        assert ranking == (replace(whole, measured=None) if number in changed else whole)


def test_an_estimate_has_nothing_measured(tmp_path: Path) -> None:
    with pytest.raises(BundleFormatError, match=r"\[ranking-measured\]"):
        edited(
            tmp_path,
            lambda h: [one.update(kind="estimate") for one in h["sources"]],
        )


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (["mm/nn/bf16xbf16/fp32/bf16/m1n8k8"] * 2, "each once"),
        (["mm/nn/bf16xbf16/fp32/bf16/m2n8k8", "mm/nn/bf16xbf16/fp32/bf16/m1n8k8"], "sorted"),
        (["conv/nhwc/m1"] * 2, "conv/nhwc/m1 more than once"),
    ],
)
def test_the_unserved_are_in_order_each_once(
    problems: list[str], message: str, tmp_path: Path
) -> None:
    entries = [{"problem": key, "reason": str(place)} for place, key in enumerate(problems)]
    with pytest.raises(BundleFormatError, match=rf"\[unserved-order\] .*{message}"):
        edited(tmp_path, lambda h: h.update(unserved=entries))


def test_problems_that_are_not_understood_may_lie_anywhere_among_the_unserved(
    tmp_path: Path,
) -> None:
    known = "mm/nn/bf16xbf16/fp32/bf16/m{}n8k8"
    keys = ["zoo/1", known.format(1), "conv/1", known.format(2)]
    entries = [{"problem": key, "reason": "r"} for key in keys]
    header = edited(tmp_path, lambda h: h.update(unserved=entries))
    assert [problem.key for problem in header.unserved] == keys[1::2]
    assert [one.problem for one in header.unknown_unserved] == keys[::2]


def test_what_version_1_does_not_have_is_ignored_in_its_bundles(tmp_path: Path) -> None:
    data = (FORMAT_1 / "sm_90a.nvgemm").read_bytes()
    document = header_of(data)
    document.update(failures=[{"any": "thing"}], requires=["remote-payloads"], imports=7)
    for kernel in document["kernels"]:
        kernel.update(requires=["pdl"], imports=["_cudaNew"])
    for ranking in document["rankings"]:
        ranking.update(missing=[0], requires=["dispatch"], declared=7)
    path = tmp_path / "edited.nvgemm"
    written = bytearray(with_header(data, document))
    struct.pack_into("<I", written, 8, 1)  # the version
    path.write_bytes(written)
    with Bundle(path) as bundle, Bundle(FORMAT_1 / "sm_90a.nvgemm") as whole:
        assert bundle.header.format_version == 1
        assert without_places(bundle.header) == without_places(whole.header)


def test_a_problem_that_was_measured_and_not_declared_is_so_marked_and_shown(
    tmp_path: Path,
) -> None:
    before = plain(tmp_path)
    place = next(i for i, one in enumerate(before.rankings) if one.measured is not None)
    header = edited(tmp_path, lambda h: h["rankings"][place].update(declared=False))
    assert [i for i, one in enumerate(header.rankings) if not one.is_declared] == [place]
    assert header.declared_count == len(header.rankings) - 1
    with Bundle(tmp_path / "later.nvgemm") as bundle:
        copied = read_content(bundle)
        assert b'"declared":false' in encode_bundle(copied)[0]
        document = bundle_document(bundle)
        assert [one["declared"] for one in document["problems"]].count(False) == 1
        assert bundle_text(document).count("measured and not declared") == 1
    item = InstalledBundle(path=tmp_path / "later.nvgemm", distribution="d", version="1")
    (listed,) = installed_document([item])
    assert (listed["problems"], listed["not_declared"]) == (len(header.rankings) - 1, 1)


@pytest.mark.parametrize(
    ("is_measured", "declared", "said"),
    [
        (True, True, r"declared must be false, or absent"),
        (True, None, r"declared must be false, or absent"),
        (False, False, r"declared requires measured"),
    ],
)
def test_only_what_was_measured_may_be_not_declared(
    is_measured: bool, declared: object, said: str, tmp_path: Path
) -> None:
    rankings = plain(tmp_path).rankings
    place = next(i for i, one in enumerate(rankings) if bool(one.measured) == is_measured)
    with pytest.raises(BundleFormatError, match=said):
        edited(tmp_path, lambda h: h["rankings"][place].update(declared=declared))


def test_no_bundle_is_written_that_says_not_declared_of_what_was_not_measured() -> None:
    content = synthetic_content(kernels=3, problems=2)
    first, second = content.rankings
    rankings = (first, replace(second, is_declared=False, measured=None))
    with pytest.raises(BundleFormatError, match=r"not written: .*declared requires measured"):
        encode_bundle(replace(content, rankings=rankings))


@pytest.mark.parametrize("command", ["merge", "split"])
def test_bundles_with_unknown_entries_are_neither_merged_nor_split(
    tmp_path: Path, command: str
) -> None:
    data = encode_bundle(synthetic_content(kernels=4, problems=4))[0]
    document = header_of(data)
    document["kernels"][0]["requires"] = ["future"]
    later, out = tmp_path / "later.nvgemm", tmp_path / "out.nvgemm"
    later.write_bytes(with_header(data, document))
    words = {"merge": ["-o", str(out)], "split": ["--parts", "1", "-o", str(out)]}[command]
    result = CliRunner().invoke(main, [command, str(later), *words])
    assert result.exit_code == BundleFormatError.exit_code
    assert "1 kernels, rankings, sources and unserved entries are unknown" in result.output
    assert not out.exists()
