"""Groups of options that several commands share: a function each, whose parameters are the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from typing import Any

Group = Callable[..., Any]


def with_options(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command gets each group's result under the group's name, and its options are the groups' beside its own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            for name, group in groups.items():
                options = inspect.signature(group).parameters
                values[name] = group(**{option: values.pop(option) for option in options})
            command(**values)

        parameters = [*_parameters(command, leave_out=groups)]
        for group in groups.values():
            parameters += _parameters(group)
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(function: Callable[..., Any], leave_out: Container[str] = ()) -> Iterator[inspect.Parameter]:
    """The function's parameters with their annotations as objects, as typer wants them."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in leave_out:
            # Not typing.get_type_hints: the others' types may be known to type checkers alone.
            annotation = eval(parameter.annotation, function.__globals__)
            yield parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)


def changed(group: Group, result: dict[str, Any]) -> list[str]:
    """The entries of a group's result that differ from those without any option given."""
    usual = group()
    return [name for name, value in result.items() if value != usual[name]]
