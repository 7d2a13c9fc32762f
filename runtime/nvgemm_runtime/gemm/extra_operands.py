"""GEMM operands besides A and B: scales, group ends, gathered rows and epilogue operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import NoKernelError
from .epilogues import ADD, Activation, Addend, Epilogue, addend_dtype, find_epilogue
from .roles import SUMMED_COLUMNS, Role, sum_parts
from .types import SWIZZLED_ALIGNMENT_BYTES, DType, ScaleRecipe, swizzled_elements

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .problem import Signature


class ExtraOperands(NamedTuple):
    """Operands besides A and B; None for the absent ones.

    Tensors come first, in `nvgemm_runtime.gemm.roles.extra_roles` order. A named tuple, because
    each eager call builds one, and a frozen dataclass takes longer.

    Attributes:
        scale_a, scale_b: Scale factors. Swizzled scales have any shape, see
            `nvgemm_runtime.gemm.types.swizzled_elements`. Row scales are [m, 1] and [1, n]; with
            offsets, [m] and [groups, n].
        offsets: Group ends along m, or along k: int32 [groups].
        rows: For each element in A, the row in B that it multiplies: int32, A's shape. With
            offsets, for each result row, its row in A: int32 [m].
        addend: Tensor added to the product: [n], [1, n], or the result's shape, with stride 0 if
            one row serves all; with offsets [groups, n], one row per group. For a gate's gradient,
            the kept product [m, 2 n]. For ups, the gates [m, n].
        sums: Destination for a gradient's row sums, zero-initialised: fp32 [m, parts], see
            `nvgemm_runtime.gemm.roles.SUMMED_COLUMNS`.
        recipe: Scale recipe; None derives it from scale dtype and size, as torch does.
        adds_matrix: With offsets, True if the addend is a matrix [m, n] instead of one row per
            group. Shapes cannot distinguish them if there are as many groups as rows.
        activation: Function applied to the sum.
        gated: Gated epilogue, if any; it includes its own activation.
    """

    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    recipe: ScaleRecipe | None = None
    adds_matrix: bool = False
    activation: Activation | None = None
    gated: Epilogue | None = None

    @classmethod
    def for_signature(
        cls, signature: Signature, tensors: Mapping[Role, torch.Tensor]
    ) -> ExtraOperands:
        """Picks a signature's extra operands from tensors by role."""
        epilogue = signature.epilogue
        return cls(
            scale_a=tensors.get(Role.SCALE_A),
            scale_b=tensors.get(Role.SCALE_B),
            # Explicit, because two recipes can have equal scale shapes.
            recipe=signature.scales,
            offsets=tensors.get(Role.OFFSETS),
            rows=tensors.get(Role.ROWS),
            addend=tensors.get(Role.ADDEND),
            sums=tensors.get(Role.SUMS),
            adds_matrix=signature.op.has_groups and epilogue is ADD,
            activation=epilogue.activation if epilogue and not signature.is_gated else None,
            gated=epilogue if signature.is_gated else None,
        )

    @property
    def groups(self) -> int | None:
        """Number of groups; None without one-dimensional offsets."""
        if self.offsets is None or self.offsets.dim() != 1:
            return None
        return int(self.offsets.shape[0])

    @property
    def gathered_rows(self) -> int | None:
        """Number of gathered rows, one per result row; None if no rows are gathered."""
        if self.rows is None or self.offsets is None or self.rows.dim() != 1:
            return None
        return int(self.rows.shape[0])

    def tensors(self) -> list[torch.Tensor]:
        """Returns the present tensors in `nvgemm_runtime.gemm.roles.extra_roles` order."""
        return [tensor for tensor in self[:TENSORS] if tensor is not None]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Present tensors by role name."""
        fields = zip(self._fields, self[:TENSORS])
        return {name: tensor for name, tensor in fields if tensor is not None}


TENSORS = 6
"""Number of `ExtraOperands` fields that are tensors; settings follow."""


NO_EXTRAS = ExtraOperands()
"""Empty extras, for plain mm and bmm."""


def read_scales(
    extras: ExtraOperands, operand: DType, m: int, n: int, k: int, groups: int | None = None
) -> ScaleRecipe | None:
    """Returns the recipe that the scales for A [m, k] and B [k, n] follow; None without scales.

    With ``groups``, B has that many matrices, and row scales are [m] and [groups, n].

    Raises:
        NoKernelError: If no recipe has scales with such dtypes or sizes.
        ValueError: If only one scale tensor is given.
    """
    scale_a, scale_b = extras.scale_a, extras.scale_b
    if scale_a is None and scale_b is None:
        return None
    if scale_a is None or scale_b is None:
        raise ValueError(f"scale_{'b' if scale_b is None else 'a'} is missing: both are needed")
    if scale_a.dtype != scale_b.dtype:
        raise NoKernelError(f"scales have different dtypes ({scale_a.dtype} and {scale_b.dtype})")
    if extras.recipe is not None:
        _check_scales(extras.recipe, scale_a, scale_b, m, n, k, groups)
        return extras.recipe
    # If several recipes fit the sizes, torch assumes the first in this order.
    candidates = [
        recipe
        for recipe in ScaleRecipe
        if operand in recipe.row.operands
        and (groups is None or recipe is ScaleRecipe.FP32_ROW)
        and str(scale_a.dtype) == f"torch.{recipe.dtype.torch_name}"
    ]
    if not candidates:
        raise NoKernelError(f"no kernel scales {operand.value} with {scale_a.dtype}")
    reasons: dict[str, None] = {}  # in order, each once
    for recipe in candidates:
        try:
            _check_scales(recipe, scale_a, scale_b, m, n, k, groups)
        except NoKernelError as error:
            reasons[str(error)] = None
        else:
            return recipe
    raise NoKernelError("; or ".join(reasons))


def _check_scales(
    recipe: ScaleRecipe,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    m: int,
    n: int,
    k: int,
    groups: int | None,
) -> None:
    for name, scale, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, n)):
        if str(scale.dtype) != f"torch.{recipe.dtype.torch_name}":
            raise NoKernelError(
                f"{name} is {scale.dtype}, must be torch.{recipe.dtype.torch_name} for scales "
                f"{recipe.value}"
            )
        shape = tuple(scale.shape)
        elements = 1
        for extent in shape:
            elements *= extent
        if recipe.is_swizzled:
            expected = swizzled_elements(recipe, rows, k)
            if elements != expected or not _is_compact(scale):
                raise NoKernelError(
                    f"{name} has {elements} elements (shape {list(shape)}, strides "
                    f"{list(scale.stride())}), must have {expected} contiguous ones for scales "
                    f"{recipe.value} of {rows} rows and k = {k}, swizzled 32 x 4 x 4"
                )
            excess = scale.data_ptr() % SWIZZLED_ALIGNMENT_BYTES
            if excess:
                raise NoKernelError(
                    f"{name} begins {excess} bytes past a multiple of {SWIZZLED_ALIGNMENT_BYTES}, "
                    "must begin at one; call .clone() on it"
                )
        elif recipe is ScaleRecipe.FP32_TENSOR:
            if elements != 1:
                raise NoKernelError(
                    f"{name} has {elements} elements (shape {list(shape)}), must have 1 for scales "
                    f"{recipe.value}"
                )
        else:
            row_wise: tuple[int, ...] = (rows, 1) if name == "scale_a" else (1, rows)
            if groups is not None:
                row_wise = (rows,) if name == "scale_a" else (groups, rows)
            if shape != row_wise or not _is_compact(scale):
                raise NoKernelError(
                    f"{name} has shape {list(shape)} and strides {list(scale.stride())}, must be "
                    f"contiguous and of shape {list(row_wise)} for scales {recipe.value}"
                )


def _is_compact(tensor: torch.Tensor) -> bool:
    step = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def read_epilogues(
    extras: ExtraOperands, out: DType, shape: tuple[int, ...], groups: int | None = None
) -> tuple[Epilogue | None, ...]:
    """Returns the epilogues that add the given operand to a product.

    Args:
        extras: Addend, activation and gate.
        out: Result dtype.
        shape: Product shape.
        groups: Number of groups, each with its own addend row; None without groups.

    Returns:
        All readings for the addend. There are two if the result has one row, because the addend is
        then both a row and a matrix. None means no epilogue.

    Raises:
        NoKernelError: If no epilogue does this.
    """
    addend, gated = extras.addend, extras.gated
    if gated is not None and (addend is None) is not (gated.addend is None):
        names: dict[Addend | None, str] = {Addend.PRODUCT: "product", Addend.GATES: "gates"}
        name = names.get(gated.addend, "bias")
        raise NoKernelError(
            f"{gated.name} needs {name} (got None)"
            if addend is None
            else f"{gated.name} takes no bias; omit it"
        )
    if addend is None:
        if gated is not None:
            return (gated,)
        if extras.activation is not None:
            raise NoKernelError(f"no epilogue applies {extras.activation.value} without a bias")
        return (None,)
    dtype_name = addend_dtype(out).torch_name
    if str(addend.dtype) != f"torch.{dtype_name}":
        raise NoKernelError(
            f"addend is {addend.dtype}, must be torch.{dtype_name} for a {out.value} result"
        )
    if gated is not None and gated.reads_addend:
        _check_read(gated, addend, shape)
        return (gated,)
    kinds: tuple[Addend, ...] = (Addend.ROW,)
    if groups is not None and not extras.adds_matrix:
        _check_rows_of_groups(addend, (groups, shape[-1]))
    elif groups is not None:
        _check_rows_of_result(addend, shape)
        kinds = (Addend.MATRIX,)
    else:
        kinds = addend_kinds(tuple(addend.shape), tuple(addend.stride()), shape)
    if not kinds:
        raise NoKernelError(
            f"addend has shape {list(addend.shape)} and strides {list(addend.stride())}, must be "
            f"a row with {shape[-1]} elements, or have the result's shape {list(shape)} without "
            "broadcast dimensions"
        )
    if gated is not None:
        if gated.addend not in kinds:
            raise NoKernelError(f"{gated.name} adds a row with {shape[-1]} elements (got a matrix)")
        return (gated,)
    epilogues = tuple(
        epilogue
        for kind in kinds
        if (epilogue := find_epilogue(kind, extras.activation)) is not None
    )
    if not epilogues:
        assert extras.activation is not None  # every plain sum has an epilogue
        raise NoKernelError(
            f"no epilogue adds a {kinds[0].value} and applies {extras.activation.value}"
        )
    return epilogues


def _check_read(gated: Epilogue, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Checks the operand that a gate reads in addition to the product."""
    if gated.addend is Addend.PRODUCT:
        operand, expected, count = "a product", (shape[0], 2 * shape[1]), "one gate and one up"
    else:
        operand, expected, count = "gates", (shape[0], shape[1]), "one gate"
    if tuple(tensor.shape) != expected:
        raise NoKernelError(
            f"{gated.name} reads {operand} of shape {list(tensor.shape)}, must have "
            f"{list(expected)}: {count} per column of a @ b"
        )


