from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from nvgemm_aot.manifest import parse as manifest_module
from nvgemm_aot.manifest import rules, source
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.manifest.schema import NAME_PATTERN, allowed_keys, json_schema
from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.problem import MAX_EXTENT

HEAD = "version: 1\nname: a\ntargets: [sm_90a]\n"
DTYPES = "fp16, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1, int8, uint8"
OUTS = "fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int32, int8, uint8"
EPILOGUES = "none, bias, bias_relu, bias_gelu_tanh, bias_silu, add"
FLOAT_OUTS = "fp32, fp16, bf16, fp8_e4m3, fp8_e5m2"
GEMM_KEYS = (
    "op, dtype, dtype_b, out, layout, scales, epilogue, candidates, comment, m, n, k, nk, mnk, "
    "batch, groups, count"
)
TOP_KEYS = "version, name, description, targets, providers, candidates, defaults, gemms"
EXTENT = "an integer in 1..2147483647"
WAYS = "'m, n, k' or 'm, nk' or 'mnk'"


def load(tmp_path: Path, text: str | bytes) -> Manifest:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_manifest(path)


def mistakes(tmp_path: Path, text: str | bytes) -> list[str]:
    """The lines of the error that a file gives, without the directory; the count is checked."""
    with pytest.raises(ManifestError) as caught:
        load(tmp_path, text)
    message = str(caught.value).replace(f"{tmp_path}{os.sep}", "")
    *lines, last = message.splitlines()
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    assert last == f"{count} in x.yaml"
    return lines


def keys(manifest: Manifest) -> list[str]:
    return [declared.problem.key for declared in manifest.declared]


def gemm(fields: str) -> str:
    """A manifest whose only gemm has these fields; it starts at line 4, column 10."""
    return f"{HEAD}gemms: [ {{{fields}}} ]\n"


# What loads.


def test_loads_one_gemm_with_every_default(tmp_path: Path) -> None:
    manifest = load(tmp_path, gemm("dtype: bf16, m: 16, n: 6144, k: 4096"))
    assert manifest.name == "a"
    assert manifest.description == ""
    assert [(t.target.arch, t.device.name) for t in manifest.targets] == [
        ("sm_90a", "H200"),
        ("sm_90a", "H100"),
    ]
    assert keys(manifest) == ["mm/tn/bf16xbf16/fp32/bf16/m16n6144k4096"]
    assert manifest.declared[0].candidates == 8


@pytest.mark.parametrize(
    ("dtype", "signature"),
    [
        ("fp16", "fp16xfp16/fp32/fp16"),
        ("bf16", "bf16xbf16/fp32/bf16"),
        ("fp8_e4m3", "fp8_e4m3xfp8_e4m3/fp32/bf16"),
        ("fp8_e5m2", "fp8_e5m2xfp8_e5m2/fp32/bf16"),
        ("int8", "int8xint8/int32/int32"),
    ],
)
def test_accumulator_and_usual_output_follow_the_input(
    tmp_path: Path, dtype: str, signature: str
) -> None:
    manifest = load(tmp_path, gemm(f"dtype: {dtype}, mnk: [[1, 2, 3]]"))
    assert keys(manifest) == [f"mm/tn/{signature}/m1n2k3"]


def test_b_has_a_type_of_its_own_where_one_is_given(tmp_path: Path) -> None:
    both = "[fp8_e4m3, fp8_e5m2]"
    manifest = load(tmp_path, gemm(f"dtype: {both}, dtype_b: {both}, mnk: [[1, 16, 32]]"))
    assert keys(manifest) == [
        f"mm/tn/{a}x{b}/fp32/bf16/m1n16k32"
        for a in ("fp8_e4m3", "fp8_e5m2")
        for b in ("fp8_e4m3", "fp8_e5m2")
    ]
    shared = f"{HEAD}defaults: {{dtype_b: fp8_e4m3}}\ngemms:\n"
    text = shared + "- {dtype: fp8_e5m2, scales: fp32_row, out: fp16, mnk: [[1, 16, 32]]}\n"
    assert keys(load(tmp_path, text)) == ["mm/tn/fp8_e5m2xfp8_e4m3/fp32/fp16/fp32_row/m1n16k32"]


def test_multiplies_all_lists(tmp_path: Path) -> None:
    text = gemm(
        "op: bmm, dtype: [bf16, fp16], out: [fp32, bf16], layout: [tn, nt], "
        "m: [1, 2], n: [3, 4], k: [5, 6], batch: [7, 8]"
    )
    expected = {
        f"bmm/{layout}/{dtype}x{dtype}/fp32/{out}/b{batch}m{m}n{n}k{k}"
        for layout in ("tn", "nt")
        for dtype in ("bf16", "fp16")
        for out in ("fp32", "bf16")
        for batch in (7, 8)
        for m in (1, 2)
        for n in (3, 4)
        for k in (5, 6)
    }
    assert set(keys(load(tmp_path, text))) == expected
    assert len(expected) == 2**7


def test_duplicates_merge_and_the_larger_number_of_candidates_wins(tmp_path: Path) -> None:
    text = f"""{HEAD}candidates: 3
defaults: {{dtype: bf16, candidates: 4}}
gemms:
- {{m: [1, 1], n: 2, k: 3, candidates: 9}}
- {{mnk: [[1, 2, 3], [4, 5, 6]]}}
"""
    declared = load(tmp_path, text).declared
    assert [(d.problem.m, d.candidates) for d in declared] == [(1, 9), (4, 4)]


def test_counts_of_duplicates_add_up_and_one_is_taken_where_none_stands(tmp_path: Path) -> None:
    text = f"""{HEAD}
defaults: {{dtype: bf16}}
gemms:
- {{m: [1, 2], n: 8, k: 8, count: 5}}
- {{mnk: [[2, 8, 8]], count: 100}}
- {{mnk: [[2, 8, 8], [3, 8, 8]]}}
"""
    declared = load(tmp_path, text).declared
    assert [(d.problem.m, d.count) for d in declared] == [(1, 5), (2, 106), (3, 1)]


