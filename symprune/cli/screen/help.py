"""The help of a command on a narrow terminal: a list, where Typer's table would cut names short."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from typing import Any

import click
import typer
from rich.errors import MarkupError
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from symprune.cli.screen.fitted_table import LIST_BELOW, wrap

INDENT = "    "
BESIDE = 36  # columns that are left for what an option does, and for lines and spaces


class App(typer.Typer):
    """A Typer application whose help is whole in any width."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": Group, **settings})

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=cls or Command, **settings)


class Command(TyperCommand):
    """A command with that help."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not write_narrow(self, ctx, formatter):
            super().format_help(ctx, formatter)


class Group(TyperGroup):
    """Commands with that help."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not write_narrow(self, ctx, formatter):
            super().format_help(ctx, formatter)


def write_narrow(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> bool:
    """Write the help as a list, if the terminal is narrow for it; whether it is."""
    width = shutil.get_terminal_size().columns
    if width >= max(LIST_BELOW, _measure_names(command, ctx) + BESIDE):
        return False
    usage = " ".join((ctx.command_path, *command.collect_usage_pieces(ctx)))
    parts = [wrap(f"Usage: {usage}", width)]
    parts += [wrap(_plain(each), width) for each in _paragraphs(command.help)]
    for title, entries in _panels(command, ctx).items():
        lines = [wrap(title, width)]
        for name, about in entries:
            lines += [wrap(name, width, INDENT[:2]), wrap(_plain(about), width, INDENT)]
        parts.append("\n".join(line for line in lines if line.strip()))
    formatter.write("\n\n".join(parts) + "\n")
    return True


def _measure_names(command: click.Command, ctx: click.Context) -> int:
    """Columns that Typer's widest table needs for what options are called and take."""
    panels: dict[str | None, list[int]] = {}
    for each in command.get_params(ctx):
        if isinstance(each, click.Option):
            short = [name for name in each.opts if not name.startswith("--")]
            long = [name for name in each.opts if name.startswith("--")]
            taken = "" if each.is_flag else each.make_metavar(ctx=ctx) or ""
            found = [sum(map(len, names)) for names in (short, long, each.secondary_opts, [taken])]
            most = panels.setdefault(getattr(each, "rich_help_panel", None), [0] * len(found))
            most[:] = map(max, most, found)
    return max(map(sum, panels.values()), default=0)


def _paragraphs(text: str | None) -> list[str]:
    found = inspect.cleandoc(text or "").partition("\f")[0].split("\n\n")
    return [" ".join(each.split()) for each in found if each.strip()]


def _panels(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Headings, and what is listed below each: names, and what they are."""
    found: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        kind = "Arguments" if isinstance(parameter, click.Argument) else "Options"
        title = getattr(parameter, "rich_help_panel", None) or kind
        entry = parameter.get_help_record(ctx)
        if entry is not None:
            found.setdefault(title, []).append(entry)
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            about = " ".join(_paragraphs(below.help)[:1])
            found.setdefault("Commands", []).append((name, about))
    return found


def _plain(text: str) -> str:
    """Without the marks of styles."""
    try:
        return Text.from_markup(text).plain
    except MarkupError:
        return text