def _check_rows_of_groups(addend: torch.Tensor, shape: tuple[int, int]) -> None:
    """Checks that a grouped addend has one row per group, contiguous along n."""
    strides = tuple(addend.stride())
    if tuple(addend.shape) == shape:
        if shape[1] == 1 or strides[1] == 1:
            return
        raise NoKernelError(
            f"grouped addend has strides {list(strides)}, must be contiguous along n; "
            "call .contiguous() on it"
        )
    raise NoKernelError(
        f"grouped addend has shape {list(addend.shape)}, must have {list(shape)}: one row per "
        "group; for one row in all groups, call .expand(groups, n).contiguous()"
    )


def _check_rows_of_result(addend: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Checks that a matrix addend for a grouped product has the product's shape."""
    if tuple(addend.shape) != shape:
        raise NoKernelError(
            f"matrix addend has shape {list(addend.shape)}, must have the result's shape "
            f"{list(shape)}"
        )


def addend_kinds(
    shape: tuple[int, ...], strides: tuple[int, ...], out: tuple[int, ...]
) -> tuple[Addend, ...]:
    """Returns the ways to read an addend: as one row for all rows, as a matrix, both or neither."""
    if not shape or shape[-1] != out[-1] or len(shape) > len(out):
        return ()
    if strides[-1] != 1 and shape[-1] != 1:
        return ()
    kinds = []
    leading = zip(shape[:-1], strides[:-1])
    if all(extent == 1 or stride == 0 for extent, stride in leading) and (
        len(shape) < len(out)
        or all(extent in (1, out_extent) for extent, out_extent in zip(shape, out))
    ):
        kinds.append(Addend.ROW)
    is_spread = any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides))
    if shape == out and not is_spread:
        kinds.append(Addend.MATRIX)
    return tuple(kinds)


