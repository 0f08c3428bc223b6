"""OutputFields and SamplingFields: fields of OpenAI's and vLLM's requests that are fields of SamplingParams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, create_model, model_validator

from .....proto.sampling import DELIVERY, VALUE_TYPES, SamplingParams
from .....proto.structured_outputs import StructuredOutputsParams
from ....text.requests.request import Prompt
from ...generation.generation import GenerationCall
from ..structured_output import ResponseFormat, requested_constraint, with_structured_outputs
from .bounded import AllowedTokenIds, Entries, JsonObject, Limited, Members, Texts, Word
from .request_model import RequestModel, field_error


class StreamOptions(BaseModel):
    """Options of a stream.

    Attributes:
        include_usage: send a last chunk with the usage.
        continuous_usage_stats: send the usage so far with each chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


# Numbers and flags of SamplingParams that have another name, or none, in OpenAI's requests.
_NAMED_OTHERWISE = {"max_tokens", "logprobs", "best_of", "beam_width", "early_stopping", "detokenize"}
_NAMED_OTHERWISE |= DELIVERY.keys()
# And those that endpoints of one output lack.
_OF_SEVERAL = {"n", "prompt_logprobs", "length_penalty"}

if TYPE_CHECKING:
    ValueFields = RequestModel
else:
    ValueFields = create_model(
        "ValueFields",
        __base__=RequestModel,
        **{
            name: (kind | None, None)
            for name, kind in VALUE_TYPES.items()
            if kind in (int, float, bool) and name not in _NAMED_OTHERWISE | _OF_SEVERAL
        },
    )


class OutputFields(ValueFields):
    """Fields of all endpoints that generate, but Anthropic's; null stands for the default.

    Those of one number or flag are declared in SamplingParams; here are those that are read or described.
    """

    model: str | None = Field(None, description="A served model; may be left out if there is only one.")
    stream: bool = False
    stop: Texts | None = None
    stop_token_ids: Entries[int] | None = None
    logit_bias: Members[int, float] | None = None
    bad_words: Entries[Word] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    structured_outputs: JsonObject | None = Field(
        None, description="One of json, regex, choice, grammar, json_object and structural_tag."
    )
    thinking_token_budget: int | None = Field(None, description="Most tokens of the reasoning.")
    repetition_detection: Members[str, int] | None = Field(
        None,
        description="max_pattern_size, min_pattern_size and min_count of a repetition that ends the output.",
    )
    vllm_xargs: JsonObject | None = Field(
        None, description="Name of a custom logits processor and its arguments."
    )
    user: str | None = Field(None, description="Has no effect; tenants come from tokens.")
    priority: int = Field(0, ge=-(2**31) + 1, lt=2**31, description="As in vLLM, lower runs first.")
    cache_salt: str = Field("", description="Prefixes are shared only with equal salts.")

    def call(
        self, prompt: Prompt, sampling: SamplingParams, *, add_special_tokens: bool = True
    ) -> GenerationCall:
        """Return the call of a prompt, without its tenant."""
        return GenerationCall(
            prompt,
            sampling,
            model=self.model or "",
            priority=-self.priority,  # in quire.v1, higher runs first
            cache_salt=self.cache_salt,
            add_special_tokens=add_special_tokens,
        )

    def sampling_params(
        self, max_tokens: int | None, constraint: StructuredOutputsParams | None = None, **others: Any
    ) -> SamplingParams:
        """Return the settings. `others` are fields of SamplingParams; as here, None stands for the default.

        Args:
            max_tokens: None for the rest of the context.
            constraint: the constraint of the output that the endpoint's fields ask for.

        Raises:
            InvalidRequest: a value is not allowed.
        """
        given = {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        given |= {name: value for name, value in others.items() if value is not None}
        if self.vllm_xargs is not None:
            given["extra_args"] = self.vllm_xargs
        if (constraint := with_structured_outputs(constraint, self.structured_outputs)) is not None:
            given["structured_outputs"] = constraint
        return SamplingParams(max_tokens, **given)


class SamplingFields(OutputFields):
    """Fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    length_penalty: float | None = None
    response_format: Limited[ResponseFormat] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool = Field(False, description="Beam search with n beams, of which all are returned.")
    request_id: str = Field("", description="Identifies the request in quire.v1; chosen if missing.")
    resumable: bool = Field(
        False,
        description="The stream has event ids, from which Last-Event-ID continues it; needs request_id.",
    )
    return_token_ids: bool = Field(False, description="Send token ids beside the text.")

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        """Raise for options of a stream that is not asked for."""
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "needs stream to be true")
        return self

    def call(
        self, prompt: Prompt, sampling: SamplingParams, *, add_special_tokens: bool = True
    ) -> GenerationCall:
        """Return the call of a prompt, without its tenant."""
        call = super().call(prompt, sampling, add_special_tokens=add_special_tokens)
        return replace(call, request_id=self.request_id, is_resumable=self.resumable)

    def sampling_params(
        self, max_tokens: int | None, constraint: StructuredOutputsParams | None = None, **others: Any
    ) -> SamplingParams:
        """See `OutputFields`."""
        beams = self.n or 1 if self.use_beam_search else None
        constraint = constraint or requested_constraint(self.response_format)
        return super().sampling_params(max_tokens, constraint, beam_width=beams, **others)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


_SAMPLING = tuple(
    (SamplingParams.__dataclass_fields__.keys() & SamplingFields.model_fields.keys())
    - {"max_tokens", "structured_outputs"}
)
