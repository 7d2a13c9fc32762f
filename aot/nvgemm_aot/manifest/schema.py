"""Pydantic models for manifest files.

The models check values alone; `rules` checks combinations. A missing field is empty or zero in its
model, which no value in a file can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nvgemm_runtime.gemm import target
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES
from nvgemm_runtime.gemm.problem import MAX_EXTENT, DType, Layout, Op
from nvgemm_runtime.gemm.support import OUTS
from nvgemm_runtime.gemm.target import CUDA_VERSIONS, PLATFORMS
from nvgemm_runtime.gemm.types import ScaleRecipe

from ..targets import DEFAULT_DEVICE
from ..targets.profile import profile_names
from .source import Location

VERSION = 1
"""Manifest format version that this package reads."""

MAX_CANDIDATES = 256

ARCHITECTURES = tuple(sorted(DEFAULT_DEVICE))
_USUAL_DEVICES = "; ".join(
    f"{row.device} for {arch}" + (f", on Arm {row.device_on_arm}" if row.device_on_arm else "")
    for arch, row in target.ARCHITECTURES.items()
)

INPUT_DTYPES = tuple(dtype.value for dtype in OUTS)
OUT_DTYPES = tuple(d.value for d in DType if any(d in outs for outs in OUTS.values()))

NONE = "none"
"""Spelling for no scales, or no epilogue, in lists or to override defaults."""
SCALES = (NONE, *(recipe.value for recipe in ScaleRecipe))
EPILOGUES = (NONE, *(epilogue.name for epilogue in ALL_EPILOGUES))

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """Check for one scalar, as pydantic metadata.

    Attributes:
        allowed: Description of allowed values, for messages.
        accepts: Predicate for allowed values.
        choices: All allowed texts, if they can be listed.
        help: Hint for a value unlike any allowed one; possibly empty.
        schema: The rule as JSON Schema.
    """

    allowed: str
    accepts: Callable[[object], bool]
    choices: tuple[str, ...] = ()
    help: str = ""
    schema: dict[str, Any]

    def _check(self, value: object) -> object:
        if not self.accepts(value):
            raise PydanticCustomError("rule", "breaks a rule", {"rule": self})
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(self.schema)


def _one_of(choices: Iterable[str], help: str = "") -> Rule:
    listed = tuple(choices)
    return Rule(
        allowed=", ".join(listed),
        choices=listed,
        help=help,
        accepts=lambda value: isinstance(value, str) and value in listed,
        schema={"type": "string", "enum": list(listed)},
    )


def _integer(least: int, most: int, help: str = "") -> Rule:
    return Rule(
        allowed=f"an integer in {least}..{most}" if least < most else str(least),
        accepts=lambda value: type(value) is int and least <= value <= most,
        help=help,
        schema={"type": "integer", "minimum": least, "maximum": most},
    )


def _text(allowed: str, pattern: str = r"[\s\S]+", help: str = "") -> Rule:
    return Rule(
        allowed=allowed,
        accepts=lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None,
        help=help,
        schema={"type": "string", "pattern": f"^{pattern}$"},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shorthand:
    """Short form for a value, as pydantic metadata.

    ``expand`` converts the short form and returns other values unchanged; ``schema`` derives the
    short form's JSON Schema from the full one.
    """

    expand: Callable[[Any], Any]
    schema: Callable[[dict[str, Any]], dict[str, Any]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        whole = handler(schema)
        return {"anyOf": [self.schema(whole), whole]}


_SCALAR_FOR_LIST = _Shorthand(
    expand=lambda value: value if isinstance(value, list) else [value],
    schema=lambda listed: listed["items"],
)
_ARCHITECTURE_FOR_TARGET = _Shorthand(
    expand=lambda value: {"arch": value} if isinstance(value, str) else value,
    schema=lambda _: {"type": "string", "enum": list(ARCHITECTURES)},
)

NAME_PATTERN = r"[a-z0-9]([a-z0-9.\-]{0,62}[a-z0-9])?"
PROVIDER_PATTERN = r"[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?"
PROVIDER_ALLOWED = "the name of a provider, or module:class"

NAME_ALLOWED = "lower-case letters, digits, '-' and '.', at most 64, a letter or digit at each end"

Number = Annotated[int, _integer(1, MAX_EXTENT)]
Extent = Annotated[int, _integer(1, MAX_EXTENT, help="list the values, as in [1, 2, 4]")]
Candidates = Annotated[int, _integer(1, MAX_CANDIDATES)]
OneOrMore = Annotated[list[T], Field(min_length=1), _SCALAR_FOR_LIST]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]
Triple = Annotated[list[Number], Field(min_length=3, max_length=3)]
Comment = Annotated[str, _text("text", help="remove the key or write a text")]

LAYOUTS = tuple(layout.value for layout in Layout)
_LAYOUT_HELP = "a letter for A and one for B: t row-major, n column-major"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetEntry(_Entry):
    """GPU architecture to compile for, with the GPU products to rank for."""

    arch: Annotated[str, _one_of(ARCHITECTURES)] = Field(description="GPU architecture.")
    device: Annotated[str, _one_of(profile_names())] = Field(
        default_factory=str,
        description="GPU product to rank kernels for.",
    )
    devices: Annotated[list[Annotated[str, _one_of(profile_names())]], Field(min_length=1)] = Field(
        default_factory=list,
        description="GPU products to rank kernels for, each separately; other products use the "
        f"first one's ranking. Defaults without device: {_USUAL_DEVICES}; then other products with "
        "the same compute capability.",
    )
    platform: Annotated[str, _one_of(PLATFORMS)] = Field(
        default_factory=str,
        description="Host platform. Default: the devices' (GB200 and GB300 have Arm processors), "
        "or linux_x86_64 without devices.",
    )
    cuda: Annotated[str, _one_of(CUDA_VERSIONS)] = Field(
        default_factory=str,
        description="CUDA major version of the torch that loads the kernels. Default: cu13.",
    )


class SharedEntry(_Entry):
    """Keys that gemms share; an entry in `gemms` overrides them."""

    op: Annotated[str, _one_of(op.value for op in Op)] = Field(
        default_factory=str, description="Operation, by torch's name. Default: mm."
    )
    dtype: OneOrMore[Annotated[str, _one_of(INPUT_DTYPES)]] = Field(
        default_factory=list,
        description="One or several element types for A and B; with dtype_b, for A.",
    )
    dtype_b: OneOrMore[Annotated[str, _one_of(INPUT_DTYPES)]] = Field(
        default_factory=list,
        description="One or several element types for B. Only fp8 may differ from A's, and only by "
        "another fp8. Default: A's.",
    )
    out: OneOrMore[Annotated[str, _one_of(OUT_DTYPES)]] = Field(
        default_factory=list,
        description="One or several element types for the result. Default: the inputs' for fp16 "
        "and bf16, bf16 for fp8 and fp4, int32 for integers.",
    )
    layout: OneOrMore[Annotated[str, _one_of(LAYOUTS, _LAYOUT_HELP)]] = Field(
        default_factory=list,
        description="One or several layouts, a letter for A and one for B: t is row-major, n "
        "column-major. Default: tn, as in torch.nn.Linear; tt for gathered_mm.",
    )
    scales: OneOrMore[Annotated[str, _one_of(SCALES)]] = Field(
        default_factory=list,
        description="One or several scale recipes: element type of the scales for A and B, and the "
        "block that shares one. e8m0_1x32 for MXFP8 and MXFP4, e4m3_1x16 for NVFP4. Default: none.",
    )
    epilogue: OneOrMore[Annotated[str, _one_of(EPILOGUES)]] = Field(
        default_factory=list,
        description="One or several epilogues, applied before rounding: bias adds a row, add a "
        "matrix, swiglu_halves gates pairs of columns. Default: none.",
    )
    candidates: Candidates = Field(
        default_factory=int, description="Number of kernels per problem."
    )
    comment: Comment = Field(default_factory=str, description="Free text for readers.")


SIZE_WAYS = (("m", "n", "k"), ("m", "nk"), ("mnk",))
SIZE_KEYS = ("m", "n", "k", "nk", "mnk")


def _only_with(way: tuple[str, ...]) -> dict[str, Any]:
    forbidden = [{"required": [key]} for key in SIZE_KEYS if key not in way]
    return {"required": list(way), "not": {"anyOf": forbidden}}


class GemmEntry(SharedEntry):
    """One GEMM, or all combinations of its lists."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_only_with(w) for w in SIZE_WAYS]})

    m: OneOrMore[Extent] = Field(default_factory=list, description="Rows of A and of the result.")
    n: OneOrMore[Extent] = Field(
        default_factory=list,
        description="Columns of B and of the result; with a gate, the result has half as many.",
    )
    k: OneOrMore[Extent] = Field(
        default_factory=list, description="Columns of A and rows of B, in elements."
    )
    nk: Annotated[list[Pair], Field(min_length=1)] = Field(
        default_factory=list, description="Pairs [n, k]: a Linear's [out, in] features."
    )
    mnk: Annotated[list[Triple], Field(min_length=1)] = Field(
        default_factory=list, description="Triples [m, n, k]."
    )
    batch: OneOrMore[Extent] = Field(
        default_factory=list,
        description="Matrices per batch. Required for bmm, and only allowed there.",
    )
    groups: OneOrMore[Extent] = Field(
        default_factory=list,
        description="Number of groups: along m for grouped_mm and gathered_grouped_mm, along k for "
        "k_grouped_mm. Required for these, and only allowed there.",
    )
    count: Number = Field(
        default_factory=int,
        description="Number of calls in recorded graphs. Default: 1. Does not affect the build.",
    )


