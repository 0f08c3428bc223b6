"""Options of sampling; those that are not given are the model's recommendation or quire's default."""

from __future__ import annotations

from typing import Annotated

import typer

from ...proto.errors import InvalidRequest

Model = Annotated[str, typer.Option(help="Name of the model; needed only if the server has several.")]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of generated tokens.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 always takes the most likely token.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 for all.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the most likely tokens whose probabilities sum to this.")
]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens less likely than this share of the top probability.")
]
Seed = Annotated[int | None, typer.Option(help="Seed; the same seed gives the same text.")]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1, makes tokens of the prompt and the output less likely to repeat."),
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtracted from a token's logit for each time it is in the output.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted from a token's logit if it is in the output.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this string. May be repeated.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN_ID=VALUE", help="Added to the token's logit. May be repeated."),
]
BadWord = Annotated[
    list[str] | None, typer.Option(help="Text that the output must not contain. May be repeated.")
]
Priority = Annotated[int, typer.Option(help="Higher runs first if the server's policy is priority.")]
TimeoutS = Annotated[float | None, typer.Option(metavar="SECONDS", help="Deadline of the request.")]


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
