"""A tiny model with a chat template, and outputs of known texts."""

from __future__ import annotations

import shutil
from pathlib import Path

from local_server import ThreadedServer

TEMPLATE = """
{%- if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif -%}
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }}={{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt %}assistant:{% if enable_thinking is false %}<think></think>{% endif %}{% endif -%}
"""
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def chat_model(model_dir: Path, folder: Path) -> Path:
    """Return a copy of the model with a chat template."""
    copy = folder / "chat-model"
    shutil.copytree(model_dir, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def write_output(server: ThreadedServer, text: str) -> None:
    """Let the model's next output be this text. Waits for earlier outputs, whose last step may still be in flight."""
    server.wait_until_free()
    server.server.script.write(server.server.tokenizer.encode(text, add_special_tokens=False))
