"""The remote cache in documents and texts of commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .printing import size_text

if TYPE_CHECKING:
    from ...storage.remote.remote_cache import RemoteCache


@contextlib.contextmanager
def open_remote_cache() -> Iterator[RemoteCache | None]:
    """Yields the remote cache that the environment names, or None; waits for what is being sent."""
    from ...storage.remote.remote_cache import open_remote

    remote = open_remote()
    if remote is None:
        yield None
        return
    with remote:
        yield remote


def remote_document(remote: RemoteCache | None) -> dict[str, Any] | None:
    """Describes what a remote cache did, after everything is sent."""
    if remote is None:
        return None
    remote.flush()
    counts = remote.statistics
    return {
        "address": counts.address,
        "reads": remote.trust.reads,
        "writes": remote.trust.writes,
        "hits": counts.hits,
        "misses": counts.misses,
        "refused": dict(counts.refused),
        "pushed": counts.pushed,
        "bytes_down": counts.bytes_down,
        "bytes_up": counts.bytes_up,
        "seconds": round(counts.seconds, 3),
        "off": counts.off,
        "unwritten": counts.unwritten,
    }


def remote_line(document: dict[str, Any] | None) -> list[str]:
    """Renders what a remote cache did, in one line; nothing without one."""
    if document is None:
        return []
    refused = sum(document["refused"].values())
    parts = [
        *(
            [
                f"{document['hits']} fetched ({size_text(document['bytes_down'])})",
                f"{document['misses']} not there",
            ]
            if document["reads"]
            else ["not read"]
        ),
        *([f"{refused} refused"] if refused else []),
        f"{document['pushed']} sent ({size_text(document['bytes_up'])})"
        if document["writes"]
        else "not written",
        f"{document['seconds']:.1f} s waited",
    ]
    ending = "; given up" if document["off"] else ""
    return [f"remote cache {document['address']}: {', '.join(parts)}{ending}"]


def state_document(remote: RemoteCache) -> dict[str, Any]:
    """Describes a remote cache's state, after a read and, where this process writes, a write."""
    reason = remote.probe()
    unwritten = remote.probe_writing() if reason is None and remote.trust.writes else None
    policy = remote.trust.policy
    return {
        "address": remote.address,
        "reachable": reason is None,
        "reason": reason,
        "reads": remote.trust.reads,
        "writes": remote.trust.writes,
        "unwritten": unwritten,
        "trusts": (
            f"the keys of {policy.path}: {', '.join(key.name for key in policy.keys.values())}"
            if policy is not None
            else "everyone who can write it"
            if remote.trust.trusts_store
            else None
        ),
        "signs_with": None if remote.trust.key is None else repr(remote.trust.key),
    }


def state_text(document: dict[str, Any]) -> str:
    """Renders a remote cache's state."""
    answer = "answers" if document["reachable"] else f"does not answer: {document['reason']}"
    trust = document["trusts"] or "nobody: no policy, and the store is not trusted"
    writes = "yes" if document["writes"] else "no"
    if document["writes"]:
        writes += ", signed" if document["signs_with"] else ", unsigned"
    if document["unwritten"]:
        writes = f"no: {document['unwritten']}"
    return "\n".join(
        (
            f"{document['address']} {answer}",
            f"read: {'yes' if document['reads'] else 'no'}; trusts {trust}",
            f"written: {writes}",
        )
    )
