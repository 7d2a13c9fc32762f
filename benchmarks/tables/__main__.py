"""Renews tables in documents."""

from __future__ import annotations

import click

from benchmarks.record import read_all
from benchmarks.tables.pages import BLOCKS, ROOT, block, pages, renewed
from benchmarks.tables.selection import Selection


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail if a table is not up to date.")
@click.option("--print", "name", type=click.Choice(sorted(BLOCKS)), help="Print one block.")
def main(check: bool, name: str | None) -> None:
    """Renew generated tables from benchmarks/results."""
    records = Selection(read_all())
    if name is not None:
        click.echo(block(name, records))
        return
    stale = []
    for page in pages():
        text = page.read_text("utf-8")
        new = renewed(text, records)
        if new != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new, "utf-8")
    for path in stale:
        click.echo(f"{path}: {'differs from benchmarks/results' if check else 'renewed'}")
    if stale and check:
        raise click.ClickException("run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
