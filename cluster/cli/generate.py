"""`quire generate`."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from .connection import Target, TlsCa, TokenFile, connect


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Target = "127.0.0.1:50051",
    model: Annotated[str, typer.Option(help="Needed only where several are served.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before this many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that sum to this.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string. May be repeated.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Give up after this many seconds.")] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Stream a completion to the terminal. Ctrl-C ends the request.

    Example: `quire generate "It was a dark evening, and" --target 127.0.0.1:50051 --max-tokens 64`
    """
    from ...proto.sampling import SamplingParams
    from ..events import Delta

    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    with (
        connect(target, token_file, tls_ca) as client,
        closing(client.generate_stream(prompt, params, model=model, timeout_s=timeout_s)) as events,
    ):
        for event in events:
            if isinstance(event, Delta):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    sys.stdout.write("\n")
