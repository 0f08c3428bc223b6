"""Lists and objects of a request whose validation costs little, whatever their values are.

pydantic makes an error per wrong item and per branch of a union: 524,288 fractions instead of token ids made 1.6
million errors, and held the event loop for 10 s (AMD EPYC, one core). Here the first wrong item ends a list, and the
first item decides which branch of a union is validated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from .....proto.sampling import MAX_ALLOWED_TOKEN_IDS
from ....text.requests.json_values import MAX_ITEMS, MAX_VALUES, has_more_values

# Far above the limits that the service has for each field and names in its errors.
MAX_ENTRIES = 16_384

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Bounded:
    """Annotation of a list or a dictionary, whose validation ends with the first error."""

    max_length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "max_length": self.max_length, "fail_fast": True}


@dataclass(frozen=True)
class ByFirstItem:
    """Annotation of a union, of which one branch is validated: that of the value's type and of its first item's."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        branches: dict[str, Any] = {}
        for branch in handler(source)["choices"]:
            tag = _tag(branch)
            branches[tag] = branch
            # Of a list that is empty, or whose first item has another type.
            branches.setdefault(tag.partition(" ")[0], branch)
        names = [_NAMES[name] for name in branches if name in _NAMES]
        return core_schema.tagged_union_schema(
            # Tags are no identifiers, so that errors do not have them in the names of fields.
            {f"a {name}": branch for name, branch in branches.items()},
            lambda value: next((f"a {name}" for name in _tags(value) if name in branches), None),
            custom_error_type="type",
            custom_error_message=f"Input should be a valid {' or '.join(names)}",
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        branches = {id(branch): branch for branch in schema["choices"].values()}
        return handler(core_schema.union_schema(list(branches.values())))


# Name of a core schema |-> name in errors.
_NAMES = {"str": "string", "list": "list", "dict": "dictionary"}
_TYPES = {str: "str", bool: "int", int: "int", float: "int", list: "list", dict: "dict"}


def _tag(branch: CoreSchema) -> str:
    """Return the type of a branch, with that of its items."""
    kind = branch["type"]
    if kind.startswith("function-"):
        return _tag(branch["schema"])
    return f"{kind} of {branch['items_schema']['type']}" if kind == "list" else kind


def _tags(value: Any) -> list[str]:
    """Return the branches for a value, the best one first."""
    kind = _TYPES.get(type(value), "")
    if kind != "list":
        return [kind]
    return [f"list of {_TYPES.get(type(value[0]), '')}" if value else kind, kind]


def _check_num_values(value: Any) -> Any:
    if has_more_values(value, MAX_VALUES):
        raise ValueError(f"has more than {MAX_VALUES} values")
    return value


Entries = Annotated[list[T], Bounded(MAX_ENTRIES)]
Members = Annotated[dict[K, V], Bounded(MAX_ENTRIES)]
# Of any values, also those that no schema describes.
Limited = Annotated[T, BeforeValidator(_check_num_values)]
JsonObject = Limited[dict[str, Any]]
JsonObjects = Limited[Entries[dict[str, Any]]]
TokenIds = Annotated[list[int], Bounded(MAX_ITEMS)]
# Some may be repeats.
AllowedTokenIds = Annotated[list[int], Bounded(2 * MAX_ALLOWED_TOKEN_IDS)]
Prompts = Annotated[str | TokenIds | Entries[str] | Entries[TokenIds], ByFirstItem()]
Texts = Annotated[str | Entries[str], ByFirstItem()]
TextOrObjects = Annotated[str | JsonObjects, ByFirstItem()]
TextOrObject = Annotated[str | JsonObject, ByFirstItem()]
Word = Annotated[str | Entries[int], ByFirstItem()]