def test_scales_epilogues_and_groups_multiply_like_all_lists(tmp_path: Path) -> None:
    manifest = load(
        tmp_path,
        """version: 1
name: a
targets: [sm_100f]
defaults: {dtype: fp8_e4m3}
gemms:
- {scales: [none, fp32_row], epilogue: [none, bias], mnk: [[1, 2, 4]]}
- {scales: e8m0_1x32, layout: nt, mnk: [[1, 2, 4]]}
- {dtype: fp4_e2m1, scales: [e4m3_1x16, e8m0_1x16], out: fp8_e5m2, mnk: [[1, 2, 4]]}
- {op: grouped_mm, groups: [8, 16], mnk: [[1, 2, 4]]}
- {dtype: uint8, mnk: [[1, 2, 4]]}
""",
    )
    assert [declared.problem.key for declared in manifest.declared] == [
        "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/g8m1n2k4",
        "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/g16m1n2k4",
        "mm/nt/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32/m1n2k4",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e5m2/e4m3_1x16/m1n2k4",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e5m2/e8m0_1x16/m1n2k4",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/m1n2k4",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/bias/m1n2k4",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/m1n2k4",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias/m1n2k4",
        "mm/tn/uint8xuint8/int32/int32/m1n2k4",
    ]


def test_gemm_overrides_defaults_and_defaults_override_top_level(tmp_path: Path) -> None:
    text = f"""{HEAD}candidates: 3
defaults: {{dtype: bf16, layout: nn, out: fp32}}
gemms:
- {{mnk: [[1, 2, 3]]}}
- {{mnk: [[1, 2, 3]], layout: tt, out: fp16, dtype: fp16, candidates: 1}}
"""
    manifest = load(tmp_path, text)
    assert [(d.problem.signature.key, d.candidates) for d in manifest.declared] == [
        ("mm/nn/bf16xbf16/fp32/fp32", 3),
        ("mm/tt/fp16xfp16/fp32/fp16", 1),
    ]


def test_order_of_a_file_does_not_matter(tmp_path: Path) -> None:
    a = load(
        tmp_path,
        "version: 1\nname: a\ntargets: [sm_90a, sm_100f]\ndefaults: {dtype: [bf16, fp16]}\n"
        "gemms: [{m: [10, 9, 1], nk: [[64, 8], [8, 64]]}, {mnk: [[1, 1, 1]]}]\n",
    )
    b = load(
        tmp_path,
        "gemms: [{mnk: [[1, 1, 1]]}, {nk: [[8, 64], [64, 8]], m: [1, 9, 10]}]\n"
        "defaults: {dtype: [fp16, bf16]}\nname: a\ntargets: [sm_100f, sm_90a]\nversion: 1\n",
    )
    assert a == b


def test_problems_come_in_their_own_order(tmp_path: Path) -> None:
    text = gemm("op: bmm, dtype: [fp16, bf16], m: [10, 9], n: [100, 20], k: [7, 8], batch: [2, 1]")
    problems = [declared.problem for declared in load(tmp_path, text).declared]
    assert problems == sorted(problems)


def test_targets_are_sorted_merged_and_keep_their_device(tmp_path: Path) -> None:
    text = (
        "version: 1\nname: a\ngemms: [{dtype: bf16, mnk: [[1, 1, 1]]}]\n"
        "targets: [{arch: sm_90a, device: H200}, {arch: sm_100f, device: GB200}, "
        "{arch: sm_90a, devices: [H200]}]\n"
    )
    targets = load(tmp_path, text).targets
    assert [(t.target.arch, t.device.name) for t in targets] == [
        ("sm_100f", "GB200"),
        ("sm_90a", "H200"),
    ]


def test_a_target_is_of_a_platform_and_a_cuda_version(tmp_path: Path) -> None:
    text = (
        "version: 1\nname: a\ngemms: [{dtype: bf16, mnk: [[1, 1, 1]]}]\ntargets:\n"
        "- {arch: sm_100f, device: GB200}\n"
        "- {arch: sm_100f, device: GB200, platform: linux_x86_64}\n"
        "- {arch: sm_90a, cuda: cu12}\n- sm_90a\n- {arch: sm_90a, device: H100, cuda: cu12, "
        "platform: linux_aarch64}\n- sm_103a\n- {arch: sm_100a, platform: linux_aarch64}\n"
    )
    assert [(t.target.key, t.device.name) for t in load(tmp_path, text).targets] == [
        ("sm_100a-linux_aarch64-cu13", "GB200"),
        ("sm_100f-linux_aarch64-cu13", "GB200"),
        ("sm_100f-linux_x86_64-cu13", "GB200"),
        ("sm_103a-linux_x86_64-cu13", "GB300"),  # named by nobody, so it says nothing of the host
        ("sm_90a-linux_aarch64-cu12", "H100"),
        ("sm_90a-linux_x86_64-cu12", "H200"),
        ("sm_90a-linux_x86_64-cu12", "H100"),
        ("sm_90a-linux_x86_64-cu13", "H200"),
        ("sm_90a-linux_x86_64-cu13", "H100"),
    ]


def test_devices_are_ranked_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    text = gemm("dtype: bf16, mnk: [[1, 1, 1]]").replace(
        "[sm_90a]", "[{arch: sm_90a, devices: [H100, H200]}, {arch: sm_100f, devices: [GB200]}]"
    )
    manifest = load(tmp_path, text)
    assert [(t.target.key, t.device.name) for t in manifest.targets] == [
        ("sm_100f-linux_aarch64-cu13", "GB200"),
        ("sm_90a-linux_x86_64-cu13", "H100"),
        ("sm_90a-linux_x86_64-cu13", "H200"),
    ]
    assert [one.arch for one in manifest.bundle_targets] == ["sm_100f", "sm_90a"]