def check_offsets(extras: ExtraOperands, groups: int, where: str = "grouped_mm") -> None:
    """Checks group ends except their values, which are on the device.

    Raises:
        ValueError: If they are missing or have a wrong shape.
        NoKernelError: If they have a wrong dtype or are not contiguous.
    """
    offsets = extras.offsets
    if offsets is None:
        raise ValueError(f"{where}: offsets are missing")
    if tuple(offsets.shape) != (groups,):
        raise ValueError(
            f"grouped_mm: offsets have shape {list(offsets.shape)}, must have [{groups}], one end "
            "per matrix in b"
        )
    if str(offsets.dtype) != "torch.int32":
        raise NoKernelError(f"offsets are {offsets.dtype}, must be torch.int32")
    if groups > 1 and offsets.stride()[0] != 1:
        raise NoKernelError("offsets are not contiguous; call .contiguous() on them")


def check_rows(extras: ExtraOperands, shape: tuple[int, ...], where: str = "gathered_mm") -> None:
    """Checks gathered rows except their values, which kernels check.

    Raises:
        ValueError: If they are missing or have a wrong shape.
        NoKernelError: If they have a wrong dtype or are not contiguous.
    """
    rows = extras.rows
    if rows is None:
        raise ValueError(f"{where}: rows are missing")
    if tuple(rows.shape) != shape:
        expected = "one per result row" if extras.offsets is not None else "the shape of a"
        raise ValueError(
            f"{where}: rows have shape {list(rows.shape)}, must have {list(shape)}, {expected}"
        )
    if str(rows.dtype) != "torch.int32":
        raise NoKernelError(f"rows are {rows.dtype}, must be torch.int32; call .int() on them")
    if not _is_compact(rows):
        raise NoKernelError("rows are not contiguous; call .contiguous() on them")


