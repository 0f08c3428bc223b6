"""`quire generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import Target, TlsCa, TokenFile, connect
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

    from ..requests.outputs import Completion, Event, TokenLogprobs


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Target = "127.0.0.1:50051",
    model: Model = "",
    max_tokens: MaxTokens = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before this many tokens.")] = 0,
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
        bool, typer.Option("--ignore-eos", help="The model's own end of sequence does not end the answer.")
    ] = False,
    n: Annotated[int, typer.Option(help="Answers to give.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Generate this many and give the likeliest.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Beam search with this many beams.")] = None,
    length_penalty: Annotated[
        float, typer.Option(help="Beam search: below 0 favours short answers, above 0 long ones.")
    ] = 1.0,
    early_stopping: Annotated[
        bool, typer.Option("--early-stopping", help="Beam search: end with as many answers as beams.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Show the tokens' log-probabilities, and so many likeliest beside them."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the tokens of the prompt.")
    ] = None,
    priority: Priority = 0,
    tenant: Annotated[str, typer.Option(help="Whose request it is, where no token says so.")] = "",
    cache_salt: Annotated[
        str, typer.Option(help="Share cached prompts only with requests of this salt.")
    ] = "",
    timeout_s: TimeoutS = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with all that is known at the end.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Stream a completion to the terminal. Ctrl-C ends the request.

    Several answers are shown when all are complete.

    Example: `quire generate "It was a dark evening, and" --target 127.0.0.1:50051 --max-tokens 64`
    """
    from ...proto.sampling import SamplingParams

    params = SamplingParams(
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
                params,
                model=model,
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
            )
        ) as events,
    ):
        streams = n == 1 and not as_json
        completion = _completion(_shown(events) if streams else events)
    if as_json:
        print(json.dumps(asdict(completion), ensure_ascii=False))
        return
    if not streams:
        for output in completion.outputs:
            print(f"[{output.index}] {output.text}")
    _show_logprobs(completion)


def _shown(events: Iterable[Event]) -> Iterable[Event]:
    """The same events, their text written out as it comes."""
    from ..requests.outputs import Delta

    for event in events:
        if isinstance(event, Delta):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        yield event
    sys.stdout.write("\n")


def _completion(events: Iterable[Event]) -> Completion:
    from ..requests.outputs import Completion, PromptLogprobs, Started, collect, collect_prompt_logprobs

    told = list(events)
    started = next(event for event in told if isinstance(event, Started))
    has_scores = any(isinstance(event, PromptLogprobs) for event in told)
    of_prompt = collect_prompt_logprobs(told) if has_scores else None
    return Completion(started.request_id, started.model, collect(told), of_prompt)


def _show_logprobs(completion: Completion) -> None:
    from rich.console import Console

    console = Console()
    if completion.prompt_logprobs is not None:
        entries = [(None, entry) for entry in completion.prompt_logprobs if entry is not None]
        console.print(_logprob_table("Prompt, from its second token on", entries))
    for output in completion.outputs:
        if output.logprobs:
            pairs = list(zip(output.token_ids, output.logprobs, strict=True))
            console.print(_logprob_table(f"Answer {output.index}", pairs))


def _logprob_table(title: str, entries: Iterable[tuple[int | None, TokenLogprobs]]) -> Table:
    from rich.table import Table

    table = Table("token id", "log-probability", "likeliest", title=title, title_justify="left")
    for token_id, entry in entries:
        likeliest = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        table.add_row(
            "" if token_id is None else str(token_id),
            f"{entry.chosen:.3f}",
            "  ".join(f"{top_id}: {logprob:.3f}" for top_id, logprob in likeliest),
        )
    return table