def test_description_becomes_one_line(tmp_path: Path) -> None:
    text = gemm("dtype: bf16, mnk: [[1, 1, 1]]") + "description: |\n  two\n  lines\n"
    assert load(tmp_path, text).description == "two lines"


def test_aliases_and_comments_are_read(tmp_path: Path) -> None:
    text = f"""{HEAD}gemms:
- {{dtype: bf16, m: &m [1, 2], nk: [[3, 4]], comment: "tp: 1"}}
- {{dtype: fp16, m: *m, nk: [[3, 4]]}}
"""
    assert len(load(tmp_path, text).declared) == 4


def test_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    text = gemm("dtype: bf16, mnk: [[1, 1, 1]]").replace("\n", "\r\n")
    assert load(tmp_path, b"\xef\xbb\xbf" + text.encode()).name == "a"


# One mistake each: what stands in the file, and below it where the message starts and what it says.

MISTAKES = """
layout: [tm], dtype: bf16, *
    4:20: gemms[0].layout[0]: found 'tm' ... did you mean 'tn'?
dtype: bfloat16, *
    4:18: gemms[0].dtype: found 'bfloat16' ... did you mean 'bf16'?
dtype: fp8, *
    4:18: gemms[0].dtype: found 'fp8' ... did you mean 'fp8_e4m3' or 'fp8_e5m2'?
op: [mm], dtype: bf16, *
    4:15: gemms[0].op: found a list of 1 ... mm, bmm, grouped_mm
dtype: bf16, m: true, n: 1, k: 1
    4:27: gemms[0].m: found true (a boolean) ... an integer in 1..2147483647
dtype: bf16, m: [1, '16'], n: 1, k: 1
    4:31: gemms[0].m[1]: found '16' ... did you mean 16, without quotes?
dtype: bf16, m: 16.0, n: 1, k: 1
    4:27: gemms[0].m: found 16.0 (a number with a fraction) ... did you mean 16?
dtype: bf16, m: 010, n: 1, k: 1
    4:27: gemms[0].m: found 010 (not a plain decimal integer) ... did you mean 10?
dtype: bf16, m: 1_000, n: 1, k: 1
    4:27: gemms[0].m: found 1_000 (not a plain decimal integer) ... did you mean 1000?
dtype: bf16, m: 1:30, n: 1, k: 1
    4:27: gemms[0].m: found 1:30 (not a plain decimal integer) ... list the values, as in [1, 2, 4]
dtype: bf16, m: 2147483648, n: 1, k: 1
    4:27: gemms[0].m: found 2147483648 ... an integer in 1..2147483647
dtype: bf16, m: , n: 1, k: 1
    4:27: gemms[0].m: found nothing ... an integer in 1..2147483647
dtype: bf16, m: [], n: 1, k: 1
    4:27: gemms[0].m: found an empty list ... at least one entry
dtype: bf16, m: 1, nk: 5
    4:34: gemms[0].nk: found 5 ... a list, each entry a pair [n, k]
dtype: bf16, m: 1, nk: [[1, 2], [1, 2, 3]]
    4:43: gemms[0].nk[1]: found a list of 3 ... a pair [n, k]
dtype: bf16
    4:10: gemms[0]: found no sizes ... 'm, n, k' or 'm, nk' or 'mnk'
dtype: bf16, m: 1, n: 2
    4:10: gemms[0]: found sizes m, n ... add k
dtype: bf16, m: 1, nk: [[1, 2]], mnk: [[1, 2, 3]]
    4:10: gemms[0]: found sizes m, nk, mnk ... 'm, n, k' or 'm, nk' or 'mnk'
*
    4:10: gemms[0]: found no key 'dtype', which is required here or under 'defaults'
op: bmm, dtype: bf16, *
    4:10: gemms[0]: found no key 'batch', which bmm requires ... add the number of matrices
dtype: bf16, m: 1, n: 2, k: 3, batch: 4
    4:42: gemms[0]: found key 'batch' with op mm ... with op bmm only
dtype: bf16, m: 1, n: 2, k: 3, comment: yes
    4:51: gemms[0].comment: found yes (a boolean) ... put text in quotes
dtype: bf16, m: 1, n: 2, k: 3, layuot: tn
    4:42: gemms[0]: found key 'layuot' ... did you mean 'layout'?
dtype: bf16, size: [[1, 2, 3]]
    4:24: gemms[0]: found key 'size' ... did you mean 'mnk' or 'nk'?
dtype: bf16, m: 1, n: 2, k: 3, accumulator: fp32
    4:42: gemms[0]: found key 'accumulator' ... there is no such key: sums are fp32 for floating
dtype: bf16, m: 1e3, n: 1, k: 1
    4:27: gemms[0].m: found '1e3' ... did you mean 1000?
dtype: bf16, m: '1, 2, 4', n: 1, k: 1
    4:27: gemms[0].m: found '1, 2, 4' ... list the values, as in [1, 2, 4]
dtype: bf16, m: 1..8, n: 1, k: 1
    4:27: gemms[0].m: found '1..8' ... list the values, as in [1, 2, 4]
dtype: bf16, layout: row, *
    4:32: gemms[0].layout: found 'row' ... a letter for A and one for B: t row-major, n column-major
dtype: fp4_e2m1, m: 1, n: 1, k: 2
    4:18: gemms[0].dtype: found 'fp4_e2m1' ... fp4_e2m1 needs scales (e8m0_1x32, e4m3_1x16,
dtype: fp8_e4m3, scales: e4m3_1x16, *
    4:36: gemms[0].scales: found 'e4m3_1x16' ... scales e4m3_1x16 are not for fp8_e4m3, but
dtype: fp8_e4m3, out: fp8_e4m3, scales: fp32_row, epilogue: bias, *
    4:33: gemms[0].out: found 'fp8_e4m3' ... scales fp32_row give no fp8_e4m3, but fp32, fp16,
dtype: fp8_e4m3, scales: fp32_row, layout: [tn, nn], *
    4:59: gemms[0].layout[1]: found 'nn' ... fp8_e4m3 with scales fp32_row has layout tn alone;
dtype: bf16, dtype_b: fp8_e4m3, *
    4:33: gemms[0].dtype_b: found 'fp8_e4m3' ... A is bf16 and B is fp8_e4m3, must be of one type,
dtype: fp8_e4m3, dtype_b: fp8_e5m2, layout: nn, *
    4:37: gemms[0].dtype_b: found 'fp8_e5m2' ... fp8 of two types has layout tn alone (here nn);
dtype: bf16, dtype_b: fp8_e4m3, out: int32, *
    4:33: gemms[0].dtype_b: found 'fp8_e4m3' ... A is bf16 and B is fp8_e4m3, must be of one type,
dtype: fp8_e4m3, dtype_b: fp8_e5m2, layout: nn, epilogue: swiglu_halves, m: 1, n: 2, k: 1
    4:37: gemms[0].dtype_b: found 'fp8_e5m2' ... fp8 of two types has layout tn alone (here nn)
dtype: fp8_e4m3, dtype_b: fp8_e5m2, out: int32, layout: nn, *
    4:18: gemms[0].dtype: found 'fp8_e4m3' ... fp8_e4m3 gives no int32, but fp32, fp16,
dtype: fp8_e5m2, b_dtype: fp8_e4m3, *
    4:28: gemms[0]: found key 'b_dtype' ... did you mean 'dtype_b'?
dtype: int8, epilogue: bias, *
    4:34: gemms[0].epilogue: found 'bias' ... no operator has an epilogue for int8; allowed here:
dtype: bf16, epilogue: bias_sigmoid, *
    4:34: gemms[0].epilogue: found 'bias_sigmoid' ... no kernel applies it: write 'epilogue: bias'
dtype: bf16, epilogue: swiglu, *
    4:34: gemms[0].epilogue: found 'swiglu' ... did you mean 'swiglu_halves' or 'swiglu_interleaved'
dtype: bf16, epilogue: swiglu_oai_halves, layout: tt, m: 1, n: 2, k: 1
    4:34: gemms[0].epilogue: found 'swiglu_oai_halves' ... B column-major alone, layout tn or nn
dtype: bf16, epilogue: geglu_halves, mnk: [[1, 31, 1]]
    4:58: gemms[0].mnk[0][1]: found 31 ... with epilogue 'geglu_halves': a multiple of 2
op: bmm, batch: 2, dtype: bf16, epilogue: swiglu_halves, m: 1, n: 2, k: 1
    4:53: gemms[0].epilogue: found 'swiglu_halves' ... bmm has no gated epilogue
dtype: fp8_e4m3, epilogue: swiglu_halves, m: 1, n: 2, k: 1
    4:38: gemms[0].epilogue: found 'swiglu_halves' ... swiglu_halves takes no fp8_e4m3, but fp16
dtype: fp4_e2m1, scales: e4m3_1x16, mnk: [[1, 1, 31]]
    4:60: gemms[0].mnk[0][2]: found 31 ... k counts values, not bytes
op: grouped_mm, dtype: bf16, groups: 8, layout: nt, *
    4:59: gemms[0].layout: found 'nt' ... has layout tn or tt alone (here nt); allowed here: tn, tt
op: gathered_grouped_mm, groups: 8, dtype: fp8_e4m3, *
    4:15: gemms[0].op: found 'gathered_grouped_mm' ... takes no fp8_e4m3, but fp16, bf16
op: gathered_grouped_mm, groups: 8, dtype: bf16, epilogue: add, *
    4:70: gemms[0].epilogue: found 'add' ... the epilogue bias, and gated ones other than gradients
op: gathered_grouped_mm, groups: 8, dtype: bf16, epilogue: swiglu_halves_gradient, *
    4:70: gemms[0].epilogue: found 'swiglu_halves_gradient' ... gated ones other than gradients
op: gathered_grouped_mm, dtype: bf16, *
    4:10: gemms[0]: found no key 'groups', which gathered_grouped_mm requires
op: _grouped_mm, groups: 2, dtype: bf16, *
    4:15: gemms[0].op: found '_grouped_mm' ... did you mean 'grouped_mm'
op: addmm, dtype: bf16, *
    4:15: gemms[0].op: found 'addmm' ... write 'op: mm' with an epilogue: bias adds a row, add a
dtype: nvfp4, *
    4:18: gemms[0].dtype: found 'nvfp4' ... write 'dtype: fp4_e2m1' with 'scales: e4m3_1x16'
dtype: bf16, m: !!python/object:os.x {a: 1}, n: 1, k: 1
    4:27: gemms[0].m: found !!python/object:os.x (a tagged value) ... remove the tag
dtype: !dtype bf16, *
    4:18: gemms[0].dtype: found bf16 (tag !dtype) ... remove the tag
dtype: bf16, m: 1, n: 2, k: 3, comment: ''
    4:51: gemms[0].comment: found '' ... remove the key or write a text
dtype: bf16, m: 1, n: 2, k: 3, <<: {m: 1}
    4:42: gemms[0]: found key '<<' ... merge keys are not supported: put shared keys under
dtype: bf16, m: 1, n: 2, k: 3, m: 4
    4:42: gemms[0]: found key 'm' again (first on line 4) ... merge or remove one of them
dtype: bf16, m: 1, n: 2, k: 3, 4: 5
    4:42: gemms[0]: found key 4 (a number) ... a plain word
"""


