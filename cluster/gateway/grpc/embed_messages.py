"""Conversion of quire.v1's Embed messages."""

from __future__ import annotations

from collections.abc import Sequence

from ....proto import inference_pb2
from ....proto.errors import InvalidRequest
from ....proto.pooling import PoolingParams
from ....proto.sampling import SamplingParams
from ..generation.generation import GenerationCall
from ..generation.pooled_calls import PooledAnswer, check_num_inputs


def embed_calls(message: inference_pb2.EmbedRequest) -> list[GenerationCall]:
    """Return a call for each prompt, without its tenant. Raises InvalidRequest for an invalid field."""
    check_num_inputs("prompts", len(message.prompts))
    params = PoolingParams(
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else True,
        truncate_prompt_tokens=(
            message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
        ),
    )
    adds_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True
    return [
        GenerationCall(
            _prompt(index, prompt),
            SamplingParams(),
            model=message.model,
            priority=message.priority,
            cache_salt=message.cache_salt,
            add_special_tokens=adds_special_tokens,
            pooling=params,
        )
        for index, prompt in enumerate(message.prompts)
    ]


def embed_response(model: str, answers: Sequence[PooledAnswer]) -> inference_pb2.EmbedResponse:
    """Return the vectors of the prompts, and the tokens of all."""
    usages = [answer.result.usage for answer in answers]
    return inference_pb2.EmbedResponse(
        model=model,
        vectors=(inference_pb2.Vector(values=answer.result.values) for answer in answers),
        usage=inference_pb2.Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        ),
    )


def _prompt(index: int, prompt: inference_pb2.EmbedPrompt) -> str | list[int]:
    kind = prompt.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest(f"prompts[{index}]", "is empty, must have text or token_ids")
    return prompt.text if kind == "text" else list(prompt.token_ids.ids)
