from __future__ import annotations

from dataclasses import replace

import pytest

from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.measured_rankings import rankings_document, rankings_text
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.matching.device import NO_CUDA, TorchVersions
from synthetic_content import synthetic_content

SAME = TorchVersions(torch="2.11.1+cu130", cuda="13.0")


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    """Four problems: two were measured on a B200 with torch 2.11 and CUDA 13.0."""
    path = tmp_path_factory.mktemp("measured") / "some.nvgemm"
    write_bundle(path, synthetic_content(kernels=3, problems=4))
    with Bundle(path) as bundle:
        return bundle.header


@pytest.mark.parametrize(
    ("versions", "counting", "others"),
    [
        (SAME, 2, {}),
        (replace(SAME, torch="2.13.0+cu130"), 0, {"torch 2.11, CUDA 13.0": 2}),
        (replace(SAME, cuda="13.2"), 0, {"torch 2.11, CUDA 13.0": 2}),
        (TorchVersions(torch="2.11.0+cpu", cuda=NO_CUDA), 2, {}),
        (TorchVersions(torch="2.13.0+cpu", cuda=NO_CUDA), 0, {"torch 2.11, CUDA 13.0": 2}),
        (None, 2, {}),
    ],
)
def test_rankings_count_beside_the_torch_that_they_were_measured_with(
    header: Header, versions: TorchVersions | None, counting: int, others: dict[str, int]
) -> None:
    found = rankings_document([header], (), versions)
    assert found == {"counting": counting, "measured_with": others}


def test_measurements_of_other_products_are_left_out(header: Header) -> None:
    assert rankings_document([header], {"NVIDIA B200"}, SAME)["counting"] == 2
    assert rankings_document([header], {"NVIDIA H200"}, SAME)["counting"] == 0


def test_text_names_both_torches_and_what_to_do() -> None:
    text = rankings_text({"counting": 1, "measured_with": {"torch 2.11, CUDA 13.0": 2}}, "2.13.0")
    assert text == (
        "1 problem with this torch; 2 problems with torch 2.11, CUDA 13.0, not used with the "
        "installed torch 2.13.0 but under max-autotune; install that torch, or on the GPU run: "
        "nvgemm-aot tune"
    )
    none = rankings_text({"counting": 0, "measured_with": {}}, "2.13.0")
    assert none.startswith("none: plain torch.compile uses no bundled kernel")