def cases(table: str) -> list[tuple[str, ...]]:
    lines = table.strip("\n").splitlines()
    return [(what, *said.strip().split(" ... ")) for what, said in zip(lines[::2], lines[1::2])]


@pytest.mark.parametrize("case", cases(MISTAKES), ids=lambda case: case[0])
def test_names_position_finding_allowance_and_likely_meaning(
    tmp_path: Path, case: tuple[str, ...]
) -> None:
    fields, place, *facts = case
    [line] = mistakes(tmp_path, gemm(fields.replace("*", "m: 1, n: 1, k: 1")))
    assert line.startswith(f"x.yaml:{place}")
    assert all(fact in line for fact in facts), line


TAIL = "gemms: [{dtype: bf16, mnk: [[1, 1, 1]]}]\n"
TOP_MISTAKES = """
no version
    1:1: top level: found no key 'version', which is required ... add 'version: 1'
version: '1'
    1:10: version: found '1' ... did you mean 1, without quotes?
no name
    1:1: top level: found no key 'name', which is required
name: My Model
    2:7: name: found 'My Model' ... did you mean 'my-model'?
no targets
    1:1: top level: found no key 'targets', which is required
targets: []
    3:10: targets: found an empty list ... at least one entry
targets: sm_90a
    3:10: targets: found 'sm_90a' ... did you mean [sm_90a]?
targets: [sm100]
    3:11: targets[0]: found 'sm100' ... did you mean 'sm_100f' or 'sm_100a'?
targets: [{device: B200}]
    3:11: targets[0]: found no key 'arch', which is required
targets: [{arch: sm_90a, device: h200}]
    3:34: targets[0].device: found 'h200' ... did you mean 'H200'?
targets: [{arch: sm_100f, device: H200}]
    3:35: targets[0].device: found 'H200' ... target sm_100f: device H200 has compute capability
targets: [{arch: sm_90a, platform: linux}]
    3:36: targets[0].platform: found 'linux' ... allowed: linux_x86_64, linux_aarch64
targets: [{arch: sm_90a, cuda: 12}]
    3:32: targets[0].cuda: found 12 ... allowed: cu13, cu12 ... 'cu12'
targets: [sm_90a, {arch: sm_90a, device: H100}]
    3:42: targets[1].device: found device H100 for sm_90a ... devices H200, H100; ... [H200, H100]
targets: [{arch: sm_90a, devices: [H100, H200]}, {arch: sm_90a, devices: [H200, H100]}]
    3:74: targets[1].devices: found devices H200, H100 ... which targets[0] builds for devices H100
targets: [{arch: sm_90a, device: H200, devices: [H100]}]
    3:40: targets[0]: found keys 'device' and 'devices'; allowed: one of them; list all in 'devices'
targets: [{arch: sm_90a, devices: []}]
    3:35: targets[0].devices: found an empty list; allowed: at least one entry
targets: [{arch: sm_90a, devices: H100}]
    3:35: targets[0].devices: found 'H100'; allowed: a list; did you mean [H100]?
targets: [{arch: sm_90a, devices: [H100, H100]}]
    3:42: targets[0].devices[1]: found 'H100' again; allowed: each device once; remove it
targets: [{arch: sm_90a, devices: [H100, h20]}]
    3:42: targets[0].devices[1]: found 'h20' ... did you mean 'H200'?
targets: [{arch: sm_90a, devices: [H100, B200]}]
    3:35: targets[0].devices: found 'H100', 'B200'; ... device B200 has compute capability 10.0 and
targets: [{arch: sm_100f, devices: [B200, GB200]}]
    3:36: targets[0].devices: found 'B200', 'GB200'; ... different host platforms ... one platform
targets: [{arch: sm_100f, devices: [B200, GB200], platform: linux_aarch64}]
    3:36: targets[0].devices: found 'B200', 'GB200'; ... different host platforms ... one platform
targets: [{arch: sm_90a, gpus: [H100]}]
    3:26: targets[0]: found key 'gpus' ... did you mean 'devices'?
no gemms
    1:1: top level: found no key 'gemms', which is required
gemms: {m: 1}
    4:8: gemms: found a mapping ... start each entry with "- "
gemms: [foo]
    4:9: gemms[0]: found 'foo'
dtype: bf16
    5:1: top level: found key 'dtype' ... it belongs under 'defaults' or in the entries of 'gemms'
defaults: {m: 1}
    5:12: defaults: found key 'm' ... sizes belong in the entries of 'gemms'
name: 8
    2:7: name: found 8 ... put text in quotes
!x comment: 1
    5:1: top level: found key comment (tag !x) ... remove the tag
"""


