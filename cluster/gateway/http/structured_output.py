"""response_format, and fields of other servers for the same, as StructuredOutputsParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ....proto.errors import InvalidRequest
from ....proto.structured_outputs import StructuredOutputsParams


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"
    json_schema: dict[str, Any] | None = None


def with_structured_outputs(
    constraint: StructuredOutputsParams | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the constraint of OpenAI's field or of vLLM's. Raises InvalidRequest if both are given."""
    if structured_outputs is None:
        return constraint
    if constraint is not None:
        raise InvalidRequest("structured_outputs", "is given beside response_format, must be one of the two")
    return StructuredOutputsParams.of("structured_outputs", structured_outputs)


def schema_constraint(field: str, schema: Any) -> StructuredOutputsParams:
    """Return the constraint to JSON of a schema. Raises InvalidRequest, which names the field, if there is none."""
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(field, "is missing, must be a JSON schema")
    return StructuredOutputsParams(json=schema)  # type: ignore[arg-type]


def requested_constraint(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    """Return the constraint that a response_format asks for; None for any text. Raises InvalidRequest."""
    if wanted is None:
        return None
    match wanted.type:
        case "text":
            return None
        case "json_object":
            schema = (wanted.model_extra or {}).get("schema")  # llama.cpp's
            if schema is None:
                return StructuredOutputsParams(json_object=True)
            return schema_constraint("response_format.schema", schema)
        case "json_schema":
            schema = (wanted.json_schema or {}).get("schema")
            return schema_constraint("response_format.json_schema.schema", schema)
        case "structural_tag":
            return StructuredOutputsParams(
                structural_tag={"type": "structural_tag", **(wanted.model_extra or {})}
            )
    known = "text, json_object, json_schema or structural_tag"
    raise InvalidRequest("response_format.type", f"is {wanted.type[:64]!r}, must be {known}")
