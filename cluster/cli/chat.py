"""`quire chat`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import QuireError
from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .option_groups import with_options
from .sampling_options import RequestOptions, SamplingOptions, parse_sampling

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from ..requests.chat_messages import Message
    from ..requests.outputs import StreamEvent

DEFAULT_MAX_TOKENS = 1024

# conversation |-> events of the reply
StreamReply = Callable[[list["Message"]], "Generator[StreamEvent, None, None]"]


@with_options(sampling=(SamplingOptions,), request=(RequestOptions,))
def chat(
    sampling: dict[str, Any],
    request: dict[str, Any],
    target: Target = DEFAULT_TARGET,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Chat with a model. Ctrl-C aborts a reply, Ctrl-D ends the conversation.

    If stdin is not a terminal, each of its lines is a turn, and only the replies are printed.

    Example: `quire chat --target 127.0.0.1:50051 --system "You are brief."`
    """
    from ...proto.sampling import SamplingParams

    sampling_params = SamplingParams(**parse_sampling(sampling, DEFAULT_MAX_TOKENS))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    with connect(target, token_file, tls_ca) as client:

        def stream_reply(conversation: "list[Message]") -> "Generator[StreamEvent, None, None]":
            return client.chat_stream(conversation, sampling_params, **request)

        if sys.stdin.isatty():
            _converse(messages, stream_reply)
        else:
            _reply_to_lines(messages, stream_reply)


def _converse(messages: "list[Message]", stream_reply: StreamReply) -> None:
    """Run turns at a terminal until Ctrl-D.

    A turn that fails prints its error; without any text of a reply it is removed from the conversation.
    """
    from rich.console import Console

    with suppress(ImportError):
        import readline  # noqa: F401  input() edits lines with it
    console = Console(highlight=False)
    console.print("Ctrl-C aborts a reply, Ctrl-D ends the conversation.", style="dim")
    for line in _read_lines(console):
        messages.append({"role": "user", "content": line})
        reply = ""
        try:
            with closing(stream_reply(messages)) as events:
                for text in _texts(events):
                    reply += text
                    console.print(text, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print(" (aborted)", style="dim", end="")
        except QuireError as error:
            console.print(f"quire: {error}", style="red", markup=False)
            if not reply:
                messages.pop()
                continue
        console.print()
        messages.append({"role": "assistant", "content": reply})


def _read_lines(console: "Console") -> Iterator[str]:
    """Yield the lines that the user types; Ctrl-C discards a line."""
    while True:
        try:
            line = console.input("[bold cyan]> [/]")
        except KeyboardInterrupt:
            console.print()
            continue
        except EOFError:
            console.print()
            return
        if line.strip():
            yield line


def _reply_to_lines(messages: "list[Message]", stream_reply: StreamReply) -> None:
    """Run one turn per line of stdin. The first failure ends the command."""
    for line in sys.stdin:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        reply = ""
        with closing(stream_reply(messages)) as events:
            for text in _texts(events):
                reply += text
                sys.stdout.write(text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": reply})


def _texts(events: "Iterator[StreamEvent]") -> Iterator[str]:
    from ..requests.outputs import CompletionDelta

    return (event.text for event in events if isinstance(event, CompletionDelta))