@pytest.mark.parametrize("case", cases(TOP_MISTAKES), ids=lambda case: case[0])
def test_names_mistakes_of_the_top_level(tmp_path: Path, case: tuple[str, ...]) -> None:
    """Each is a line instead of the one of its key; ``no KEY`` takes that away."""
    changed, place, *facts = case
    lines = {line.partition(":")[0]: line for line in (HEAD + TAIL).splitlines()}
    lines[changed.partition(":")[0]] = changed
    lines.pop(lines.pop(changed).removeprefix("no ") if changed.startswith("no ") else "", None)
    [line] = mistakes(tmp_path, "\n".join(lines.values()))
    assert line.startswith(f"x.yaml:{place}")
    assert all(fact in line for fact in facts), line


def test_a_list_of_numbers_in_place_of_pairs_is_a_mistake_each(tmp_path: Path) -> None:
    lines = mistakes(tmp_path, gemm("dtype: bf16, m: 1, nk: [4096, 512]"))
    assert [line.split(";")[1] for line in lines] == [" allowed: a pair [n, k]"] * 2


def test_a_number_of_thousands_of_digits_is_shown_cut_off(tmp_path: Path) -> None:
    [line] = mistakes(tmp_path, gemm(f"dtype: bf16, m: {'9' * 5000}, n: 1, k: 1"))
    assert f"found {'9' * 37}... (too long); allowed: {EXTENT}" in line


