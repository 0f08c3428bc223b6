"""Problems: ConfigErrors of independent checks, raised together."""

from __future__ import annotations

from types import TracebackType

from ...proto.errors import ConfigError


class Problems:
    """Collects the ConfigError of each `with` block, so that one run names all problems::

    problems = Problems()
    with problems:
        check_one_thing()
    with problems:
        check_another()
    problems.raise_any()
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def __len__(self) -> int:
        return len(self._errors)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._errors.append(error)
        return True

    def raise_any(self) -> None:
        """Raise the error if there is one; of several, a ConfigError that names each problem once."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            texts = [text for error in self._errors for text in error.problems or (str(error),)]
            raise ConfigError.of(list(dict.fromkeys(texts)))
