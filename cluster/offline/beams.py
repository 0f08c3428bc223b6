"""Beam search with vLLM's parameters and results."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...proto.sampling import SamplingParams
from ..text.requests.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ..text.requests.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Settings of `LLM.beam_search`, named as in vLLM.

    The search makes transformers' decisions: a score is the summed log-probability of the generated tokens over their
    number to the power of `length_penalty`. vLLM counts the prompt's tokens as well.

    Args:
        beam_width: number of beams, all of which are returned.
        max_tokens: maximum number of tokens to generate.
        ignore_eos: do not end a beam at the model's end-of-sequence tokens.
        temperature: without effect, as in vLLM: beams are ranked by the model's own probabilities.
        length_penalty: above 0 favors long beams, below 0 short ones.
        include_stop_str_in_output: keep the end-of-sequence token in the tokens and the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Return the settings of the request. Raises InvalidRequest for a value out of its range."""
        return SamplingParams(
            beam_width=self.beam_width,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: the prompt's and the beam's tokens, without the end-of-sequence token.
        logprobs: empty; beam search reports sums only.
        cum_logprob: summed log-probability of the generated tokens, the end-of-sequence token included.
        text: text of all `tokens`, special tokens included.
        finish_reason: ``stop`` or ``length``.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchOutput:
    """Return the beams of a request that ran with `params`."""
    prompt = output.prompt_token_ids or []
    return BeamSearchOutput([_beam(prompt, beam, params, tokenizer) for beam in output.outputs])


def _beam(
    prompt: list[int], beam: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchSequence:
    ends_with_stop_token = beam.finish_reason == "stop" and not params.include_stop_str_in_output
    tokens = prompt + (beam.token_ids[:-1] if ends_with_stop_token else beam.token_ids)
    assert beam.score is not None, "beam search reports scores"
    assert beam.finish_reason is not None, "outputs of LLM are whole"
    cum_logprob = beam.score * len(beam.token_ids) ** params.length_penalty
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return BeamSearchSequence(tokens, cum_logprob, text, beam.finish_reason, beam.stop_reason)
