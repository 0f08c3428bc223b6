"""Prompts that have a model fill in the middle of a text, between tokens that the model was trained with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

# Families of models, each with the tokens before the prefix, the suffix and the middle.
_TRIPLES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
# Tokens between files, and others that end what is filled in.
_FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_OTHER_ENDS = ("<|repo_name|>", "<reponame>", "<repo_name>", "<|fim_pad|>", "<fim_pad>")


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens of one model.

    Attributes:
        file: the token before the name of each file; None if the model has none.
        ends: tokens that end what is filled in.
    """

    prefix: int
    suffix: int
    middle: int
    file: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, ids: Mapping[str, int]) -> Self | None:
        """Return the tokens of a vocabulary, text |-> id; None if it has none."""
        for triple in _TRIPLES:
            if all(text in ids for text in triple):
                prefix, suffix, middle = (ids[text] for text in triple)
                files = [ids[text] for text in _FILE_SEPARATORS if text in ids]
                others = [ids[text] for text in _OTHER_ENDS if text in ids]
                file = files[0] if files else None
                return cls(prefix, suffix, middle, file, (prefix, suffix, middle, *files, *others))
        return None

    def prompt(
        self,
        before: Sequence[int],
        files: Iterable[tuple[Sequence[int], Sequence[int]]],
        prefix: Sequence[int],
        suffix: Sequence[int],
        middle: Sequence[int],
    ) -> list[int]:
        """Return the prompt of token ids.

        Args:
            before: the tokens that begin every prompt.
            files: name and text of other files of the repository, with their line ends.
            middle: the beginning of what is filled in.
        """
        token_ids = list(before)
        for name, text in files:
            token_ids += [*([] if self.file is None else [self.file]), *name, *text]
        return [*token_ids, self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
