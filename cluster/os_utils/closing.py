"""Closing: base class of context managers whose end is `close`."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Context manager that calls `close` at the end of its block. Subclasses define `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
