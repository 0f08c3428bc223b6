"""Fields that later releases have added to messages. Without numpy, which the command line does not import."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field
from typing import Any

# Key in the metadata of such a field.
SENT_IF_SET = "sent if set"


def sent_if_set(default: Any, *, compare: bool = True) -> Any:
    """Declare a field that is not sent while it and all fields after it have their defaults.

    A release that does not know the field reads the message as long as the field is unset.

    Args:
        default: an array is shared by all messages.
        compare: as of `dataclasses.field`.
    """
    metadata = {SENT_IF_SET: True}
    if not isinstance(default, Hashable):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata, compare=compare)
