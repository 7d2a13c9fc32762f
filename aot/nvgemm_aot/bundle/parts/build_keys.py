"""Build keys for bundles that are made from other bundles."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import Any

from nvgemm_runtime.bundle.encode import measured_json, source_json, unserved_json
from nvgemm_runtime.bundle.format import canonical_json, sha256_hex

from ..compression import Packed
from ..content import BundleContent


def content_document(content: BundleContent) -> dict[str, Any]:
    """Returns what a content holds, in an order of its own, as JSON."""
    return {
        "generator": content.generator,
        "target": content.target.key,
        "toolchain": content.toolchain,
        "kernels": sorted(kernel.id for kernel in content.kernels),
        "rankings": [
            [
                ranking.problem.key,
                source_json(ranking.source),
                ranking.kernels,
                ranking.measured and measured_json(ranking.measured),
                [asdict(failure) for failure in ranking.missing],
                *([] if ranking.is_declared else ["not declared"]),
                *(["further"] if ranking.is_further else []),
            ]
            for ranking in sorted(
                content.rankings, key=lambda ranking: (ranking.problem.key, ranking.gpu)
            )
        ],
        "unserved": unserved_json(content.unserved),
    }


def with_own_key(content: BundleContent, packed: Packed) -> BundleContent:
    """Sets a build key that depends on the bundle's bytes alone."""
    body = hashlib.sha256(packed.dictionary_frame)
    for frame in packed.frames:
        body.update(frame)
    document = {
        "body": body.hexdigest(),
        "devices": content.devices,
        "part_of": [[whole.build_key, whole.prefix_sha256] for whole in content.part_of],
        "facts": sorted(
            [kernel.id, kernel.operator, repr(kernel.design)] for kernel in content.kernels
        ),
        **content_document(content),
    }
    return replace(content, build_key=sha256_hex(canonical_json(document)))
