"""The command line's reference, from click's own description of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc

import click

from nvgemm_aot.cli.main import main

from .tables import table

PROGRAM = "nvgemm-aot"


def section() -> str:
    """Usage, help and options of every command, each under a heading of its own."""
    return "\n\n".join(_command(context) for context in contexts())


def contexts() -> Iterator[click.Context]:
    """A context for the group and for every command in it, in the order of ``--help``."""
    yield from _below(click.Context(main, info_name=PROGRAM, **main.context_settings))


def _below(context: click.Context) -> Iterator[click.Context]:
    yield context
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _below(click.Context(child, info_name=name, parent=context))


def _command(context: click.Context) -> str:
    level = 2 + context.command_path.count(" ")
    parts = [
        f"{'#' * level} {context.command_path}",
        f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```",
        *_paragraphs(context.command.help or ""),
    ]
    records = [
        parameter.get_help_record(context)
        for parameter in context.command.get_params(context)
        if isinstance(parameter, click.Option)  # arguments are named in the text
    ]
    rows = [(f"`{names}`", text) for names, text in filter(None, records)]
    if rows:
        parts.append(table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those that click does not rewrap are blocks of code here."""
    for paragraph in re.split(r"\n\s*\n", cleandoc(text)):
        if paragraph.startswith("\b"):
            yield f"```text\n{cleandoc(paragraph[1:])}\n```"
        else:
            yield paragraph
