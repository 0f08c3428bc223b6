"""Help pages as plain text: names of options are never cut, however narrow the terminal is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

_ARGUMENTS, _OPTIONS, _COMMANDS = "Arguments", "Options", "Commands"
# Characters of a command's description, which is one sentence.
_SHORT_HELP = 200


class Command(TyperCommand):
    """A command whose help groups the options as they are declared."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, and one section per group."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        _write_sections(_sections(self.get_params(ctx), ctx), formatter)


class Group(TyperGroup):
    """The command `quire` itself."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options and commands."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(_SHORT_HELP)) for name, command in commands if command]
        _write_sections(_sections(self.get_params(ctx), ctx) | {_COMMANDS: rows}, formatter)


def _write_sections(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl(rows)


def _sections(parameters: Iterable[Any], ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return title |-> (name with placeholder, description) of each parameter."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        row = parameter.get_help_record(ctx)
        if row is not None:
            kind = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(row)
    return sections
