"""The public JSON schemas of tests/worker/structured/schemas, and checks of values by the package jsonschema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

_FOLDER = Path(__file__).parents[1] / "worker" / "structured" / "schemas"
FILES = ("json_schema_test_suite", "schemastore")
_VALIDATORS = {
    "draft7": jsonschema.Draft7Validator,
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
}


def records(name: str) -> list[dict[str, Any]]:
    """Return the entries of a file, each with `id`, `draft` and `schema`."""
    return [json.loads(line) for line in (_FOLDER / f"{name}.jsonl").read_text().splitlines()]


def validator(record: Mapping[str, Any]) -> Any:
    return _VALIDATORS.get(record["draft"], jsonschema.Draft202012Validator)(record["schema"])


def is_checked_exactly(schema: Any) -> bool:
    """Return whether jsonschema is exact: it divides floats, and Python's re does not know Unicode classes."""
    return not isinstance(schema, Mapping) or (
        isinstance(schema.get("multipleOf", 1), int) and r"\p" not in json.dumps(schema)
    )
