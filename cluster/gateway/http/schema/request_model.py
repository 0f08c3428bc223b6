"""RequestModel: base of the bodies of requests."""

from __future__ import annotations

import difflib
from itertools import islice
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from .peer_fields import REFUSED, WITHOUT_EFFECT, Refusal, reason_to_refuse

# A name this similar to a field is a misspelling.
_MISSPELLED = 0.85
# Comparing a name with all fields takes 0.2 ms; one of 15 MB took 1 s.
_MAX_NAME_CHARS = 64
_MAX_COMPARED = 32


FIELD_ERROR = "field_error"


def field_error(field: str, problem: str) -> PydanticCustomError:
    """Return the error of a validator of a whole body about one of its fields."""
    return PydanticCustomError(FIELD_ERROR, "{problem}", {"field": field, "problem": problem})


class RequestModel(BaseModel):
    """Body of a request.

    Fields of other servers' APIs are ignored, as clients send them unasked; a misspelled name is an error. A field
    that would change the output but is not supported is refused.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    # Of the fields that the model lacks.
    refused: ClassVar[dict[str, Refusal]] = REFUSED

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, body: Any) -> Any:
        """Return the body without nulls, which stand for defaults. Raise on a name that is misspelled or refused."""
        if not isinstance(body, dict):
            return body
        others = body.keys() - cls.model_fields.keys()
        for name in sorted(others & cls.refused.keys()):
            if (reason := reason_to_refuse(cls.refused[name], body[name])) is not None:
                raise field_error(name, f"is not supported: {reason}")
        others -= cls.refused.keys() | WITHOUT_EFFECT.keys()
        unknown = (name for name in body if name in others and len(name) <= _MAX_NAME_CHARS)
        for name in islice(unknown, _MAX_COMPARED):
            if close := difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=_MISSPELLED):
                raise ValueError(f"there is no field {name!r}; did you mean {close[0]!r}?")
        defaults = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in defaults}
