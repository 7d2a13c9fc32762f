"""The text of a recording: what is written is a manifest, and nothing else is read back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.targets import DEFAULT_DEVICE
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.recording.text import TARGETS, Recording, manifest_name, parse

PROBLEMS = {
    "mm/tn/bf16xbf16/fp32/bf16/m2n4096k4096": 3,
    "mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096": 120,
    "mm/nt/fp16xfp16/fp32/fp32/m64n8k8": 1,
    "bmm/nn/bf16xbf16/fp32/bf16/b4m64n8k8": 7,
    "mm/tn/int8xint8/int32/int32/m16n32k64": 2,
}


def recording(problems: dict[str, int] | None = None) -> Recording:
    counted = PROBLEMS if problems is None else problems
    return Recording(
        name="some",
        targets={"sm_90a", "sm_100f"},
        problems=Counter({Problem.parse(key): count for key, count in counted.items()}),
        undeclarable=Counter({"an odd one": 5}),
    )


def test_what_is_written_is_read_back() -> None:
    assert parse(recording().render()) == recording()
    assert parse(recording({}).render()) == recording({})


def test_scales_epilogues_and_groups_are_written_and_declared(tmp_path: Path) -> None:
    problems = {
        "mm/tn/bf16xbf16/fp32/bf16/bias_relu/m16n32k64": 4,
        "bmm/tn/bf16xbf16/fp32/bf16/add/b4m16n32k64": 5,
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias/m16n32k64": 6,
        "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor/m16n32k64": 7,
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m16n32k64": 8,
        "grouped_mm/tn/bf16xbf16/fp32/bf16/g8m16n32k64": 9,
    }
    met = recording(problems)
    assert parse(met.render()) == met
    path = tmp_path / "some.yaml"
    path.write_text(met.render())
    assert {d.problem.key: d.count for d in load_manifest(path).declared} == problems
    line = "- {op: grouped_mm, dtype: bf16, out: bf16, layout: tn, groups: 8, m: 16, n: 32, k: 64"
    assert f"{line}, count: 9}}" in met.render().splitlines()
    assert "- {op: mm, dtype: fp8_e5m2, dtype_b: fp8_e4m3, out: bf16, layout: tn," in met.render()


def test_it_is_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(recording().render())
    manifest = load_manifest(path)
    assert manifest.name == "some"
    assert [target.arch for target in manifest.bundle_targets] == ["sm_100f", "sm_90a"]
    assert {d.problem.key: d.count for d in manifest.declared} == PROBLEMS
    assert [d.problem for d in manifest.declared] == list(parse(path.read_text()).problems)


def test_every_target_can_be_built_for() -> None:
    assert set(TARGETS) == set(DEFAULT_DEVICE)


def test_merging_adds_counts_and_joins_targets() -> None:
    one = Recording(name="one", targets={"sm_90a"})
    one.merge(recording({"mm/tn/bf16xbf16/fp32/bf16/m2n8k8": 1}))
    one.merge(recording({"mm/tn/bf16xbf16/fp32/bf16/m2n8k8": 2}))
    assert one.name == "one"
    assert one.targets == {"sm_90a", "sm_100f"}
    assert one.problems == {Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m2n8k8"): 3}
    assert one.undeclarable == {"an odd one": 10}


def test_words_of_others_cannot_break_the_file(tmp_path: Path) -> None:
    kept = recording()
    odd = {"two\n- lines\x07 of: {it": 1, "two - lines\x08 of: {it": 2}
    kept.merge(Recording(name="", undeclarable=Counter(odd)))
    assert "# 3 x two - lines? of: {it\n" in kept.render()
    assert parse(kept.render()) == kept
    (tmp_path / "some.yaml").write_text(kept.render())
    load_manifest(tmp_path / "some.yaml")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("count: 120", "count: 0120", 9),
        ("count: 120", "count: 0", 9),
        ("layout: nt", "layout: xy", 7),
        ("m: 16, n: 4096", "m: 99999999999, n: 4096", 9),
        ("version: 1", "version: 2", 2),
        ('name: "some"', "name: some", 3),
        ("targets: [sm_100f, sm_90a]", "targets: [sm_90a, sm_100f]", 4),
        ("targets: [sm_100f, sm_90a]", "targets: [sm_77, sm_90a]", 4),
        ("gemms:", "candidates: 3\ngemms:", 5),
        ("# 5 x an odd one\n", "# 5 x an odd one\n# by hand\n", 13),
        ("# Recorded", "# Written", 1),
    ],
)
def test_what_was_edited_is_refused_with_its_line(old: str, new: str, line: int) -> None:
    text = recording().render()
    assert text.count(old) == 1
    with pytest.raises(ValueError, match=f"^line {line} is "):
        parse(text.replace(old, new))


def test_a_text_that_is_cut_off_is_refused() -> None:
    text = recording().render()
    for end in range(1, len(text) - 1):
        if text[end - 1] == "\n" and end > text.index("- {op: bmm"):
            continue  # GEMMs that are missing altogether leave no trace
        with pytest.raises(ValueError, match="line"):
            parse(text[:end])


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("llama-3.1", "llama-3.1"),
        ("My Model (new)", "my-model-new"),
        ("---", "recorded"),
        ("x" * 63 + "-yz", "x" * 63),
    ],
)
def test_a_files_name_becomes_the_manifests(stem: str, name: str) -> None:
    assert manifest_name(stem) == name