def test_another_version_is_the_only_mistake(tmp_path: Path) -> None:
    [line] = mistakes(tmp_path, "version: 2\nnom: a\n")
    assert line.startswith("x.yaml:1:10: version: found 2; allowed: 1; this nvgemm-aot supports no")


@pytest.mark.parametrize("wrong", ["gems", "Gemms", "problems"])
def test_checks_what_stands_under_a_misspelt_key(tmp_path: Path, wrong: str) -> None:
    text = f"{HEAD}{wrong}:\n- {{dtype: int4, m: 1}}\n"
    first, second, third = mistakes(tmp_path, text)
    assert first == (
        f"x.yaml:4:1: top level: found key {wrong!r}; allowed: {TOP_KEYS}; did you mean 'gemms'?"
    )
    assert second == f"x.yaml:5:3: gemms[0]: found sizes m; allowed: {WAYS}; add n and k or nk"
    assert third.startswith("x.yaml:5:11: gemms[0].dtype: found 'int4'; ")


def test_checks_several_misspelt_keys_at_once(tmp_path: Path) -> None:
    text = (
        "version: 1\nnames: A\ntarget: [sm_90b]\ndefault: {dtype: bf17}\n"
        "gems:\n- {m: 0, n: 2, k: 3}\n"
    )
    places = [line.split(": ")[0].removeprefix("x.yaml:") for line in mistakes(tmp_path, text)]
    assert places == ["2:1", "2:8", "3:1", "3:10", "4:1", "4:18", "5:1", "6:7"]


def test_misspelt_version_is_still_another_version(tmp_path: Path) -> None:
    lines = mistakes(tmp_path, "Version: 2\nnom: a\n")
    assert [line.split(";")[0] for line in lines] == ["x.yaml:1:10: version: found 2"]


@pytest.mark.parametrize("key", ["gems", "widgets"])
def test_key_that_means_none_that_is_missing_is_only_a_wrong_key(tmp_path: Path, key: str) -> None:
    (line,) = mistakes(tmp_path, f"{HEAD}{TAIL}{key}: [1]\n")
    assert line.startswith(f"x.yaml:5:1: top level: found key {key!r}; ")


@pytest.mark.parametrize(
    ("dtype", "outs"),
    [
        *((dtype, FLOAT_OUTS) for dtype in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")),
        ("int8", "int32, fp32, int8"),
    ],
)
def test_allows_the_results_that_operators_have_for_the_input(
    tmp_path: Path, dtype: str, outs: str
) -> None:
    for out in OUTS.split(", "):
        text = gemm(f"dtype: {dtype}, out: {out}, mnk: [[1, 2, 3]]")
        if out in outs.split(", "):
            assert load(tmp_path, text).declared[0].problem.signature.out.value == out
        else:
            (line,) = mistakes(tmp_path, text)
            assert f"gemms[0].out: found {out!r}; {dtype} gives no {out}" in line
            assert sorted(line.rpartition("here: ")[2].split(", ")) == sorted(outs.split(", "))


def test_a_wrong_result_of_the_defaults_is_reported_there_unless_a_gemm_adds_to_it(
    tmp_path: Path,
) -> None:
    text = f"""{HEAD}defaults: {{dtype: int8, out: bf16}}
gemms:
- {{mnk: [[1, 1, 1]]}}
- {{mnk: [[2, 2, 2]]}}
- {{mnk: [[2, 2, 2]], out: int32}}
- {{mnk: [[2, 2, 2]], dtype: [bf16, int8]}}
"""
    at_defaults, at_gemm = mistakes(tmp_path, text)
    assert at_defaults.startswith("x.yaml:4:30: defaults.out: found 'bf16'; int8 gives no bf16")
    assert at_gemm.startswith("x.yaml:9:3: gemms[3]: found 'bf16' of 'defaults' for out; int8")


def test_bmm_in_defaults_requires_batch(tmp_path: Path) -> None:
    text = f"{HEAD}defaults: {{op: bmm, dtype: bf16}}\ngemms:\n- {{mnk: [[1, 1, 1]]}}\n"
    assert [line[:20] for line in mistakes(tmp_path, text)] == ["x.yaml:6:3: gemms[0]"]


def test_reports_all_mistakes_at_once_by_position(tmp_path: Path) -> None:
    text = textwrap.dedent("""\
        version: 1
        name: Bad
        targets: [sm100, sm_90a]
        defaults: {dtype: float16}
        gemms:
          - {m: 1, n: 2}
          - {mnk: [[1, 2, 0]], layout: [tn, xx], m: 3}
          - {mnk: [[1, 2, 3]], mnk: [[1, 2, 3]]}
        """)
    places = [line.split(": ")[0] for line in mistakes(tmp_path, text)]
    assert places == [
        f"x.yaml:{place}" for place in ("2:7", "3:11", "4:19", "6:5", "7:5", "7:19", "7:37", "8:24")
    ]


# Files that are no manifest.


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.yaml", r"absent\.yaml: no such file"),
        ("", "this is a directory"),
        ("a\0b", "cannot read it"),
    ],
)
def test_refuses_what_is_no_file(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        load_manifest(tmp_path / name)


def test_a_name_of_nothing_is_an_error_with_the_names_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = r"llama-3\.1-8c: no such file; .*llama-3\.1-8b, .*qwen3-8b"
    with pytest.raises(ManifestError, match=said):
        find_manifest(Path("llama-3.1-8c"))
    assert find_manifest(Path("qwen3-8b")) == find_manifest(Path("qwen3-8b.yaml"))
    assert find_manifest(tmp_path / "qwen3-8b") == tmp_path / "qwen3-8b"


def test_reports_an_operating_system_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(source, "read_start", refuse)
    with pytest.raises(ManifestError, match=r"x\.yaml: cannot read it: Permission denied"):
        load_manifest(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n...\n", "--- # x\n"])
def test_refuses_empty_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ManifestError, match="the file is empty; allowed: a mapping"):
        load(tmp_path, text)


def test_refuses_file_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="over 4194304 bytes"):
        load(tmp_path, b"#" * (source.MAX_FILE_BYTES + 1))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            b"version: 1\n# \xc3\xa9 caf\xe9\n",
            "2:8: found byte 0xe9; allowed: UTF-8; save the file as UTF-8",
        ),
        (
            "version: 1".encode("utf-16"),
            "1:1: found byte 0xff; allowed: UTF-8; save the file as UTF-8",
        ),
        (
            b"version: 1\nname: \x07",
            "2:7: found character '\\x07', which YAML does not allow; remove it",
        ),
        (b"--- {}\n--- {}\n", "2:1: found a second YAML document; allowed: one per file"),
        (
            b"- 1\n",
            "1:1: top level: found a list; allowed: a mapping that starts with 'version: 1'",
        ),
        (
            b"\nhello\n",
            "2:1: top level: found a single value; allowed: a mapping that starts with "
            "'version: 1'",
        ),
        (b"a: [1\n", "2:1: not valid YAML: while parsing a flow sequence, "),
        (b"a:\n\tb: 1\n", "2:1: not valid YAML: while scanning for the next token, "),
        (b"a: *b\n", "1:4: not valid YAML: found undefined alias 'b'"),
        (
            b"version: 1\nx: &x [*x]\n",
            "2:4: found over 32 levels of nesting, or a recursive alias; write out the value",
        ),
    ],
)
def test_refuses_what_is_no_manifest(tmp_path: Path, data: bytes, expected: str) -> None:
    [line] = mistakes(tmp_path, data)
    assert line.startswith(f"x.yaml:{expected}")
    assert line.endswith("indent with spaces") is (b"\t" in data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('a: "\\UFFFFFFFF"\n', "not valid YAML"),
        ("x: " + "[" * 2999, "found far more than 32 levels of nesting"),
    ],
    ids=["escape", "depth"],
)
@pytest.mark.parametrize("has_libyaml", [False, yaml.__with_libyaml__])
def test_refuses_what_the_parser_itself_trips_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_libyaml: bool, text: str, said: str
) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", has_libyaml)
    (line,) = mistakes(tmp_path, text)
    assert line.startswith("x.yaml:1:")
    assert said in line


