"""`quire chat`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import InvalidRequest, QuireError
from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .option_groups import with_options
from .sampling_options import RequestOptions, SamplingOptions, parse_sampling

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from ..client.client import Client
    from ..text.chat_format.deltas import ChatDelta
    from ..text.requests.chat_messages import Message
    from ..text.requests.outputs import StreamEvent

# By default a reply has at most this many tokens, and at most this share of the model's context, so that several
# turns have room.
DEFAULT_MAX_TOKENS = 1024
DEFAULT_MAX_SHARE = 0.25

# conversation |-> events of the reply
StreamReply = Callable[[list["Message"]], "Generator[StreamEvent, None, None]"]

# input() writes it, so that readline knows its width: what is between \001 and \002 has none.
_COLORED_PROMPT = "\001\033[1;36m\002> \001\033[0m\002"


@with_options(sampling=(SamplingOptions,), request=(RequestOptions,))
def chat(
    sampling: dict[str, Any],
    request: dict[str, Any],
    target: Target = DEFAULT_TARGET,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of an image for the first turn, of a model that reads images. May be repeated."
        ),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Chat with a model. Ctrl-C aborts a reply, Ctrl-D ends the conversation.

    If stdin is not a terminal, each of its lines is a turn, and only the replies are printed.

    Example: `quire chat --target 127.0.0.1:50051 --system "You are brief." --image photo.jpg`
    """
    from ...proto.sampling import SamplingParams

    sampling_params = SamplingParams(**parse_sampling(sampling, DEFAULT_MAX_TOKENS))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    images = list(map(_read_image, image or ()))
    with connect(target, token_file, tls_ca) as client:
        if "max_tokens" not in sampling:
            max_tokens = _default_max_tokens(client, request.get("model", ""))
            sampling_params = replace(sampling_params, max_tokens=max_tokens)

        def stream_reply(conversation: "list[Message]") -> "Generator[StreamEvent, None, None]":
            return client.chat_stream(_with_images(conversation, images), sampling_params, **request)

        if sys.stdin.isatty():
            _converse(messages, stream_reply)
        else:
            _reply_to_lines(messages, stream_reply)


def _read_image(path: Path) -> dict[str, Any]:
    """Return a file as a part of a content. Raises InvalidRequest if it cannot be read."""
    try:
        return {"type": "image", "image": path.read_bytes()}
    except OSError as error:
        raise InvalidRequest("image", f"{path} cannot be read: {error.strerror}") from error


def _with_images(conversation: "list[Message]", images: list[dict[str, Any]]) -> "list[Message]":
    """Return the conversation with the images before the text of its first turn."""
    if not images:
        return conversation
    first = next(index for index, message in enumerate(conversation) if message["role"] == "user")
    turn = conversation[first]
    parts = [*images, {"type": "text", "text": turn["content"]}]
    return [*conversation[:first], {**turn, "content": parts}, *conversation[first + 1 :]]


def _default_max_tokens(client: "Client", model: str) -> int:
    lens = [info.max_model_len for info in client.models() if info.name == model or not model]
    return min([DEFAULT_MAX_TOKENS, *(max(1, int(DEFAULT_MAX_SHARE * length)) for length in lens)])


def _converse(messages: "list[Message]", stream_reply: StreamReply) -> None:
    """Run turns at a terminal until Ctrl-D. Reasoning is dim.

    A turn that fails prints its error; without any text of a reply it is removed from the conversation.
    """
    from rich.console import Console

    with suppress(ImportError):
        import readline  # noqa: F401  input() edits lines with it
    console = Console(highlight=False)
    console.print("Ctrl-C aborts a reply, Ctrl-D ends the conversation.", style="dim")
    for line in _read_lines(console):
        messages.append({"role": "user", "content": line})
        reply = _Reply()
        try:
            with closing(stream_reply(messages)) as events:
                for text, is_content in reply.read(events):
                    style = None if is_content else "dim"
                    console.print(text, end="", markup=False, soft_wrap=True, style=style)
        except KeyboardInterrupt:
            console.print(" (aborted)", style="dim", end="")
        except QuireError as error:
            console.print(f"quire: {error}", style="red", markup=False)
            if reply.is_empty:
                messages.pop()
                continue
        console.print()
        messages.append(reply.message)


class _Reply:
    """Reply of the model, collected while it is shown."""

    def __init__(self) -> None:
        self._content = ""
        self._reasoning = ""

    @property
    def is_empty(self) -> bool:
        return not self._content and not self._reasoning

    @property
    def message(self) -> "Message":
        reasoning = {"reasoning_content": self._reasoning} if self._reasoning else {}
        return {"role": "assistant", "content": self._content, **reasoning}

    def read(self, events: "Iterator[StreamEvent]") -> Iterator[tuple[str, bool]]:
        """Yield new text, and whether it is content; else it is reasoning. Reasoning ends with a blank line."""
        from ..text.chat_format.deltas import ContentDelta, ReasoningDelta

        for delta in _chat_deltas(events):
            if isinstance(delta, ReasoningDelta):
                self._reasoning += delta.text
                yield delta.text, False
            elif isinstance(delta, ContentDelta):
                if self._reasoning and not self._content:
                    yield "\n\n", False
                self._content += delta.text
                yield delta.text, True


def _read_lines(console: "Console") -> Iterator[str]:
    """Yield the lines that the user types; Ctrl-C discards a line."""
    has_color = console.color_system is not None and "readline" in sys.modules
    prompt = _COLORED_PROMPT if has_color else "> "
    while True:
        try:
            line = input(prompt)
        except KeyboardInterrupt:
            console.print()
            continue
        except EOFError:
            console.print()
            return
        if line.strip():
            yield line


def _reply_to_lines(messages: "list[Message]", stream_reply: StreamReply) -> None:
    """Run one turn per line of stdin, and print the replies without their reasoning. The first failure ends it."""
    for line in sys.stdin:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        reply = _Reply()
        with closing(stream_reply(messages)) as events:
            for text, is_content in reply.read(events):
                if is_content:
                    sys.stdout.write(text)
                    sys.stdout.flush()
        sys.stdout.write("\n")
        messages.append(reply.message)


def _chat_deltas(events: "Iterator[StreamEvent]") -> "Iterator[ChatDelta]":
    from ..text.requests.outputs import CompletionDelta

    return (delta for event in events if isinstance(event, CompletionDelta) for delta in event.chat or ())
