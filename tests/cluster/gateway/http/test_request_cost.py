"""The cost of reading a request, whatever types its values have: of every field of every body."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from quire.cluster.gateway.http import server  # noqa: F401  (the endpoints define some of the bodies)
from quire.cluster.gateway.http.errors import describe_validation_error
from quire.cluster.gateway.http.schema.bounded import MAX_ENTRIES
from quire.cluster.gateway.http.schema.completion import CompletionRequest
from quire.cluster.gateway.http.schema.request_model import RequestModel
from quire.cluster.text.requests.json_values import MAX_ITEMS, MAX_PARTS
from quire.proto.errors import InvalidRequest

Schema = Mapping[str, Any]

# In times of parsing a body of MAX_ITEMS small numbers, which takes 12 ms on an idle core. Bodies whose values were
# not bounded took 100 to 5,000 times as long.
MAX_COST = 4.0
# Where other processes take the caches, one measurement in a thousand is twice as long as usual.
MAX_TRIES = 20
MAX_ERROR_CHARS = 2000

# Values of any body that passes JsonSize.
ITEMS = [1, 1.5, None, True, 10**30, "", "x", "1", [], [1], {}, {"x": 1}]
HUGE = ["x" * (16 << 20), "\ud800" * (1 << 20), 10**4200, -0.5]


def wide(item: Any) -> list[Any]:
    """As many of an item as a body can have."""
    return [item] * (MAX_PARTS // 2 if isinstance(item, str | list | dict) else MAX_ITEMS)


def members(item: Any) -> dict[str, Any]:
    return {str(index): item for index in range(MAX_PARTS // 2)}


WRONG = [*HUGE, *map(wide, ITEMS), *map(members, ITEMS), [wide(1.5)], [wide([])], {"x": wide(None)}]


def all_bodies(base: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    for body in base.__subclasses__():
        yield body
        yield from all_bodies(body)


def sample(schema: Schema) -> Any:
    """Return a small valid value of a schema without references."""
    if "anyOf" in schema:
        return sample(schema["anyOf"][0])
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        return {name: sample(schema["properties"][name]) for name in schema.get("required", ())}
    if schema.get("type") == "array":
        return [sample(schema["items"])]
    return {"string": "x", "integer": 1, "number": 1, "boolean": True}.get(schema.get("type", ""))


def values(schema: Schema) -> Iterator[Any]:
    """Yield large values at the place of a schema, and at each place in it."""
    yield from WRONG
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == "array":
            right = sample(branch["items"])
            yield wide(right)[: branch["maxItems"]]
            yield [right, *wide(right)]
            yield from ([right, *wide(item)] for item in ITEMS)
            yield from ([right, value] for value in values(branch["items"]))
        elif branch.get("type") == "object":
            for name, member in branch.get("properties", {}).items():
                yield from (sample(branch) | {name: value} for value in values(member))
            if isinstance(branch.get("additionalProperties"), dict):
                right = members(sample(branch["additionalProperties"]))
                yield right
                yield dict(islice(right.items(), branch["maxProperties"]))


def resolved(schema: Any, definitions: Schema) -> Any:
    """Return a schema with its definitions in place of the references."""
    if isinstance(schema, list):
        return [resolved(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: resolved(each, definitions) for name, each in schema.items() if name != "$defs"}


def schema_of(body: type[BaseModel]) -> Schema:
    schema = body.model_json_schema(by_alias=False)
    return resolved(schema, schema.get("$defs", {}))


def fields() -> dict[str, tuple[type[RequestModel], Schema, Schema]]:
    """Field |-> (a body that has it, the body's schema, the field's schema), each field of several bodies once."""
    found = {}
    for body in all_bodies():
        schema = schema_of(body)
        for name, place in schema["properties"].items():
            owner = next(each for each in reversed(body.__mro__) if name in getattr(each, "model_fields", ()))
            found[f"{owner.__name__}.{name}"] = body, schema, place
    return found


FIELDS = fields()


def read(body: type[RequestModel], given: Mapping[str, Any]) -> None:
    """Do what an endpoint does with a parsed body before anything runs beside the event loop.

    Raises:
        InvalidRequest: the body is not valid.
    """
    try:
        request = body.model_validate(given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        assert len(problems) <= 2, "only a message may lack several members"
        raise describe_validation_error(RequestValidationError(problems)) from None
    for name in ("prompts", "pairs", "texts", "field_names"):
        getattr(request, name, None)
    for name in ("sampling", "pooling", "messages"):
        if callable(prepare := getattr(request, name, None)):
            prepare()
    if hasattr(request, "chat"):
        request.chat([]) if hasattr(request, "messages") and callable(request.messages) else request.chat()


def outcome(body: type[RequestModel], given: Mapping[str, Any]) -> str:
    try:
        read(body, given)
    except InvalidRequest as error:
        return str(error)
    return ""


def cost_s(work: Callable[[], object]) -> float:
    """Return the processor time of this thread, which others do not lengthen."""
    before = time.thread_time()
    work()
    return time.thread_time() - before


UNIT = json.dumps(wide(1))


def unit_s() -> float:
    return min(cost_s(partial(json.loads, UNIT)) for _ in range(5))


def least_cost(work: Callable[[], object], unit: float) -> float:
    """Return the least cost of several tries, up to the first within the limit."""
    cost = cost_s(work) / unit
    for _ in range(MAX_TRIES - 1):
        if cost <= MAX_COST:
            break
        cost = min(cost, cost_s(work) / unit_s())
    return cost


@pytest.mark.parametrize("field", FIELDS)
def test_field_costs_little_with_values_of_any_type(field: str) -> None:
    body, schema, place = FIELDS[field]
    valid, name, unit = sample(schema), field.partition(".")[2], unit_s()
    for value in values(place):
        given = valid | {name: value}
        cost = least_cost(partial(outcome, body, given), unit)
        assert cost <= MAX_COST, (str(value)[:80], outcome(body, given)[:200])
        assert len(outcome(body, given)) <= MAX_ERROR_CHARS


def lists_and_objects(schema: Any) -> Iterator[Schema]:
    if isinstance(schema, dict):
        if schema.get("type") == "array" or isinstance(schema.get("additionalProperties"), dict):
            yield schema
        for each in schema.values():
            yield from lists_and_objects(each)
    for each in schema if isinstance(schema, list) else ():
        yield from lists_and_objects(each)


@pytest.mark.parametrize("field", FIELDS)
def test_only_lists_of_token_ids_may_be_long(field: str) -> None:
    for place in lists_and_objects(FIELDS[field][2]):
        has_token_ids = place.get("items", {}).get("type") == "integer"
        limit = place.get("maxItems", place.get("maxProperties", math.inf))
        assert limit <= (MAX_ITEMS if has_token_ids else MAX_ENTRIES), place


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": 5}, "prompt: is 5: input should be a valid string or list"),
        ({"prompt": [1, "x"]}, "prompt[1]: is 'x': input should be a valid integer"),
        ({"prompt": ["x", 1]}, "prompt[1]: is 1: input should be a valid string"),
        ({"prompt": [[1], [1.5]]}, "prompt[1][0]: is 1.5: input should be a valid integer"),
        ({"prompt": [None]}, "prompt[0]: is None: input should be a valid integer"),
        (
            {"prompt": "x", "stop": ["x", {"y": [1]}]},
            "stop[1]: is {'y': [1]}: input should be a valid string",
        ),
        ({"prompt": "x", "bad_words": ["x", [1, "y"]]}, "bad_words[1][1]: is 'y': input should be a valid"),
        ({"prompt": "x", "stop": [[1] * 99]}, f"stop[0]: is {str([1] * 99)[:100]}...: input should be a"),
    ],
)
def test_error_names_the_type_that_the_first_item_asks_for(given: Mapping[str, Any], said: str) -> None:
    assert outcome(CompletionRequest, given).startswith(said)


@pytest.mark.parametrize("prompt", ["x", [], [1, 2.0, True], ["x", "y"], [[1], []]])
def test_prompt_is_read_as_the_type_of_its_first_item(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt
