"""Pictures through a whole server of the bundled vision model: each API's own client gets the true answer."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from deadlines import READY_TIMEOUT_S
from example_programs import RunExample
from PIL import Image, ImageDraw

from quire import Client
from quire.cluster.cli.demo.server import ServerProcess

pytestmark = pytest.mark.cluster

MODEL = "demo-vision"
# Longer than it takes to kill a rank after the first of them.
NUM_LONG_TOKENS = 300
QUESTION = "Describe the picture."
TRUTH = "The picture shows a red circle on a white background."
OTHER_TRUTH = "The picture shows a yellow square on a black background."


def png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def circle() -> str:
    image = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(image).ellipse((100, 60, 220, 180), fill="red")
    return png(image)


@pytest.fixture(scope="module")
def square() -> str:
    image = Image.new("RGB", (200, 200), "black")
    ImageDraw.Draw(image).rectangle((60, 50, 150, 140), fill="yellow")
    return png(image)


@pytest.fixture(scope="module")
def vision_server() -> Iterator[ServerProcess]:
    """Two ranks of the vision model, audited at each step."""
    options = "--tensor-parallel-size", "2", "--num-kv-blocks", "128", "--audit"
    with ServerProcess(MODEL, *options) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server
        assert server.stop() == 0, server.log
        assert server.leftovers() == []


@pytest.fixture(scope="module")
def client(vision_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{vision_server.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def part(image: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}


def chat(client: openai.OpenAI, messages: list[Any]) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40)
    return answer.choices[0].message.content or ""


def test_openai_chat_describes_the_picture(client: openai.OpenAI, circle: str, square: str) -> None:
    question = {"type": "text", "text": QUESTION}
    for image, truth in ((circle, TRUTH), (square, OTHER_TRUTH)):
        assert chat(client, [{"role": "user", "content": [part(image), question]}]) == truth


def test_openai_chat_answers_about_the_newer_picture(client: openai.OpenAI, circle: str, square: str) -> None:
    question = {"type": "text", "text": "What color is the background?"}
    messages: list[Any] = [{"role": "user", "content": [part(circle), question]}]
    first = chat(client, messages)
    assert first == "The background is white."
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": [part(square), question]},
    ]
    assert chat(client, messages) == "The background is black."


def test_openai_responses_describe_the_picture(client: openai.OpenAI, circle: str) -> None:
    content: Any = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{circle}", "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    answer = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=40
    )
    assert answer.output_text == TRUTH


def test_anthropic_messages_describe_the_picture(vision_server: ServerProcess, circle: str) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": circle}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    with anthropic.Anthropic(base_url=vision_server.http_url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model=MODEL, max_tokens=40, messages=[{"role": "user", "content": content}]
        )
    assert [block.text for block in answer.content if block.type == "text"] == [TRUTH]


def test_a_killed_rank_changes_no_token_about_a_picture(
    vision_server: ServerProcess, client: openai.OpenAI, circle: str, square: str
) -> None:
    """The images are encoded again by the new rank, without another upload by the client."""
    content: Any = [part(circle), part(square), {"type": "text", "text": QUESTION}]

    def stream() -> Iterator[str]:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_LONG_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in chunks:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                yield text

    expected = "".join(stream())
    with Client(vision_server.address) as admin:
        (replica,) = admin.status()
        texts = stream()
        received = next(texts)
        os.kill(replica.ranks[1].pid, signal.SIGKILL)
        received += "".join(texts)
        assert received == expected
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (recovered := admin.status()[0]).num_recoveries == replica.num_recoveries:
            assert time.monotonic() < deadline, "the rank was not replaced"
            time.sleep(0.05)
    assert recovered.num_recoveries == replica.num_recoveries + 1
    assert recovered.ranks[1].pid != replica.ranks[1].pid


def test_batches_of_requests_have_pictures(
    vision_server: ServerProcess, circle: str, square: str, tmp_path: Path
) -> None:
    requests = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL,
                "max_tokens": 40,
                "messages": [{"role": "user", "content": [part(image), {"type": "text", "text": QUESTION}]}],
            },
        }
        for name, image in (("circle", circle), ("square", square))
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in requests))
    command = [sys.executable, "-m", "quire", "run-batch", str(source), str(out)]
    subprocess.run([*command, "--url", vision_server.http_url], check=True, timeout=READY_TIMEOUT_S)
    answers = {entry["custom_id"]: entry for entry in map(json.loads, out.read_text().splitlines())}
    found = {
        name: entry["response"]["body"]["choices"][0]["message"]["content"] for name, entry in answers.items()
    }
    assert found == {"circle": TRUTH, "square": OTHER_TRUTH}


def test_example_describes_its_pictures(run_example: RunExample, vision_server: ServerProcess) -> None:
    printed = run_example("describe_picture.py", vision_server.http_url).splitlines()
    assert printed == [
        f"Describe the picture. {TRUTH}",
        "What color is the background? The background is white.",
        "Describe the picture. The picture shows a yellow square on a black background.",
        "What color is the background? The background is black.",
    ]
