"""Reading a bundle's header: every rule of FORMAT.md that needs no byte of the body.

Rules of single values are here, those between values in `header_rules`. Straight-line validation:
each check names its rule, what was found and what is allowed. Nothing in this module reads a file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from typing import Any, NoReturn, TypeVar

from .errors import BundleFormatError
from .format import (
    MAX_DICTIONARY_BYTES,
    MAX_KERNEL_ALIGNMENT_BYTES,
    MAX_PAYLOAD_BYTES,
    ClusterLimit,
    Conditions,
    Dictionary,
    Header,
    Kernel,
    KernelDesign,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
    Span,
    Timing,
    canonical_json,
)
from .header_rules import check_header
from .problem import Problem, Signature
from .target import Target

T = TypeVar("T")


def decode_header(data: bytes, *, where: str, body_offset: int, file_bytes: int) -> Header:
    """Read a header and check every rule that needs no byte of the body.

    Args:
        data: The header's bytes, whose digest was already checked.
        where: Name of the file, for messages.
        body_offset: First byte behind the header.
        file_bytes: Length of the file.

    Raises:
        BundleFormatError: Naming the broken rule, what was found, and what is allowed.
    """
    return _Decoder(where).decode(data, body_offset, file_bytes)


class _Decoder:
    """Holds the name of the file, for messages."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, rule: str, message: str) -> NoReturn:
        raise BundleFormatError(self.where, rule, message)

    def decode(self, data: bytes, body_offset: int, file_bytes: int) -> Header:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            self.fail("header-json", f"the header is not JSON: {error}")
        if _canonical_or_none(document) != data:
            self.fail("header-canonical", "the header is not in canonical form")
        top = self.fields(document, "header", Header)
        header = Header(
            target=self.value(
                "target", lambda: Target(**self.texts(top["target"], "target", Target))
            ),
            device=self.text(top["device"], "device"),
            generator=self.text(top["generator"], "generator"),
            build_key=self.digest(top["build_key"], "build_key"),
            toolchain=self.toolchain(top["toolchain"]),
            body_sha256=self.digest(top["body_sha256"], "body_sha256"),
            dictionary=self.dictionary(top["dictionary"]),
            kernels=tuple(
                self.kernel(item, f"kernels[{i}]")
                for i, item in enumerate(self.items(top["kernels"], "kernels"))
            ),
            sources=tuple(
                self.source(item, f"sources[{i}]")
                for i, item in enumerate(self.items(top["sources"], "sources"))
            ),
            rankings=tuple(
                self.ranking(item, f"rankings[{i}]")
                for i, item in enumerate(self.items(top["rankings"], "rankings"))
            ),
            unserved=self.unserved(top["unserved"]) if "unserved" in top else {},
        )
        check_header(header, where=self.where, body_offset=body_offset, file_bytes=file_bytes)
        return header

    # Values, each with the path it stands at.

    def fields(self, value: Any, path: str, shape: type) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail("header-field", f"{path} must be an object (got {type(value).__name__})")
        required, allowed = _field_names(shape)
        if not required <= value.keys() <= allowed:
            missing, unknown = sorted(required - value.keys()), sorted(value.keys() - allowed)
            self.fail("header-field", f"{path}: missing fields {missing}, unknown fields {unknown}")
        return value

    def texts(self, value: Any, path: str, shape: type) -> dict[str, str]:
        fields = self.fields(value, path, shape)
        return {name: self.text(item, f"{path}.{name}") for name, item in fields.items()}

    def text(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not value or not value.isprintable():
            self.fail(
                "header-field", f"{path} must be non-empty printable text (got {value!r:.80})"
            )
        return value

    def digest(self, value: Any, path: str) -> str:
        text = self.text(value, path)
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            self.fail("header-field", f"{path} must be 64 lower-case hex digits (got {text!r:.80})")
        return text

    def number(self, value: Any, path: str, least: int = 0, most: int = 2**63 - 1) -> int:
        if type(value) is not int or not least <= value <= most:
            self.fail(
                "header-field", f"{path} must be an integer in {least}..{most} (got {value!r:.80})"
            )
        return value

    def items(self, value: Any, path: str, length: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            wanted = "a list" if length is None else f"a list of {length}"
            self.fail("header-field", f"{path} must be {wanted} (got {value!r:.80})")
        return value

    def value(self, path: str, make: Callable[[], T]) -> T:
        try:
            return make()
        except ValueError as error:
            self.fail("header-field", f"{path}: {error}")

    # Parts of the header.

    def toolchain(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not value:
            self.fail("header-field", "toolchain must be an object with at least one version")
        return {
            self.text(name, "a name in toolchain"): self.text(version, f"toolchain.{name}")
            for name, version in value.items()
        }

    def span(self, value: Any, path: str, max_content_bytes: int) -> Span:
        offset, stored, content = self.items(value, path, length=3)
        return Span(
            offset=self.number(offset, f"{path}.offset"),
            stored_bytes=self.number(stored, f"{path}.stored_bytes", least=1),
            content_bytes=self.number(
                content, f"{path}.content_bytes", least=1, most=max_content_bytes
            ),
        )

    def dictionary(self, value: Any) -> Dictionary | None:
        if value is None:
            return None
        fields = self.fields(value, "dictionary", Dictionary)
        return Dictionary(
            span=self.span(fields["span"], "dictionary.span", MAX_DICTIONARY_BYTES),
            sha256=self.digest(fields["sha256"], "dictionary.sha256"),
        )

    def kernel(self, value: Any, path: str) -> Kernel:
        fields = self.fields(value, path, Kernel)
        signature = self.text(fields["signature"], f"{path}.signature")
        alignment = self.number(
            fields["alignment_bytes"],
            f"{path}.alignment_bytes",
            least=1,
            most=MAX_KERNEL_ALIGNMENT_BYTES,
        )
        if alignment & (alignment - 1):
            self.fail(
                "header-field", f"{path}.alignment_bytes must be a power of two (got {alignment})"
            )
        return Kernel(
            id=self.digest(fields["id"], f"{path}.id"),
            span=self.span(fields["span"], f"{path}.span", MAX_PAYLOAD_BYTES),
            signature=self.value(f"{path}.signature", lambda: Signature.parse(signature)),
            provider=self.text(fields["provider"], f"{path}.provider"),
            operator=self.text(fields["operator"], f"{path}.operator"),
            design=self.design(fields["design"], f"{path}.design"),
            alignment_bytes=alignment,
            workspace_bytes=self.number(fields["workspace_bytes"], f"{path}.workspace_bytes"),
            calling_convention=self.text(
                fields["calling_convention"], f"{path}.calling_convention"
            ),
        )

    def design(self, value: Any, path: str) -> KernelDesign:
        fields = self.fields(value, path, KernelDesign)
        tile_m, tile_n, tile_k = self.extents(fields["tile"], f"{path}.tile", 3)
        fallback = fields["fallback_cluster"]
        limits = self.items(fields["cluster_limits"], f"{path}.cluster_limits")
        return KernelDesign(
            tile=(tile_m, tile_n, tile_k),
            ctas_per_tile=self.number(fields["ctas_per_tile"], f"{path}.ctas_per_tile", 1, 2),
            cluster=self.cluster(fields["cluster"], f"{path}.cluster"),
            fallback_cluster=None
            if fallback is None
            else self.cluster(fallback, f"{path}.fallback_cluster"),
            scheduler=self.text(fields["scheduler"], f"{path}.scheduler"),
            cluster_limits=tuple(
                self.cluster_limit(item, f"{path}.cluster_limits[{i}]")
                for i, item in enumerate(limits)
            ),
        )

    def cluster(self, value: Any, path: str) -> tuple[int, int]:
        cluster_m, cluster_n = self.extents(value, path, 2)
        return cluster_m, cluster_n

    def extents(self, value: Any, path: str, length: int) -> list[int]:
        return [
            self.number(item, f"{path}[{i}]", least=1)
            for i, item in enumerate(self.items(value, path, length))
        ]

    def cluster_limit(self, value: Any, path: str) -> ClusterLimit:
        fields = self.fields(value, path, ClusterLimit)
        return ClusterLimit(
            cluster_size=self.number(fields["cluster_size"], f"{path}.cluster_size", least=1),
            max_active=self.number(fields["max_active"], f"{path}.max_active", least=1),
            basis=self.choice(
                fields["basis"], f"{path}.basis", ("measured", "reported", "estimated")
            ),
        )

    def choice(self, value: Any, path: str, allowed: tuple[str, ...]) -> str:
        if value not in allowed:
            self.fail("header-field", f"{path} must be one of {allowed} (got {value!r:.80})")
        return str(value)

    def source(self, value: Any, path: str) -> RankingSource:
        fields = self.fields(value, path, RankingSource)
        conditions = None
        if "conditions" in fields:
            where = f"{path}.conditions"
            conditions = Conditions(**self.texts(fields["conditions"], where, Conditions))
        return RankingSource(
            kind=self.choice(fields["kind"], f"{path}.kind", ("estimate", "measurement")),
            by=self.text(fields["by"], f"{path}.by"),
            gpu=self.text(fields["gpu"], f"{path}.gpu"),
            conditions=conditions,
        )

    def ranking(self, value: Any, path: str) -> Ranking:
        fields = self.fields(value, path, Ranking)
        key = self.text(fields["problem"], f"{path}.problem")
        places = []
        for i, item in enumerate(self.items(fields["kernels"], f"{path}.kernels")):
            kernel, time_ns = self.items(item, f"{path}.kernels[{i}]", length=2)
            places.append(
                Ranked(
                    kernel=self.number(kernel, f"{path}.kernels[{i}].kernel"),
                    time_ns=None
                    if time_ns is None
                    else self.number(time_ns, f"{path}.kernels[{i}].time_ns", least=1),
                )
            )
        return Ranking(
            problem=self.value(f"{path}.problem", lambda: Problem.parse(key)),
            source=self.number(fields["source"], f"{path}.source"),
            kernels=tuple(places),
            measured=self.measured(fields["measured"], f"{path}.measured")
            if "measured" in fields
            else None,
        )

    def measured(self, value: Any, path: str) -> Measured:
        fields = self.fields(value, path, Measured)
        spreads = self.items(fields["spreads_ns"], f"{path}.spreads_ns")
        doubts = self.items(fields["doubts"], f"{path}.doubts")
        return Measured(
            spreads_ns=tuple(
                self.number(item, f"{path}.spreads_ns[{i}]") for i, item in enumerate(spreads)
            ),
            aten=self.timing(fields["aten"], f"{path}.aten"),
            triton=self.timing(fields["triton"], f"{path}.triton"),
            doubts=tuple(self.text(item, f"{path}.doubts[{i}]") for i, item in enumerate(doubts)),
        )

    def timing(self, value: Any, path: str) -> Timing | None:
        if value is None:
            return None
        time_ns, spread_ns = self.items(value, path, length=2)
        return Timing(
            time_ns=self.number(time_ns, f"{path}.time_ns", least=1),
            spread_ns=self.number(spread_ns, f"{path}.spread_ns"),
        )

    def unserved(self, value: Any) -> dict[Problem, str]:
        if not isinstance(value, dict) or not value:
            self.fail("header-field", "unserved must be an object with at least one problem")
        found = {}
        for key, reason in value.items():
            problem = self.value(f"unserved.{key:.80}", functools.partial(Problem.parse, key))
            found[problem] = self.text(reason, f"unserved.{key}")
        return found


@functools.cache
def _field_names(shape: type) -> tuple[frozenset[str], frozenset[str]]:
    """The fields that an object must have, and all that it may: those with a default besides."""
    fields = dataclass_fields(shape)
    required = frozenset(
        field.name
        for field in fields
        if field.default is MISSING and field.default_factory is MISSING
    )
    return required, frozenset(field.name for field in fields)


def _canonical_or_none(value: Any) -> bytes | None:
    """Canonical form of ``value``, or None where it has none (a NaN, a lone surrogate)."""
    try:
        return canonical_json(value)
    except (ValueError, RecursionError):
        return None
