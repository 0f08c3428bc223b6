"""Closing: a thing with `close` that is closed by leaving its `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Base class; whoever inherits says what `close` ends."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
