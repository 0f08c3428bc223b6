"""The options that say how an answer is sampled; what is not given is the model's own or quire's default."""

from __future__ import annotations

from typing import Annotated

import typer

from ...proto.errors import InvalidRequest

Model = Annotated[str, typer.Option(help="Needed only where several are served.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that sum to this.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: tokens of the prompt and the answer come again less.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Taken off a token's logit for each time it is in the answer.")
]
PresencePenalty = Annotated[float, typer.Option(help="Taken off a token's logit once it is in the answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string. May be repeated.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN_ID=VALUE", help="Add this to the token's logit. May be repeated."),
]
BadWord = Annotated[list[str] | None, typer.Option(help="The answer must not contain this. May be repeated.")]
Priority = Annotated[int, typer.Option(help="Higher goes first, where the server's policy is priority.")]
TimeoutS = Annotated[float | None, typer.Option(help="Give up after this many seconds.")]


def parse_logit_bias(texts: list[str]) -> dict[int, float]:
    """``TOKEN_ID=VALUE`` each. Raises InvalidRequest on anything else."""
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
