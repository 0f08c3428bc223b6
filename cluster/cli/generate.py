"""`quire generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .sampling_options import (
    BadWord,
    FrequencyPenalty,
    LogitBias,
    MaxTokens,
    MinP,
    Model,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TimeoutS,
    TopK,
    TopP,
    parse_logit_bias,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..requests.outputs import PositionLogprobs, RequestOutput, StreamEvent


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Target = DEFAULT_TARGET,
    model: Model = "",
    max_tokens: MaxTokens = 128,
    min_tokens: Annotated[int, typer.Option(help="Minimum number of generated tokens.")] = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    logit_bias: LogitBias = None,
    bad_word: BadWord = None,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the model's end-of-sequence token.")
    ] = False,
    n: Annotated[int, typer.Option(help="Number of completions.")] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Generate this many completions and return the most likely.")
    ] = None,
    beam_width: Annotated[int | None, typer.Option(help="Beam search with this many beams.")] = None,
    length_penalty: Annotated[
        float, typer.Option(help="Beam search: below 0 favors short completions, above 0 long ones.")
    ] = 1.0,
    early_stopping: Annotated[
        bool,
        typer.Option(
            "--early-stopping", help="Beam search: stop when there are as many completions as beams."
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Show the tokens' log-probabilities, and those of this many most likely tokens."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same, for the tokens of the prompt.")
    ] = None,
    priority: Priority = 0,
    tenant: Annotated[str, typer.Option(help="Tenant of the request, if no token names one.")] = "",
    cache_salt: Annotated[
        str, typer.Option(help="Share the prefix cache only with requests of the same salt.")
    ] = "",
    timeout_s: TimeoutS = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the complete result as one JSON object at the end.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Stream a completion to the terminal. Ctrl-C aborts the request.

    With --n above 1, the completions are printed when all are complete.

    Example: `quire generate "It was a dark evening, and" --target 127.0.0.1:50051 --max-tokens 64`
    """
    from ...proto.sampling import SamplingParams
    from ..requests.outputs import collect_output

    sampling_params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=parse_logit_bias(logit_bias or []),
        bad_words=tuple(bad_word or ()),
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    with (
        connect(target, token_file, tls_ca) as client,
        closing(
            client.generate_stream(
                prompt,
                sampling_params,
                model=model,
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
            )
        ) as events,
    ):
        streams = n == 1 and not as_json
        result = collect_output(
            _printed(events) if streams else events,
            prompt=prompt,
            prompt_token_ids=None,
            with_prompt_logprobs=prompt_logprobs is not None,
        )
    if as_json:
        print(json.dumps(asdict(result), ensure_ascii=False))
        return
    if not streams:
        for output in result.outputs:
            print(f"[{output.index}] {output.text}")
    _show_logprobs(result)


def _printed(events: Iterable[StreamEvent]) -> Iterable[StreamEvent]:
    """Yield the events, printing their text as they come."""
    from ..requests.outputs import CompletionDelta

    for event in events:
        if isinstance(event, CompletionDelta):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        yield event
    sys.stdout.write("\n")


def _show_logprobs(result: RequestOutput) -> None:
    from rich.console import Console

    console = Console()
    if result.prompt_logprobs is not None:
        entries = [entry for entry in result.prompt_logprobs if entry is not None]
        console.print(_logprob_table("Prompt, from its second token on", entries))
    for output in result.outputs:
        if output.logprobs:
            console.print(_logprob_table(f"Completion {output.index}", output.logprobs))


def _logprob_table(title: str, entries: Iterable[PositionLogprobs]) -> Table:
    from rich.table import Table

    table = Table("token id", "log-probability", "most likely", title=title, title_justify="left")
    for entry in entries:
        token_id, chosen = next(iter(entry.items()))
        top = sorted(
            (each.rank, top_id, each.logprob) for top_id, each in entry.items() if each.rank is not None
        )
        table.add_row(
            str(token_id),
            f"{chosen.logprob:.3f}",
            "  ".join(f"{top_id}: {logprob:.3f}" for _, top_id, logprob in top),
        )
    return table
