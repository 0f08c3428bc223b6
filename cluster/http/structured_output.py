"""response_format: the form that an output must have. Text only, until grammars constrain sampling."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ...proto.errors import InvalidRequest

# Names of vLLM and others for a constraint on the output.
GUIDED_FIELDS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema",
    "grammar", "regex", "ebnf",
)  # fmt: skip
NOT_YET = "outputs cannot be constrained to a grammar yet"


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"
    json_schema: dict[str, Any] | None = None


def check_response_format(wanted: ResponseFormat | None, field: str = "response_format") -> None:
    """Raises InvalidRequest unless the output may be any text."""
    if wanted is None or wanted.type == "text":
        return
    known = ("json_object", "json_schema", "structural_tag")
    problem = NOT_YET if wanted.type in known else f"must be text, {' or '.join(known[:2])}"
    raise InvalidRequest(f"{field}.type", f"is {wanted.type!r}: {problem}")
