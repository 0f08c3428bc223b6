"""RequestModel: base of the bodies of requests."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

# A name this similar to a field is a misspelling; real extensions of other servers are below.
_MISSPELLED = 0.85


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
        for name in body.keys() - cls.model_fields.keys():
            if name in cls.refused and body[name] not in (None, False, "", [], {}):
                raise ValueError(f"{name} is not supported: {cls.refused[name]}")
            close = difflib.get_close_matches(str(name), cls.model_fields, n=1, cutoff=_MISSPELLED)
            if close and name not in cls.refused:
                raise ValueError(f"there is no field {name!r}; did you mean {close[0]!r}?")
        return body
