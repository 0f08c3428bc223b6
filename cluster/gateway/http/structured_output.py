"""response_format, and fields of other servers for the same, as StructuredOutputsParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ....proto.errors import InvalidRequest
from ....proto.structured_outputs import StructuredOutputsParams

# Names of older vLLM and of others for a constraint |-> the field to use.
GUIDED_FIELDS = {
    **{f"guided_{kind}": f"use structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")},
    "guided_decoding_backend": "the server option --structured-outputs-backend chooses it",
    "guided_whitespace_pattern": "use structured_outputs.disable_any_whitespace",
    "json_schema": "use structured_outputs.json, or response_format",
    "grammar": "use structured_outputs.grammar",
    "regex": "use structured_outputs.regex",
    "ebnf": "use structured_outputs.grammar",
    "structural_tag": "use structured_outputs.structural_tag, or response_format",
}


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"
    json_schema: dict[str, Any] | None = None


def requested_constraint(
    wanted: ResponseFormat | None, structured_outputs: Mapping[str, Any] | None = None
) -> StructuredOutputsParams | None:
    """Return the constraint that a request asks for, in OpenAI's field or in vLLM's; None for any text.

    Raises:
        InvalidRequest: the constraint is incomplete, or both fields are given.
    """
    constraint = None if wanted is None else _of_response_format(wanted)
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


def _of_response_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            schema = (wanted.json_schema or {}).get("schema")
            return schema_constraint("response_format.json_schema.schema", schema)
        case "structural_tag":
            return StructuredOutputsParams(
                structural_tag={"type": "structural_tag", **(wanted.model_extra or {})}
            )
    known = "text, json_object, json_schema or structural_tag"
    raise InvalidRequest("response_format.type", f"is {wanted.type[:64]!r}, must be {known}")
