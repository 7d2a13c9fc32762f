"""``nvgemm-aot keygen`` and ``nvgemm-aot sign``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nvgemm_runtime.settings import SIGNING_KEY_VARIABLE

from ..terminal.printing import print_result
from ..terminal.shared_options import ANY_PATH, json_option

Document = dict[str, Any]


@click.command()
@click.argument("out", type=ANY_PATH)
@json_option
def keygen(out: Path, as_json: bool) -> None:
    """Make a key to sign with: write the private key to OUT and print the public one.

    OUT is a new file, in PEM, that only this user can read. The output is an entry for `keys` in a
    policy.
    """
    from ...storage.private_key import make_key

    public = make_key(out).public_text
    print_result(
        {"path": str(out), "name": out.stem, "ed25519": public}, _key_text, as_json=as_json
    )


def _key_text(document: Document) -> str:
    import yaml

    entry = [{name: document[name] for name in ("name", "ed25519")}]
    return str(yaml.safe_dump(entry, sort_keys=False, width=1000, allow_unicode=True)).rstrip()


@click.command()
@click.argument("files", type=ANY_PATH, nargs=-1, required=True)
@click.option(
    "--key", type=ANY_PATH, help=f"File with the private key; default ${SIGNING_KEY_VARIABLE}."
)
@json_option
def sign(files: tuple[Path, ...], key: Path | None, as_json: bool) -> None:
    """Sign FILES: bundles, rankings files, and confirmations.

    Writes FILE.sig beside each. Another key adds its signature, and the same key replaces its own.
    A wheel is not signed itself: sign bundles and confirmations before `nvgemm-aot wheel`, which
    packs the signatures beside them.

    Nothing is signed unless all FILES are intact.
    """
    from ...storage.private_key import environment_key, read_key
    from .signed_by import signatures_text
    from .written import sign_files

    signing_key = read_key(key) if key else environment_key()
    if signing_key is None:
        raise click.UsageError(
            f"name the private key with --key or {SIGNING_KEY_VARIABLE}; to make one, run: "
            "nvgemm-aot keygen"
        )
    documents = sign_files(files, signing_key)
    print_result(
        documents,
        lambda signed: "\n".join(
            f"{one['signature_file']}: written, {signatures_text(one)}" for one in signed
        ),
        as_json=as_json,
    )
