"""Options of `quire generate` and `quire chat`, declared once for both.

Names are those of SamplingParams and of the client's calls. An option that is not given is the model's recommendation
or quire's default. No ``from __future__ import annotations``: see `config.option`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...proto.errors import InvalidRequest
from ...proto.options.option import option
from ...proto.options.values import ValueKind

# Options by the panel of --help that shows them.
_sampling, _logits, _several, _request = (
    partial(option, group=group) for group in ("Sampling", "Logits", "Several completions", "Request")
)

TEXTS = ValueKind("a list of texts", tuple, is_repeated=True)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request beside its sampling."""

    model: str = _request("", help="Name of the model; needed only if the server has several.")
    priority: int = _request(0, help="Higher runs first if the server's policy is priority.")
    timeout_s: float | None = _request(None, help="Deadline of the request.", unit="seconds")


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """Options of a request for servers that several tenants share."""

    tenant: str = _request("", help="Tenant of the request, if no token names one.")
    cache_salt: str = _request(
        "", help="Share the prefix cache only with requests of the same tenant and salt."
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling of completions and of replies in a chat."""

    max_tokens: int | None = _sampling(
        None, help="Maximum number of generated tokens. Default: 128, in a chat 1024."
    )
    temperature: float | None = _sampling(
        None, help="Sampling temperature; 0 always takes the most likely token."
    )
    top_k: int | None = _sampling(None, help="Sample from the k most likely tokens; 0 for all.")
    top_p: float | None = _sampling(
        None, help="Sample from the most likely tokens whose probabilities sum to this."
    )
    min_p: float | None = _sampling(
        None, help="Drop tokens less likely than this share of the top probability."
    )
    seed: int | None = _sampling(None, help="Seed; the same seed gives the same text.")
    stop: tuple[str, ...] = _sampling(
        (), help="Stop before this string. May be repeated.", kind=TEXTS, metavar="TEXT"
    )
    repetition_penalty: float | None = _logits(
        None, help="Above 1, makes tokens of the prompt and the output less likely to repeat."
    )
    frequency_penalty: float = _logits(
        0.0, help="Subtracted from a token's logit for each time it is in the output."
    )
    presence_penalty: float = _logits(0.0, help="Subtracted from a token's logit if it is in the output.")


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Further options of a completion."""

    min_tokens: int = _sampling(0, help="Minimum number of generated tokens.")
    ignore_eos: bool = _sampling(
        False, help="Continue after the model's end-of-sequence token.", flag="--ignore-eos"
    )
    logit_bias: tuple[str, ...] = _logits(
        (), help="Added to the token's logit. May be repeated.", kind=TEXTS, metavar="TOKEN_ID=VALUE"
    )
    bad_words: tuple[str, ...] = _logits(
        (),
        help="Text that the output must not contain. May be repeated.",
        kind=TEXTS,
        flag="--bad-word",
        metavar="TEXT",
    )
    logprobs: int | None = _logits(
        None, help="Show the tokens' log-probabilities, and those of this many most likely tokens."
    )
    prompt_logprobs: int | None = _logits(None, help="The same, for the tokens of the prompt.")
    n: int = _several(1, help="Number of completions.")
    best_of: int | None = _several(None, help="Generate this many completions and return the most likely.")
    beam_width: int | None = _several(None, help="Beam search with this many beams.")
    length_penalty: float = _several(
        1.0, help="Beam search: below 0 favors short completions, above 0 long ones."
    )
    early_stopping: bool = _several(
        False, help="Beam search: stop when there are as many completions as beams.", flag="--early-stopping"
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