@pytest.mark.parametrize("key", ['"\\ud800"', '"\\0"', "!%0a x", "! x"])
def test_message_stays_on_one_line_and_can_be_written(tmp_path: Path, key: str) -> None:
    (line,) = mistakes(tmp_path, f"{HEAD}{TAIL}{key}: {key}\n")
    assert line.encode().startswith(b"x.yaml:5:")


def test_refuses_alias_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_VALUES", 10_000)
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    (line,) = mistakes(tmp_path, "\n".join(lines))
    assert "found over 10000 values after alias expansion" in line


def test_allows_as_many_problems_as_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_PROBLEMS", 6)
    assert len(load(tmp_path, gemm("dtype: bf16, m: [1, 2, 3], n: [1, 2], k: 1")).declared) == 6
    with pytest.raises(ManifestError, match="found 8 problems"):
        load(tmp_path, gemm("dtype: bf16, m: [1, 2, 3, 4], n: [1, 2], k: 1"))


def test_counts_problems_before_it_looks_at_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_PROBLEMS", 100)
    looked: list[object] = []
    monkeypatch.setattr(manifest_module, "GemmRules", looked.append)
    entries = "\n".join(f"- {{m: {m}, n: 16, k: 16, bad: 1}}" for m in range(1, 112))
    assert mistakes(tmp_path, f"{HEAD}defaults: {{dtype: bf16}}\ngemms:\n{entries}\n") == [
        "x.yaml:106:3: gemms[100]: found 101 problems up to here, 1 of them in this entry; "
        "allowed: at most 100 in a manifest; shorten its lists or split the manifest"
    ]
    assert not looked


def test_counts_what_entries_take_from_the_defaults_and_by_alias(tmp_path: Path) -> None:
    numbers = list(range(1, 401))
    text = f"""{HEAD}defaults: {{dtype: [bf16, fp16]}}
gemms:
- {{m: &many {numbers}, n: *many, k: 3, dtype: bf16}}
- {{m: *many, n: *many, k: 3, out: [bf16]}}
"""
    (line,) = mistakes(tmp_path, text)
    assert "gemms[0]: found 160000 problems up to here, 160000 of them in this entry" in line
    fewer = text.replace(str(numbers), str(numbers[:250]))
    (line,) = mistakes(tmp_path, fewer)
    assert "gemms[1]: found 187500 problems up to here, 125000 of them in this entry" in line


# libyaml's parser and PyYAML's own.


@pytest.mark.parametrize("has_libyaml", [False, yaml.__with_libyaml__])
def test_either_parser_reads_the_same_and_finds_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_libyaml: bool
) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", has_libyaml)
    manifest = load(tmp_path, gemm("dtype: bf16, m: [1, 2], nk: [[3, 4]], comment: 'é'"))
    assert [declared.problem.m for declared in manifest.declared] == [1, 2]
    wrong = "a: é\ngemms: [{m: [1, x], <<: 1}, !x {}]\n"
    places = [line.split(": ")[0].removeprefix("x.yaml:") for line in mistakes(tmp_path, wrong)]
    assert places == ["1:1", "1:1", "1:1", "1:1", "2:9", "2:9", "2:17", "2:21", "2:29"]


def test_file_that_can_be_read_once_only_is_read_once(tmp_path: Path) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        pipe.write(gemm("dtype: bf16, m: 0, n: 1, k: 1"))
    try:
        with pytest.raises(ManifestError, match="found 0; allowed: an integer"):
            load_manifest(Path(f"/dev/fd/{read}"))
    finally:
        os.close(read)


