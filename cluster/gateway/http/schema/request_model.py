"""RequestModel: base of the bodies of requests."""

from __future__ import annotations

import difflib
from itertools import islice
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

# A name this similar to a field is a misspelling; real extensions of other servers are below.
_MISSPELLED = 0.85
# Comparing a name with all fields takes 0.2 ms; one of 15 MB took 1 s.
_MAX_NAME_CHARS = 64
_MAX_COMPARED = 32


class RequestModel(BaseModel):
    """Body of a request.

    Fields of other servers' APIs are ignored, as clients send them unasked; a misspelled name is an error. A field
    that would change the output but is not supported is refused.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    # field |-> why it is refused
    refused: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, body: Any) -> Any:
        """Raise ValueError on a name that is misspelled or refused."""
        if not isinstance(body, dict):
            return body
        for name, reason in cls.refused.items():
            if body.get(name) not in (None, False, "", [], {}):
                raise ValueError(f"{name} is not supported: {reason}")
        known = cls.model_fields.keys() | cls.refused
        unknown = (name for name in body if name not in known and len(name) <= _MAX_NAME_CHARS)
        for name in islice(unknown, _MAX_COMPARED):
            if close := difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=_MISSPELLED):
                raise ValueError(f"there is no field {name!r}; did you mean {close[0]!r}?")
        return body
