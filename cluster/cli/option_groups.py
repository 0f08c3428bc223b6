"""Command-line options from declared options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ...proto.options.option import Option, declared_options
from ...proto.options.values import OneOf

Command = Callable[..., None]


def with_options(**groups: tuple[type, ...]) -> Callable[[Command], Command]:
    """Add the options that dataclasses declare to a command.

    The command gets each group under its name, as a dictionary of the options that its user gave: without the
    defaults, and not yet read as values. The command's own parameters must have annotations that are objects, so its
    module must not import annotations from __future__.

    Args:
        groups: the name of a parameter of the command |-> the dataclasses whose options it takes.
    """

    def decorate(command: Command) -> Command:
        options = {group: _options(owners) for group, owners in groups.items()}

        def run(context: typer.Context, **values: Any) -> None:
            for group, declared in options.items():
                given = {option.name: values.pop(option.name) for option in declared}
                values[group] = {name: value for name, value in given.items() if _is_given(context, name)}
            command(**values)

        own = [each for each in inspect.signature(command).parameters.values() if each.name not in groups]
        derived = [_parameter(option) for declared in options.values() for option in declared]
        context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
        parameters = [context, *(each.replace(kind=_KEYWORD) for each in own), *derived]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options(owners: tuple[type, ...]) -> list[Option]:
    return [option for owner in owners for option in declared_options(owner).values()]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parameter(option: Option) -> inspect.Parameter:
    flags = () if option.flag is None else (option.flag,)
    metavar = option.metavar or option.unit.upper() or None
    completion = _completion(option.check.choices) if isinstance(option.check, OneOf) else None
    info = typer.Option(
        *flags, help=option.help, metavar=metavar, rich_help_panel=option.group, autocompletion=completion
    )
    plain = list[str] if option.kind.is_repeated else option.kind.cli_type
    default = None if option.kind.is_repeated else option.default
    annotation: Any = plain if default is not None else plain | None
    return inspect.Parameter(option.name, _KEYWORD, default=default, annotation=Annotated[annotation, info])


def _completion(choices: tuple[str, ...]) -> Callable[[], list[str]]:
    """Return the function that a shell's completion of the option's value calls."""

    def complete() -> list[str]:
        return list(choices)

    return complete