# The JSON Schema.


def test_json_schema_names_every_key_with_a_description() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["version", "name", "targets", "gemms"]
    parts: dict[tuple[str, ...], Any] = {(): schema}
    for place, name in (("targets", "Target"), ("defaults", "Shared"), ("gemms", "Gemm")):
        parts[place,] = schema["$defs"][f"{name}Entry"]
    for location, part in parts.items():
        assert part["additionalProperties"] is False
        assert tuple(part["properties"]) == allowed_keys(location)
        assert all(value.get("description") for value in part["properties"].values())


def test_json_schema_allows_a_scalar_or_a_list() -> None:
    gemm_schema = json_schema()["$defs"]["GemmEntry"]["properties"]
    item = {"type": "string", "enum": ["tn", "tt", "nn", "nt"]}
    assert gemm_schema["layout"]["anyOf"] == [
        item,
        {"type": "array", "items": item, "minItems": 1},
    ]
    for key in ("dtype", "dtype_b", "out", "m", "n", "k", "batch"):
        scalar, listed = gemm_schema[key]["anyOf"]
        assert listed["items"] == scalar
    assert "anyOf" not in gemm_schema["nk"]
    assert gemm_schema["nk"]["items"]["type"] == "array"
    assert gemm_schema["dtype"]["anyOf"][0]["enum"] == DTYPES.split(", ")
    assert gemm_schema["out"]["anyOf"][0]["enum"] == OUTS.split(", ")
    assert json_schema()["properties"]["targets"]["items"]["anyOf"][0]["enum"]


def test_json_schema_asks_for_exactly_one_way_of_sizes() -> None:
    ways = json_schema()["$defs"]["GemmEntry"]["oneOf"]
    assert [way["required"] for way in ways] == [["m", "n", "k"], ["m", "nk"], ["mnk"]]


@settings(max_examples=200)
@given(name=st.from_regex(NAME_PATTERN, fullmatch=True))
def test_every_name_is_fit_for_a_wheel(name: str) -> None:
    assert canonicalize_name(f"nvgemm-kernels-{name}", validate=True)
    assert canonicalize_name(name, validate=True)


@pytest.mark.parametrize("name", ["-a", "a-", ".a", "a.", "a_b", "a b", "A", "é", "a/b", "a" * 65])
def test_refuses_a_name_unfit_for_a_wheel(tmp_path: Path, name: str) -> None:
    (line,) = mistakes(tmp_path, f"version: 1\nname: {name}\ntargets: [sm_90a]\n{TAIL}")
    assert line.startswith(f"x.yaml:2:7: name: found {name[:57]!r}")


@pytest.mark.parametrize("module", ["manifest.parse", "verify.bundle"])
def test_importing_loads_neither_torch_nor_a_compiler(module: str) -> None:
    code = (
        f"import sys, nvgemm_aot.{module}; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'cutlass', 'tvm_ffi')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Anything at all.

_dtypes = st.sampled_from([d for d in DTYPES.split(", ") if d != "fp4_e2m1"])  # needs scales
_sizes = st.integers(1, MAX_EXTENT)


def _some(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return item | st.lists(item, min_size=1, max_size=3)


@settings(max_examples=60)
@given(
    dtype=_some(_dtypes),
    layout=_some(st.sampled_from(["tn", "tt", "nn", "nt"])),
    m=_some(_sizes),
    nk=st.lists(st.tuples(_sizes, _sizes).map(list), min_size=1, max_size=3),
    candidates=st.integers(1, 128),
    flow=st.booleans(),
)
def test_loads_what_was_declared(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: Any,
    layout: Any,
    m: Any,
    nk: list[list[int]],
    candidates: int,
    flow: bool,
) -> None:
    entry = {"dtype": dtype, "layout": layout, "m": m, "nk": nk, "candidates": candidates}
    document = {"version": 1, "name": "a", "targets": ["sm_100f"], "gemms": [entry]}
    text = yaml.safe_dump(document, default_flow_style=flow)
    manifest = load(tmp_path_factory.mktemp("m"), text)

    def listed(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    expected = {
        (d, lay, rows, n, k)
        for d in listed(dtype)
        for lay in listed(layout)
        for rows in listed(m)
        for n, k in nk
    }
    problems = [declared.problem for declared in manifest.declared]
    found = {(p.signature.a.value, p.signature.layout.value, p.m, p.n, p.k) for p in problems}
    assert found == expected
    assert len(problems) == len(expected)
    assert {declared.candidates for declared in manifest.declared} == {candidates}


_words = st.sampled_from(
    [*GEMM_KEYS.split(", "), *TOP_KEYS.split(", "), "arch", "device", "sm_90a", "bf16", "tn", "bmm"]
)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _words
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_words | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(changes=st.dictionaries(_words, _values, max_size=3), first=_values)
def test_random_documents_raise_nothing_but_manifest_errors(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], first: Any
) -> None:
    document = {"version": 1, "name": "a", "targets": ["sm_90a"], "gemms": [first], **changes}
    directory = tmp_path_factory.mktemp("f")
    try:
        load(directory, yaml.safe_dump(document, allow_unicode=True))
    except ManifestError as error:
        str(error).encode()


@settings(max_examples=150)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *("version: 1", "\n", "\n  ", "- ", "gemms:", "{", "}", "[", "]", ":", "? ", ", "),
                *("&a ", "*a", "!!int ", "!x ", "!%0a ", "|", ">-", '"', "'", "\\U", "\\ud800"),
                *("%YAML 1.1", "---", "<<: ", "m", "1", "0x1", "1e3", ".inf", "~", "\t", "#", "%"),
                *("@", "\ufeff", "é", "="),
            ]
        ),
        max_size=25,
    )
)
def test_random_text_raises_nothing_but_manifest_errors(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("t")
    try:
        load(directory, "".join(pieces))
    except ManifestError as error:
        str(error).encode()
