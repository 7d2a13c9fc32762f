"""Reads a bundle's header and checks every FORMAT.md rule that needs no body byte.

Rules for objects are here, for single values in `header_values`, between objects in `header_rules`;
`unknown_parts` leaves out entries that this release does not understand. Each check names its rule,
the observed value and the allowed one. Nothing in this module reads a file.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from ..errors import UPGRADE
from ..gemm.problem import MAX_EXTENT, Problem, Signature
from ..gemm.target import Target, read_target
from .format import (
    DEVICE_RANKING,
    KNOWN_FEATURES,
    MAX_DICTIONARY_BYTES,
    MAX_KERNEL_ALIGNMENT_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TILE_BYTES,
    ClusterLimit,
    Dictionary,
    Header,
    Kernel,
    KernelDesign,
    Span,
    UnknownKernel,
    Whole,
    canonical_json,
)
from .header_rules import Parts, check_header
from .header_values import HeaderValues
from .ranking_entries import (
    BACK_TO_BACK,
    LEAST_CONFIRMING,
    LEAST_REPEAT_S,
    ON,
    CompileFailure,
    Conditions,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
    Scope,
    Timing,
    UnknownEntry,
    UnservedReason,
)
from .unknown_parts import separate_unknown_entries
from .workspace import TileWorkspace

_T = TypeVar("_T")

FACTS = frozenset(
    {"target", "device", "generator", "build_key", "toolchain", "body_sha256", "dictionary"}
    | {"sources"}
)
_HEADER = FACTS | {"kernels", "rankings"}
_TARGET = frozenset({"arch", "platform", "cuda"})
_DICTIONARY = frozenset({"span", "sha256"})
_ANY_KERNEL = frozenset({"id", "span", "operator", "signature"})
_KERNEL = _ANY_KERNEL | frozenset(
    {"provider", "design", "alignment_bytes", "workspace_bytes", "calling_convention"}
)
_DESIGN = frozenset(
    {"tile", "ctas_per_tile", "cluster", "fallback_cluster", "scheduler", "cluster_limits"}
)
_WORKSPACE = frozenset({"tile", "tiles_multiple", "zeroed_bytes", "scratch_bytes"})
_CLUSTER_LIMIT = frozenset({"cluster_size", "max_active", "basis"})
_SOURCE = frozenset({"kind", "by", "gpu"})
_CONDITIONS = frozenset({"driver", "torch", "cuda", "date"})
_RANKING = frozenset({"problem", "source", "kernels"})
_MEASURED = frozenset({"spreads_ns", "aten", "triton", "doubts"})
_FAILURE = frozenset({"operator", "reason", "is_transient"})
_UNSERVED = frozenset({"problem", "reason"})
"""Required object fields. Objects may have others, which are ignored unless they are known."""


def decode_header(
    data: bytes, *, where: str, version: int, body_offset: int, file_bytes: int
) -> Header:
    """Reads a header and checks every rule that needs no body byte.

    Args:
        data: Header bytes, whose digest was already checked.
        where: File name, for messages.
        version: Readable format version that the file states.
        body_offset: First byte after the header.
        file_bytes: File length.

    Raises:
        BundleFormatError: Naming the broken rule, the observed value and the allowed one.
    """
    return HeaderDecoder(where, version).decode(data, body_offset, file_bytes)


class HeaderDecoder(HeaderValues):
    """Reads a header's objects.

    Args:
        where: File name, for messages.
        version: Format version.
        spans_from: Byte that spans count from.
    """

    def __init__(self, where: str, version: int, spans_from: int = 0) -> None:
        super().__init__(where)
        self.version = version
        self.spans_from = spans_from

    def decode(self, data: bytes, body_offset: int, file_bytes: int) -> Header:
        """Reads a whole header; see `decode_header`."""
        top = self.document(data)
        self.fields(top, "header", _HEADER if self.version == 1 else _HEADER | {"imports"})
        parts = self.parts(top)
        header = self.facts(top, parts)
        check_header(parts, self.fail, body_offset=body_offset, file_bytes=file_bytes)
        return separate_unknown_entries(header, parts)

    def document(self, data: bytes) -> dict[str, Any]:
        """Reads JSON in canonical form, if this release knows the features that it requires."""
        top = self.fields(self.canonical(data, "the header"), "header", frozenset())
        unknown = self.unknown_features(top, "header")
        if unknown is not None:
            self.fail("feature", f"the bundle {unknown}; {UPGRADE}")
        return top

    def canonical(self, data: bytes, name: str) -> Any:
        """Reads JSON in canonical form."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            self.fail("header-json", f"{name} is not JSON: {error}")
        if _canonical_or_none(document) != data:
            self.fail("header-canonical", f"{name} is not in canonical form")
        return document

    def parts(self, top: dict[str, Any]) -> Parts:
        """Reads the dictionary and all lists."""
        return Parts(
            dictionary=self.dictionary(top["dictionary"]),
            kernels=self.each(top["kernels"], "kernels", self.kernel),
            sources=self.each(top["sources"], "sources", self.source),
            rankings=self.each(top["rankings"], "rankings", self.ranking),
            unserved=self.unserved(top["unserved"]) if "unserved" in top else (),
            failures=self.each(self.optional_list(top, "failures"), "failures", self.failure),
        )

    def facts(self, top: dict[str, Any], parts: Parts) -> Header:
        """Reads the header without the lists in ``parts``, except failures."""
        device = self.text(top["device"], "device")
        return Header(
            target=self.target(top["target"]),
            device=device,
            generator=self.text(top["generator"], "generator"),
            build_key=self.digest(top["build_key"], "build_key"),
            toolchain=self.toolchain(top["toolchain"]),
            body_sha256=self.digest(top["body_sha256"], "body_sha256"),
            dictionary=parts.dictionary,
            kernels=(),
            sources=(),
            rankings=(),
            imports=self.imports(top["imports"], "imports") if self.version > 1 else None,
            failures=parts.failures,
            format_version=self.version,
            further_devices=self.further_devices(top, device),
            part_of=self.each(self.optional_list(top, "part_of"), "part_of", self.whole),
        )

    def optional_list(self, fields: dict[str, Any], name: str) -> Any:
        """Returns an optional list that version 1 lacks; empty if absent."""
        return [] if self.version == 1 else fields.get(name, [])

    def further_devices(self, top: dict[str, Any], first: str) -> tuple[str, ...]:
        """Reads the other device profiles."""
        names = self.each(self.optional_list(top, "further_devices"), "further_devices", self.text)
        if len({first, *names}) <= len(names):
            self.refuse("further_devices", f"other names than {first!r:.40}, each once", names)
        return names

    def whole(self, value: Any, path: str) -> Whole:
        """Reads an entry of `part_of`."""
        build_key, prefix_sha256 = self.each(value, path, self.digest, 2)
        return Whole(build_key=build_key, prefix_sha256=prefix_sha256)

    def features(self, fields: dict[str, Any], path: str) -> tuple[str, ...]:
        """Returns the features that an object requires."""
        return self.each(self.optional_list(fields, "requires"), f"{path}.requires", self.text)

    def unknown_features(self, fields: dict[str, Any], path: str) -> str | None:
        """Describes required features that this release does not know, or returns None."""
        names = self.features(fields, path)
        unknown = [name for name in names if name not in KNOWN_FEATURES]
        return f"requires {', '.join(unknown)}, unknown to this release" if unknown else None

    def problem(
        self, fields: dict[str, Any], path: str, *, is_further: bool = False
    ) -> tuple[str, Problem | str]:
        """Returns an entry's problem text, and the problem or the reason to leave the entry out.

        A further ranking's text also names the product.
        """
        key = self.text(fields["problem"], f"{path}.problem")
        why = self.unknown_features(fields, path)
        if why is None:
            try:
                return key, Problem.parse(key.partition(ON)[0] if is_further else key)
            except ValueError as error:
                why = f"names a problem unknown to this release: {error}"
        return key, f"{why}; {UPGRADE}"

    # Parts of the header.

    def target(self, value: Any) -> Target:
        """Reads the target."""
        return read_target(**self.texts(value, "target", _TARGET))

    def toolchain(self, value: Any) -> dict[str, str]:
        """Reads versions by name."""
        if not isinstance(value, dict) or not value:
            self.refuse("toolchain", "an object with at least one version", value)
        return {
            self.text(name, "a name in toolchain"): self.text(version, f"toolchain.{name}")
            for name, version in value.items()
        }

    def span(self, value: Any, path: str, max_content_bytes: int) -> Span:
        """Reads a span, and counts its offset from the file's first byte."""
        offset, stored, content = self.items(value, path, length=3)
        return Span(
            offset=self.number(offset, f"{path}.offset") + self.spans_from,
            stored_bytes=self.number(stored, f"{path}.stored_bytes", least=1),
            content_bytes=self.number(content, f"{path}.content_bytes", 1, max_content_bytes),
        )

    def dictionary(self, value: Any) -> Dictionary | None:
        """Reads the dictionary's entry."""
        if value is None:
            return None
        fields = self.fields(value, "dictionary", _DICTIONARY)
        return Dictionary(
            span=self.span(fields["span"], "dictionary.span", MAX_DICTIONARY_BYTES),
            sha256=self.digest(fields["sha256"], "dictionary.sha256"),
        )

    def imports(self, value: Any, path: str) -> tuple[str, ...]:
        """Reads imported symbols."""
        symbols = self.each(value, path, self.text)
        if list(symbols) != sorted(set(symbols)):
            self.refuse(path, "sorted, each symbol once", value)
        return symbols

    def failure(self, value: Any, path: str) -> CompileFailure:
        """Reads a compile failure."""
        fields = self.fields(value, path, _FAILURE)
        if not isinstance(fields["is_transient"], bool):
            self.refuse(f"{path}.is_transient", "true or false", fields["is_transient"])
        return CompileFailure(
            operator=self.text(fields["operator"], f"{path}.operator"),
            reason=self.text(fields["reason"], f"{path}.reason"),
            is_transient=fields["is_transient"],
        )

    def kernel(self, value: Any, path: str) -> Kernel | UnknownKernel:
        """Reads a kernel, or the reason that it is not understood."""
        fields = self.fields(value, path, _ANY_KERNEL)
        id_ = self.digest(fields["id"], f"{path}.id")
        span = self.span(fields["span"], f"{path}.span", MAX_PAYLOAD_BYTES)
        operator = self.text(fields["operator"], f"{path}.operator")
        key = self.text(fields["signature"], f"{path}.signature")
        why = self.unknown_features(fields, path)
        if why is None:
            try:
                signature = Signature.parse(key)
            except ValueError as error:
                why = f"has a signature unknown to this release: {error}"
        if why is not None:
            return UnknownKernel(
                id=id_, span=span, operator=operator, signature=key, why=f"{why}; {UPGRADE}"
            )
        self.fields(fields, path, _KERNEL)
        alignment_path = f"{path}.alignment_bytes"
        alignment = self.number(
            fields["alignment_bytes"], alignment_path, 1, MAX_KERNEL_ALIGNMENT_BYTES
        )
        workspace_bytes = self.number(fields["workspace_bytes"], f"{path}.workspace_bytes")
        if self.version > 1 and "workspace" in fields and workspace_bytes:
            self.fail(
                "header-field",
                f"{path}.workspace_bytes must be 0 with a workspace (got {workspace_bytes})",
            )
        if alignment & (alignment - 1):
            self.refuse(alignment_path, "a power of two", alignment)
        is_deterministic = self.version == 1 or "deterministic" not in fields
        if not is_deterministic and fields["deterministic"] is not False:
            self.refuse(f"{path}.deterministic", "false, or absent", fields["deterministic"])
        kernel = Kernel(
            id=id_,
            span=span,
            signature=signature,
            provider=self.text(fields["provider"], f"{path}.provider"),
            operator=operator,
            design=self.design(fields["design"], f"{path}.design"),
            alignment_bytes=alignment,
            workspace_bytes=workspace_bytes,
            calling_convention=self.text(
                fields["calling_convention"], f"{path}.calling_convention"
            ),
            workspace=self.workspace(fields["workspace"], f"{path}.workspace")
            if self.version > 1 and "workspace" in fields
            else None,
            is_deterministic=is_deterministic,
            imports=self.imports(fields["imports"], f"{path}.imports")
            if self.version > 1 and "imports" in fields
            else None,
        )
        missing = [name for name in kernel.features if name not in fields.get("requires", ())]
        if missing:
            self.fail(
                "header-field",
                f"{path}.requires must have {', '.join(missing)}, which the kernel's other fields "
                f"need (got {fields.get('requires', [])!r:.80})",
            )
        return kernel

    def workspace(self, value: Any, path: str) -> TileWorkspace:
        """Reads a workspace formula."""
        fields = self.fields(value, path, _WORKSPACE)
        once, per_tile = self.each(fields["zeroed_bytes"], f"{path}.zeroed_bytes", self.bytes_, 2)
        return TileWorkspace(
            tile=self.pair(fields["tile"], f"{path}.tile", MAX_EXTENT),
            tiles_multiple=self.pair(
                fields["tiles_multiple"], f"{path}.tiles_multiple", MAX_EXTENT
            ),
            zeroed_once=once,
            zeroed_per_tile=per_tile,
            scratch_per_tile=self.bytes_(fields["scratch_bytes"], f"{path}.scratch_bytes"),
        )

    def bytes_(self, value: Any, path: str) -> int:
        """Reads a size per tile."""
        return self.number(value, path, most=MAX_TILE_BYTES)

    def design(self, value: Any, path: str) -> KernelDesign:
        """Reads a design."""
        fields = self.fields(value, path, _DESIGN)
        tile_m, tile_n, tile_k = self.each(fields["tile"], f"{path}.tile", self.extent, 3)
        fallback = fields["fallback_cluster"]
        return KernelDesign(
            tile=(tile_m, tile_n, tile_k),
            ctas_per_tile=self.number(fields["ctas_per_tile"], f"{path}.ctas_per_tile", 1, 2),
            cluster=self.pair(fields["cluster"], f"{path}.cluster"),
            fallback_cluster=None
            if fallback is None
            else self.pair(fallback, f"{path}.fallback_cluster"),
            scheduler=self.text(fields["scheduler"], f"{path}.scheduler"),
            swapped=self.flag(fields.get("swapped", False), f"{path}.swapped"),
            splits=self.extent(fields.get("splits", 1), f"{path}.splits"),
            dependent_launch=self.flag(
                fields.get("dependent_launch", False), f"{path}.dependent_launch"
            ),
            cluster_limits=self.each(
                fields["cluster_limits"], f"{path}.cluster_limits", self.cluster_limit
            ),
        )

    def cluster_limit(self, value: Any, path: str) -> ClusterLimit:
        """Reads a cluster limit."""
        fields = self.fields(value, path, _CLUSTER_LIMIT)
        return ClusterLimit(
            cluster_size=self.number(fields["cluster_size"], f"{path}.cluster_size", least=1),
            max_active=self.number(fields["max_active"], f"{path}.max_active", least=1),
            basis=self.text(fields["basis"], f"{path}.basis"),
        )

    def source(self, value: Any, path: str) -> RankingSource | str:
        """Reads a source, or returns the reason that it is not understood."""
        fields = self.fields(value, path, frozenset())
        why = self.unknown_features(fields, path)
        if why is not None:
            return why
        self.fields(fields, path, _SOURCE)
        conditions = None
        if "conditions" in fields:
            conditions = self.conditions(fields["conditions"], f"{path}.conditions")
        return RankingSource(
            kind=self.text(fields["kind"], f"{path}.kind"),
            by=self.text(fields["by"], f"{path}.by"),
            gpu=self.text(fields["gpu"], f"{path}.gpu"),
            conditions=conditions,
        )

    def conditions(self, value: Any, path: str) -> Conditions:
        """Reads measuring conditions."""
        texts = self.texts(value, path, _CONDITIONS)
        gpu = value.get("gpu_sha256")
        return Conditions(
            **texts,
            launches=self.text(value.get("launches", BACK_TO_BACK), f"{path}.launches"),
            gpu_sha256=self.digest(gpu, f"{path}.gpu_sha256") if "gpu_sha256" in value else None,
        )

    def ranking(self, value: Any, path: str) -> Ranking | UnknownEntry:
        """Reads a ranking; its kernel positions count unknown kernels too."""
        fields = self.fields(value, path, frozenset({"problem"}))
        is_further = DEVICE_RANKING in self.features(fields, path)
        key, problem = self.problem(fields, path, is_further=is_further)
        if isinstance(problem, str):
            return UnknownEntry(problem=key, why=problem)
        product = key.partition(ON)[2] if is_further else None
        if product == "":
            self.refuse(f"{path}.problem", f"PROBLEM{ON}PRODUCT", key)
        self.fields(fields, path, _RANKING)
        is_declared = self.version == 1 or "declared" not in fields
        if not is_declared and fields["declared"] is not False:
            self.refuse(f"{path}.declared", "false, or absent", fields["declared"])
        if not is_declared and "measured" not in fields:
            self.fail("header-field", f"{path}.declared requires measured (got false alone)")
        return Ranking(
            problem=problem,
            source=self.number(fields["source"], f"{path}.source"),
            kernels=self.each(fields["kernels"], f"{path}.kernels", self.ranked),
            measured=self.measured(fields["measured"], f"{path}.measured")
            if "measured" in fields
            else None,
            missing=self.each(
                self.optional_list(fields, "missing"), f"{path}.missing", self.number
            ),
            is_declared=is_declared,
            product=product,
        )

    def ranked(self, value: Any, path: str) -> Ranked:
        """Reads a ranking's entry for a kernel."""
        kernel, time_ns = self.items(value, path, length=2)
        return Ranked(
            kernel=self.number(kernel, f"{path}.kernel"),
            time_ns=None if time_ns is None else self.number(time_ns, f"{path}.time_ns", least=1),
        )

    def measured(self, value: Any, path: str) -> Measured:
        """Reads a measurement."""
        fields = self.fields(value, path, _MEASURED)
        confirming = self.each(fields.get("confirmed_by", []), f"{path}.confirmed_by", self.digest)
        if "confirmed_by" in fields and not confirming:
            allowed = f"absent, or {LEAST_CONFIRMING} digests or more"
            self.refuse(f"{path}.confirmed_by", allowed, fields["confirmed_by"])
        repeated = None
        if "repeated" in fields:
            repeated = self.number(fields["repeated"], f"{path}.repeated", least=LEAST_REPEAT_S)
        return Measured(
            spreads_ns=self.each(fields["spreads_ns"], f"{path}.spreads_ns", self.number),
            aten=self.timing(fields["aten"], f"{path}.aten"),
            triton=self.timing(fields["triton"], f"{path}.triton"),
            doubts=self.each(fields["doubts"], f"{path}.doubts", self.text),
            confirmed_by=confirming,
            repeated=repeated,
        )

    def timing(self, value: Any, path: str) -> Timing | None:
        """Reads a timing, or None."""
        if value is None:
            return None
        time_ns, spread_ns = self.items(value, path, length=2)
        return Timing(
            time_ns=self.number(time_ns, f"{path}.time_ns", least=1),
            spread_ns=self.number(spread_ns, f"{path}.spread_ns"),
        )

    def unserved(self, value: Any) -> tuple[tuple[Problem, UnservedReason] | UnknownEntry, ...]:
        """Reads problems without a kernel, in file order."""
        if self.version > 1:
            return self.each(value, "unserved", self.unserved_entry)
        texts = self.fields(value, "unserved", frozenset())  # sorted by text
        entries = [
            self.unserved_entry({"problem": key, "reason": reason}, f"unserved.{key:.80}")
            for key, reason in texts.items()
        ]
        known_entries = sorted(
            (entry for entry in entries if isinstance(entry, tuple)), key=lambda entry: entry[0]
        )
        return (*known_entries, *(entry for entry in entries if isinstance(entry, UnknownEntry)))

    def unserved_entry(
        self, value: Any, path: str
    ) -> tuple[Problem, UnservedReason] | UnknownEntry:
        """Reads a problem without a kernel, with the reason."""
        fields = self.fields(value, path, _UNSERVED)
        key, problem = self.problem(fields, path)
        reason = self.text(fields["reason"], f"{path}.reason")
        if isinstance(problem, str):
            return UnknownEntry(problem=key, why=problem)
        scope = self.text(fields["scope"], f"{path}.scope") if "scope" in fields else None
        known_scope = Scope(scope) if scope in _SCOPES else None
        return problem, UnservedReason(text=reason, scope=known_scope)


_SCOPES = frozenset(scope.value for scope in Scope)


def _canonical_or_none(value: Any) -> bytes | None:
    """Returns the canonical form, or None if there is none (a NaN, a lone surrogate)."""
    try:
        return canonical_json(value)
    except (ValueError, RecursionError):
        return None
