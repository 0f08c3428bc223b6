"""One declaration per option: dataclass fields with metadata, and everything that is derived from them.

An option is a field of a frozen dataclass::

    @dataclass(frozen=True, kw_only=True)
    class SchedulerOptions:
        max_num_seqs: int = option(64, help="Sequences that run at once.", unit="sequences", check=positive)

From the declaration follow its command-line option (`cli.option_groups`), its entry in a fleet file, its environment
variable and its keyword argument of LLM. A module of declarations must not have
``from __future__ import annotations``: the annotations are used as objects.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args

from ..errors import ConfigError
from .values import KIND_OF, Check, OneOf, ValueKind, show

_METADATA = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A declared option.

    Attributes:
        name: the field, the key in a fleet file and the keyword argument.
        annotation: the type of its values.
        default: its value if nothing sets it; immutable.
        summary: one or two sentences, without the choices of a `one_of` check.
        unit: what a number counts, in the plural, for example ``tokens``; empty if it counts nothing.
        group: the panel of ``--help`` that shows it.
        check: what is allowed beyond the type; None if everything is.
        flag: its name on the command line; None for ``--`` and the name with hyphens.
        metavar: the form of its text; None for the unit.
    """

    name: str
    annotation: Any
    default: Any
    kind: ValueKind
    summary: str
    unit: str
    group: str
    check: Check | None
    flag: str | None
    metavar: str | None

    @property
    def is_optional(self) -> bool:
        return NoneType in get_args(self.annotation)

    @property
    def help(self) -> str:
        """The summary, and the choices if there is a fixed set."""
        choices = self.check.choices if isinstance(self.check, OneOf) else ()
        return f"{self.summary} One of: {', '.join(choices)}." if choices else self.summary

    @property
    def variable(self) -> str:
        """The environment variable, for example ``QUIRE_MAX_NUM_SEQS``."""
        return f"QUIRE_{self.name.upper()}"

    def read(self, value: Any) -> Any:
        """Return a plain value as the option's type. Raises ConfigError if it has another type."""
        if value is None and self.is_optional:
            return None
        try:
            return self.kind.read(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name} is {show(value)}, must be {self.kind.words}") from error

    def parse(self, text: str) -> Any:
        """Return the value of an environment variable. Raises ConfigError, with the variable's name."""
        try:
            value = self.kind.read(self.kind.split(text))
        except ValueError as error:
            raise ConfigError(f"{self.variable} is {text!r}, must be {self.kind.words}") from error
        except ConfigError as error:
            raise ConfigError(f"{self.variable}: {error}") from error
        if problem := self.problem(value, self.variable):
            raise ConfigError(problem)
        return value

    def problem(self, value: Any, name: str | None = None) -> str | None:
        """Return why the value is not allowed; None if it is."""
        if value is None or self.check is None:
            return None
        return self.check(name or self.name, value)


def option(
    default: Any,
    *,
    help: str,
    group: str,
    unit: str = "",
    check: Check | None = None,
    kind: ValueKind | None = None,
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        kind: how text becomes a value; None for the annotation's own kind.

    The other arguments are attributes of `Option`.
    """
    declaration = {
        "summary": help, "unit": unit, "group": group, "check": check, "kind": kind, "flag": flag, "metavar": metavar,
    }  # fmt: skip
    return field(default=default, metadata={_METADATA: declaration})


def with_check(owner: type, name: str, check: Check) -> Any:
    """Declare an option of a base class again, with a check that the module of the base cannot know."""
    declared = next(each for each in fields(owner) if each.name == name)
    return field(
        default=declared.default, metadata={_METADATA: declared.metadata[_METADATA] | {"check": check}}
    )


def declared_options(owner: type) -> Mapping[str, Option]:
    """Return the options that are fields of the dataclass, by name, in order.

    Raises:
        TypeError: an annotation is a string or has no kind of its own.
    """
    return _options_of(owner)


@cache
def _options_of(owner: type) -> Mapping[str, Option]:
    """Return the options. Kept, because the controller asks for a deployment's version many times per second."""
    return {each.name: _declared(owner, each) for each in fields(owner) if _METADATA in each.metadata}


def _declared(owner: type, declared: Field[Any]) -> Option:
    declaration, annotation = dict(declared.metadata[_METADATA]), declared.type
    if isinstance(annotation, str):
        raise TypeError(f"{owner.__module__} must not import annotations from __future__")
    kind = declaration.pop("kind") or _kind_of(annotation)
    if kind is None:
        raise TypeError(f"{owner.__name__}.{declared.name} is {annotation}, which needs a ValueKind")
    return Option(
        name=declared.name, annotation=annotation, default=declared.default, kind=kind, **declaration
    )


def _kind_of(annotation: Any) -> ValueKind | None:
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    plain = [each for each in kinds if each is not NoneType]
    return KIND_OF.get(plain[0]) if len(plain) == 1 else None


def validate_options(options: Any) -> None:
    """Read and check each declared option of a dataclass instance, for its ``__post_init__``.

    Raises:
        ConfigError: values have the wrong type or are not allowed; the message names all of them.
    """
    problems = []
    for name, option in declared_options(type(options)).items():
        try:
            value = option.read(getattr(options, name))
        except ConfigError as error:
            problems.append(str(error))
            continue
        object.__setattr__(options, name, value)
        if problem := option.problem(value):
            problems.append(problem)
    if problems:
        raise ConfigError.of(problems)


def check_names(names: Iterable[str], subject: str, known: Iterable[str]) -> None:
    """Raises ConfigError on a name that is not known, with the closest one that is."""
    known = set(known)
    for name in sorted(set(names) - known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"there is no option {name!r} of {subject}{hint}")


def select_options(owner: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a table that are options of the dataclass, as arguments of its constructor."""
    return {name: table[name] for name in declared_options(owner) if name in table}


def write_table(options: Any) -> dict[str, Any]:
    """Return the declared options of a dataclass instance as plain values, which its constructor accepts."""
    values = ((option, getattr(options, name)) for name, option in declared_options(type(options)).items())
    return {option.name: None if value is None else option.kind.write(value) for option, value in values}


def read_environment(environment: Mapping[str, str], *owners: type) -> dict[str, Any]:
    """Return the options that variables set, by name. Other variables, and empty ones, are ignored.

    Raises:
        ConfigError: a variable has a value that its option cannot have.
    """
    return {
        option.name: option.parse(environment[option.variable])
        for owner in owners
        for option in declared_options(owner).values()
        if environment.get(option.variable)
    }


def keyword_parameters(owner: type, defaults: Mapping[str, Any] | None = None) -> Iterator[inspect.Parameter]:
    """Yield a keyword parameter per declared option, for the signature of a function that takes ``**options``.

    Args:
        defaults: defaults that differ from the declared ones.
    """
    for name, option in declared_options(owner).items():
        default = (defaults or {}).get(name, option.default)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option.annotation
        )