class ManifestEntry(_Entry):
    """GEMM shapes to build kernels for."""

    model_config = ConfigDict(title="nvgemm-aot manifest")

    version: Annotated[int, _integer(VERSION, VERSION)] = Field(
        description="Manifest format version."
    )
    name: Annotated[
        str,
        _text(NAME_ALLOWED, NAME_PATTERN),
    ] = Field(description="Name of the build; part of the wheel's name.")
    description: Comment = Field(default_factory=str, description="One sentence on the purpose.")
    targets: Annotated[
        list[Annotated[TargetEntry, _ARCHITECTURE_FOR_TARGET]], Field(min_length=1)
    ] = Field(description="Targets to build for.")
    providers: list[Annotated[str, _text(PROVIDER_ALLOWED, PROVIDER_PATTERN)]] = Field(
        default_factory=list,
        description="Kernel providers: builtin names, entry points in installed packages, or "
        "module:class. Default: cutlass_operators, quack, and gathered for gathered_mm. All "
        "candidates are ranked together, by measurements or by the first provider's model.",
    )
    candidates: Candidates = Field(
        default_factory=int, description="Number of kernels per problem. Default: 8."
    )
    defaults: SharedEntry = Field(
        default_factory=SharedEntry, description="Keys that all gemms share."
    )
    gemms: Annotated[list[GemmEntry], Field(min_length=1)] = Field(
        description="GEMMs to build for."
    )


def json_schema() -> dict[str, Any]:
    """Returns a manifest's JSON Schema (draft 2020-12) for editors.

    It accepts every manifest that `load_manifest` accepts. It does not cover rules between entries,
    such as a dtype missing from both gemm and defaults.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ManifestEntry.model_json_schema(),
    }


def allowed_keys(location: Location) -> tuple[str, ...]:
    """Lists allowed keys for the mapping at a location."""
    models: dict[str | int, type[_Entry]] = {
        "targets": TargetEntry,
        "defaults": SharedEntry,
        "gemms": GemmEntry,
    }
    return tuple((models[location[0]] if location else ManifestEntry).model_fields)
