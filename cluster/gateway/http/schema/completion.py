"""Body of /v1/completions."""

from __future__ import annotations

from typing import cast

from pydantic import Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from .bounded import Prompts
from .sampling_fields import SamplingFields

MAX_PROMPTS = 256


class CompletionRequest(SamplingFields):
    """OpenAI's fields, and vLLM's beside them."""

    prompt: Prompts = Field(description="Text or token ids, or a list of these; each prompt has n choices.")
    max_tokens: int = 16
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises InvalidRequest if there are too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        several = cast(list[str | list[int]], prompt)
        if not 0 < len(several) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"has {len(several)} prompts, must have 1 to {MAX_PROMPTS}")
        return several

    @property
    def scores_prompt_only(self) -> bool:
        """The prompt is echoed and nothing follows it, as programs that score texts ask for."""
        return self.echo and self.max_tokens == 0

    def sampling(self) -> SamplingParams:
        """Return the settings. Raises InvalidRequest, also for a field that is not supported."""
        max_tokens = 1 if self.scores_prompt_only else self.max_tokens
        prompt_logprobs = self.logprobs if self.echo and self.prompt_logprobs is None else None
        return self.sampling_params(
            max_tokens,
            logprobs=self.logprobs,
            best_of=self.best_of,
            prompt_logprobs=prompt_logprobs,
        )
