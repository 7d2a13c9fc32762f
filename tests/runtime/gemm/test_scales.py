from __future__ import annotations

import pytest

from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.gemm.scales import ScaleRecipe, swizzled_elements


@pytest.mark.parametrize(
    ("recipe", "rows", "k", "elements"),
    [
        (ScaleRecipe.E8M0_1X32, 1, 32, 128 * 4),
        (ScaleRecipe.E8M0_1X32, 128, 128, 128 * 4),
        (ScaleRecipe.E8M0_1X32, 129, 128, 256 * 4),
        (ScaleRecipe.E8M0_1X32, 128, 160, 128 * 8),
        (ScaleRecipe.E8M0_1X32, 128, 130, 128 * 8),
        (ScaleRecipe.E4M3_1X16, 128, 128, 128 * 8),
        (ScaleRecipe.E8M0_1X16, 300, 1000, 384 * 64),
    ],
)
def test_swizzled_scales_are_padded_to_whole_blocks(
    recipe: ScaleRecipe, rows: int, k: int, elements: int
) -> None:
    assert swizzled_elements(recipe, rows, k) == elements


@pytest.mark.parametrize("recipe", list(ScaleRecipe))
def test_names_say_type_and_block(recipe: ScaleRecipe) -> None:
    kind, extent = recipe.value.split("_")
    assert recipe.dtype.value.removeprefix("fp8_") == kind
    assert recipe.is_swizzled is extent.startswith("1x")
    assert recipe.block == (int(extent.removeprefix("1x")) if recipe.is_swizzled else None)
    assert (recipe.dtype is DType.FP32) is not recipe.is_swizzled