def check_sums(extras: ExtraOperands, m: int, n: int) -> None:
    """Checks the destination for row sums, for a product [m, n] with a gate's gradient.

    Raises:
        ValueError: If it is missing, has a wrong shape, or the epilogue has no sums.
        NoKernelError: If it has a wrong dtype or is not contiguous.
    """
    sums, gated = extras.sums, extras.gated
    has_sums = gated is not None and gated.form is not None and gated.form.row.has_sums
    if sums is None and not has_sums:
        return
    if not has_sums or gated is None:
        name = None if gated is None else gated.name
        raise ValueError(f"grouped_mm: sums need an epilogue with sums (got {name})")
    if sums is None:
        raise ValueError(f"grouped_mm: {gated.name} needs sums (got None)")
    expected = [m, sum_parts(n)]
    if list(sums.shape) != expected:
        raise ValueError(
            f"grouped_mm: sums have shape {list(sums.shape)}, must have {expected}: one part "
            f"per {SUMMED_COLUMNS} columns of a @ b"
        )
    if str(sums.dtype) != "torch.float32":
        raise NoKernelError(f"sums are {sums.dtype}, must be torch.float32")
    if not _is_compact(sums):
        raise NoKernelError("sums are not contiguous; create them with torch.zeros()")


def check_offset_values(
    offsets: torch.Tensor, rows: int, where: str = "grouped_mm", axis: str = "row"
) -> None:
    """Checks that group ends ascend and stay within A. Copies them from the device.

    Kernels cannot check this: descending ends, or ends past A's last row, make them access memory
    outside their tensors. For debugging; synchronizes with the device.

    Raises:
        ValueError: If an end precedes the previous group's end, or exceeds A's rows.
    """
    previous_end = 0
    for group, end in enumerate(offsets.tolist()):
        if not previous_end <= end <= rows:
            raise ValueError(
                f"{where}: group {group} ends at {axis} {end}, must end in {previous_end}..{rows}: "
                "ends must ascend and stay within a"
            )
        previous_end = end


def check_row_values(rows: torch.Tensor, count: int, offsets: torch.Tensor) -> None:
    """Checks that ``gathered_grouped_mm`` rows exist in A. Copies them from the device.

    For a row outside A, kernels read some other row. Rows past the last group end are not checked.
    For debugging; synchronizes with the device.

    Raises:
        ValueError: If a row is negative or at least ``count``, A's row count.
    """
    used = rows[: int(offsets[-1])]
    out_of_range = ((used < 0) | (used >= count)).nonzero()
    if len(out_of_range):
        index = int(out_of_range[0])
        raise ValueError(
            f"gathered_grouped_mm: rows[{index}] is {int(used[index])}, must be in "
            f"0..{count - 1}: a has {count} rows"
        )
