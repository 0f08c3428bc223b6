"""Chat templates, rendered in jinja2's sandbox as transformers renders them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .chat import Chat
from .chat_messages import ContentForm
from .json_values import to_plain

# Marks where the last message ends in the rendered prompt, if it is to be continued. The space at its end shows
# whether the template strips messages.
_END_MARK = "QUIRE_END_OF_FINAL_MESSAGE "
_TESTS_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""", re.IGNORECASE)
_TESTS_STRING = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?string""")
_READS_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+[^%}]*content""")


class TemplateError(Exception):
    """The template cannot be parsed, or rejects the conversation."""


@dataclass(frozen=True, slots=True)
class Expansions:
    """The texts that stand for the images and videos of a prompt.

    Attributes:
        by_kind: ``image`` or ``video`` |-> the text of the place of one, and the text of each in order.
    """

    by_kind: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)

    def placeholder(self, kind: str) -> str:
        """Return the text of the place of an image or a video; empty if there is none."""
        return self.by_kind[kind][0] if kind in self.by_kind else ""

    def expand(self, text: str) -> str:
        """Return the text with the images in their places. Raises TemplateError if there are more or fewer places."""
        if not self.by_kind:
            return text
        for kind, (placeholder, texts) in self.by_kind.items():
            if (count := text.count(placeholder)) != len(texts):
                raise TemplateError(
                    f"the prompt has {count} places for {kind}s, {placeholder}, and there are {len(texts)} {kind}s"
                )
        left = {placeholder: iter(texts) for placeholder, texts in self.by_kind.values()}
        return re.sub("|".join(map(re.escape, left)), lambda found: next(left[found[0]]), text)


NO_IMAGES = Expansions()


@dataclass(frozen=True, slots=True)
class Rendering:
    """All that a prompt is rendered from, as plain values that can be sent to another process.

    Attributes:
        source: text of the template.
        variables: name |-> value of the template's variables.
        ends_at_mark: the prompt ends where the final message's content ends.
        expansions: the images.
    """

    source: str
    variables: dict[str, Any]
    ends_at_mark: bool
    expansions: Expansions = NO_IMAGES


def prepare_rendering(
    chat: Chat,
    source: str,
    special_tokens: Mapping[str, str],
    *,
    arguments_as_text: bool = False,
    reads_images: bool = False,
    expansions: Expansions = NO_IMAGES,
) -> Rendering:
    """Return what the prompt of a checked conversation is rendered from.

    Args:
        special_tokens: name |-> text, for example of ``bos_token``.
        arguments_as_text: give the arguments of tool calls as JSON text instead of an object.
        reads_images: the template is of a model that reads images, and may read contents as lists of parts.
        expansions: the images of the conversation.

    Raises:
        TemplateError: the final message cannot be continued.
    """
    as_parts = reads_images and bool(_READS_PARTS.search(source))
    form = ContentForm(
        none_content=bool(_TESTS_NONE.search(source)),
        as_parts=as_parts,
        texts_as_parts=as_parts and not _TESTS_STRING.search(source),
        media_texts={kind: expansions.placeholder(kind) for kind in expansions.by_kind},
    )
    messages = chat.template_messages(form, arguments_as_text=arguments_as_text)
    if chat.continue_final_message:
        messages[-1]["content"] = _marked(messages[-1].get("content"))
    variables = {
        **special_tokens,
        **chat.template_options,
        "messages": messages,
        "tools": chat.tools if chat.offers_tools else None,
        "documents": chat.documents or None,
        "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
    }
    return Rendering(source, to_plain(variables), chat.continue_final_message, expansions)


def _marked(content: Any) -> Any:
    """Return the content of the final message with the mark at its end."""
    if content and isinstance(content, str):
        return content + _END_MARK
    if content and content[-1].get("text"):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
    raise TemplateError("the final message has no text to continue")


def render(rendering: Rendering, max_chars: int) -> str:
    """Return the prompt.

    Raises:
        TemplateError: the template cannot be parsed, raised an error, or writes more than `max_chars` characters.
    """
    pieces, num_chars = [], 0
    try:
        for piece in _compile(rendering.source).generate(rendering.variables):
            num_chars += len(piece)
            if num_chars > max_chars:
                break
            pieces.append(piece)
    except MemoryError as error:
        raise TemplateError("it needs too much memory") from error
    except Exception as error:  # templates raise arbitrary exceptions
        raise TemplateError(_first_line(error)) from error
    if num_chars > max_chars:
        raise TemplateError(f"its prompt has more than {max_chars} characters")
    text = "".join(pieces)
    return rendering.expansions.expand(_cut_at_mark(text) if rendering.ends_at_mark else text)


def _cut_at_mark(text: str) -> str:
    """Return the text up to the end of the final message."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise TemplateError("the template leaves out the final message, which therefore cannot be continued")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's text for training; here the text alone."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the JSON text; unlike jinja2's own filter, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
