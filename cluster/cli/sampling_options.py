"""Options of `quire generate` and `quire chat`, declared once for both.

Names are those of SamplingParams and of the client's calls. An option that is not given is the model's recommendation
or quire's default. No ``from __future__ import annotations``: see `config.option`.
"""

from dataclasses import dataclass
from typing import Any

from ...proto.errors import InvalidRequest
from ...proto.options.option import option
from ...proto.options.values import ValueKind

_SAMPLING, _LOGITS, _SEARCH, _REQUEST = "Sampling", "Logits", "Several completions", "Request"

TEXTS = ValueKind("a list of texts", tuple, is_repeated=True)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request beside its sampling."""

    model: str = option("", help="Name of the model; needed only if the server has several.", group=_REQUEST)
    priority: int = option(0, help="Higher runs first if the server's policy is priority.", group=_REQUEST)
    timeout_s: float | None = option(None, help="Deadline of the request.", unit="seconds", group=_REQUEST)


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """Options of a request for servers that several tenants share."""

    tenant: str = option("", help="Tenant of the request, if no token names one.", group=_REQUEST)
    cache_salt: str = option(
        "", help="Share the prefix cache only with requests of the same tenant and salt.", group=_REQUEST
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling of completions and of replies in a chat."""

    max_tokens: int | None = option(
        None, help="Maximum number of generated tokens. Default: 128, in a chat 1024.", group=_SAMPLING
    )
    temperature: float | None = option(
        None, help="Sampling temperature; 0 always takes the most likely token.", group=_SAMPLING
    )
    top_k: int | None = option(None, help="Sample from the k most likely tokens; 0 for all.", group=_SAMPLING)
    top_p: float | None = option(
        None, help="Sample from the most likely tokens whose probabilities sum to this.", group=_SAMPLING
    )
    min_p: float | None = option(
        None, help="Drop tokens less likely than this share of the top probability.", group=_SAMPLING
    )
    seed: int | None = option(None, help="Seed; the same seed gives the same text.", group=_SAMPLING)
    stop: tuple[str, ...] = option(
        (), help="Stop before this string. May be repeated.", kind=TEXTS, metavar="TEXT", group=_SAMPLING
    )
    repetition_penalty: float | None = option(
        None,
        help="Above 1, makes tokens of the prompt and the output less likely to repeat.",
        group=_LOGITS,
    )
    frequency_penalty: float = option(
        0.0, help="Subtracted from a token's logit for each time it is in the output.", group=_LOGITS
    )
    presence_penalty: float = option(
        0.0, help="Subtracted from a token's logit if it is in the output.", group=_LOGITS
    )


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Further options of a completion."""

    min_tokens: int = option(0, help="Minimum number of generated tokens.", group=_SAMPLING)
    ignore_eos: bool = option(
        False,
        help="Continue after the model's end-of-sequence token.",
        flag="--ignore-eos",
        group=_SAMPLING,
    )
    logit_bias: tuple[str, ...] = option(
        (),
        help="Added to the token's logit. May be repeated.",
        kind=TEXTS,
        metavar="TOKEN_ID=VALUE",
        group=_LOGITS,
    )
    bad_words: tuple[str, ...] = option(
        (),
        help="Text that the output must not contain. May be repeated.",
        kind=TEXTS,
        flag="--bad-word",
        metavar="TEXT",
        group=_LOGITS,
    )
    logprobs: int | None = option(
        None,
        help="Show the tokens' log-probabilities, and those of this many most likely tokens.",
        group=_LOGITS,
    )
    prompt_logprobs: int | None = option(None, help="The same, for the tokens of the prompt.", group=_LOGITS)
    n: int = option(1, help="Number of completions.", group=_SEARCH)
    best_of: int | None = option(
        None, help="Generate this many completions and return the most likely.", group=_SEARCH
    )
    beam_width: int | None = option(None, help="Beam search with this many beams.", group=_SEARCH)
    length_penalty: float = option(
        1.0, help="Beam search: below 0 favors short completions, above 0 long ones.", group=_SEARCH
    )
    early_stopping: bool = option(
        False,
        help="Beam search: stop when there are as many completions as beams.",
        flag="--early-stopping",
        group=_SEARCH,
    )


def parse_sampling(given: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the arguments of SamplingParams for the options that were given.

    Args:
        max_tokens: the command's default.

    Raises:
        InvalidRequest: a logit bias is not ``TOKEN_ID=VALUE``.
    """
    arguments = {"max_tokens": max_tokens, **given}
    if "logit_bias" in arguments:
        arguments["logit_bias"] = parse_logit_bias(arguments["logit_bias"])
    return arguments


def parse_logit_bias(texts: list[str]) -> dict[int, float]:
    """Parse ``TOKEN_ID=VALUE`` texts. Raises InvalidRequest on other text."""
    biases = {}
    for text in texts:
        token_id, _, value = text.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise InvalidRequest(
                "logit-bias", f"is {text!r}, must be TOKEN_ID=VALUE, for example 50=-3.5"
            ) from None
    return biases
