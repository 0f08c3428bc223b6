"""`quire generate`."""

import json
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from ...proto.errors import InvalidRequest
from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .option_groups import with_options
from .sampling_options import (
    CompletionOptions,
    RequestOptions,
    SamplingOptions,
    TenantOptions,
    parse_sampling,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ...proto.sampling import SamplingParams
    from ..text.requests.outputs import PositionLogprobs, RequestOutput, StreamEvent, Usage

DEFAULT_MAX_TOKENS = 128
# The prompt that stands for stdin.
STDIN = "-"


@with_options(sampling=(SamplingOptions, CompletionOptions), request=(RequestOptions, TenantOptions))
def generate(
    sampling: dict[str, Any],
    request: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="The text to continue, or - to read it from stdin.")],
    target: Target = DEFAULT_TARGET,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the complete result as one JSON object at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no timings.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Stream a completion to the terminal. Ctrl-C aborts the request.

    With --n above 1, the completions are printed when all are complete. Tokens, times and speed go to stderr at the
    end, unless --quiet is given.

    Example: `quire generate "It was a dark evening, and" --target 127.0.0.1:50051 --max-tokens 64`
    """
    from ...proto.sampling import SamplingParams
    from ..text.requests.outputs import collect_output

    sampling_params = SamplingParams(**parse_sampling(sampling, DEFAULT_MAX_TOKENS))
    if prompt == STDIN:
        prompt = read_prompt(sys.stdin.buffer)
    clock = _Clock()
    with (
        connect(target, token_file, tls_ca) as client,
        closing(client.generate_stream(prompt, sampling_params, **request)) as events,
    ):
        streams = sampling_params.n == 1 and not as_json
        result = collect_output(
            clock.watch(_printed(events) if streams else events),
            prompt=prompt,
            prompt_token_ids=None,
            with_prompt_logprobs=sampling_params.prompt_logprobs is not None,
        )
    if as_json:
        print(json.dumps(asdict(result), ensure_ascii=False))
        return
    if not streams:
        for output in result.outputs:
            print(f"[{output.index}] {output.text}")
    _show_logprobs(result, sampling_params)
    if not quiet:
        sys.stdout.flush()  # the text's last line break is first where both go to one file
        print(clock.summary(result.usage), file=sys.stderr)


def read_prompt(stdin: BinaryIO) -> str:
    """Return the whole of stdin without a last line break. Raises InvalidRequest if it is not UTF-8 or empty."""
    try:
        prompt = stdin.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"stdin is not UTF-8 text: {error}") from error
    if not prompt.strip():
        raise InvalidRequest("prompt", "stdin is empty, must be the text to continue")
    return prompt.removesuffix("\n")


class _Clock:
    """Times of a stream as its reader sees them."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self._first_at: float | None = None

    def watch(self, events: "Iterable[StreamEvent]") -> "Iterable[StreamEvent]":
        """Yield the events, noting when the first token comes."""
        from ..text.requests.outputs import CompletionDelta

        for event in events:
            if self._first_at is None and isinstance(event, CompletionDelta):
                self._first_at = time.perf_counter()
            yield event

    def summary(self, usage: "Usage") -> str:
        """Return one line: tokens, time to the first one, and tokens per second from then on."""
        now = time.perf_counter()
        first_at = now if self._first_at is None else self._first_at
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        line = (
            f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated; first token after "
            f"{first_at - self._started_at:.2f} s, all in {now - self._started_at:.2f} s"
        )
        if usage.completion_tokens > 1 and now > first_at:
            line += f", {(usage.completion_tokens - 1) / (now - first_at):.1f} tokens/s"
        return line


def _printed(events: "Iterable[StreamEvent]") -> "Iterable[StreamEvent]":
    """Yield the events, printing their text as they come."""
    from ..text.requests.outputs import CompletionDelta

    for event in events:
        if isinstance(event, CompletionDelta):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        yield event
    sys.stdout.write("\n")


def _show_logprobs(result: "RequestOutput", sampling_params: "SamplingParams") -> None:
    from rich.console import Console

    console = Console()
    if result.prompt_logprobs is not None:
        entries = [entry for entry in result.prompt_logprobs if entry is not None]
        console.print(
            _logprob_table("Prompt, from its second token on", entries, sampling_params.prompt_logprobs)
        )
    for output in result.outputs:
        if output.logprobs:
            title = f"Completion {output.index}"
            console.print(_logprob_table(title, output.logprobs, sampling_params.logprobs))


def _logprob_table(title: str, entries: "Iterable[PositionLogprobs]", num_top: int | None) -> "Table":
    from rich.table import Table

    from ..text.requests.outputs import most_likely

    table = Table("token id", "log-probability", "rank", "most likely", title=title, title_justify="left")
    for entry in entries:
        token_id, chosen = next(iter(entry.items()))
        top = most_likely(entry, num_top or 0)
        table.add_row(
            str(token_id),
            f"{chosen.logprob:.3f}",
            str(chosen.rank),
            "  ".join(f"{top_id}: {each.logprob:.3f}" for top_id, each in top),
        )
    return table
