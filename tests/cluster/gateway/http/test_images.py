"""A server of a model that reads images: all APIs, and what is refused, each with its own message."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from image_models import file_of, frames_url, picture, save_qwen_vl
from local_server import ThreadedServer, threaded_server
from transformers.utils import is_torchvision_available

from quire import LLM
from quire.cluster.client.client import Client
from quire.cluster.text.requests.outputs import CompletionDelta
from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
IMAGES = [picture(60, 44, 1), picture(30, 70, 2)]
TEXT = {"type": "text", "text": "What is it?"}
LIMITS = '{"image": 4, "video": {"count": 1, "num_frames": 8}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_vl(tmp_path_factory.mktemp("qwen-vl"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ThreadedServer]:
    with threaded_server(folder, limit_mm_per_prompt=LIMITS, max_num_batched_tokens=64) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ThreadedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **options}}


def video_part(frames: list[Any], kind: str = "PNG") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": frames_url(frames, kind)}}


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """The reply to both images and the text, of LLM."""
    content = [{"type": "image_pil", "image_pil": image} for image in IMAGES] + [TEXT]
    with LLM(str(folder), device="cpu", num_kv_blocks=100) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.chat([{"role": "user", "content": content}], params)
    return output.outputs[0].text


def test_chat_completion_reads_images(http: httpx.Client, expected: str) -> None:
    content = [
        image_part(file_of(IMAGES[0]), detail="high"),
        image_part(file_of(IMAGES[1], "WEBP", lossless=True)),
    ]
    body = {"messages": [{"role": "user", "content": [*content, TEXT]}], **GREEDY}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == expected
    tokens = http.post("/tokenize", json={"messages": body["messages"]}).json()
    assert answer["usage"]["prompt_tokens"] == tokens["count"] > 100
    again = http.post("/v1/chat/completions", json=body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_videos_are_read_over_http_and_grpc(http: httpx.Client, server: ThreadedServer, folder: Path) -> None:
    (served,) = http.get("/v1/models").json()["data"]
    if not is_torchvision_available():
        assert served["input_modalities"] == ["text", "image"]
        pytest.skip("torchvision is not installed")
    assert served["input_modalities"] == ["text", "image", "video"]
    frames = [picture(40, 36, seed) for seed in range(3)]
    parts = [image_part(file_of(IMAGES[0])), video_part(frames), TEXT]
    body = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": {"fps": 1}, **GREEDY}
    answer = http.post("/v1/chat/completions", json=body).json()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    content = [{"type": "image", "image": IMAGES[0]}, {"type": "video", "video": frames}, TEXT]
    messages = [{"role": "user", "content": content}]
    with LLM(str(folder), device="cpu", num_kv_blocks=100) as llm:
        (output,) = llm.chat(messages, params, mm_processor_kwargs={"fps": 1})
    assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
    with Client(server.server.target) as client:
        own = client.chat(messages, params, image_settings={"fps": 1})
    assert own.outputs[0].text == output.outputs[0].text


def test_responses_and_messages_read_images(http: httpx.Client, expected: str) -> None:
    files = [file_of(image) for image in IMAGES]
    parts = [{"type": "input_image", "image_url": data_url(data)} for data in files]
    content = [*parts, {"type": "input_text", "text": TEXT["text"]}]
    answer = http.post(
        "/v1/responses",
        json={"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": 8,
              "ignore_eos": True},
    ).json()  # fmt: skip
    assert answer["output"][-1]["content"][0]["text"] == expected
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                     "data": base64.b64encode(data).decode()}}
        for data in files
    ]  # fmt: skip
    body = {"messages": [{"role": "user", "content": [*blocks, TEXT]}], "max_tokens": 8, "temperature": 0}
    text = http.post("/v1/messages", json=body).json()["content"][0]["text"]
    assert expected.startswith(text) or text.startswith(expected)
    count = http.post("/v1/messages/count_tokens", json={"messages": body["messages"]}).json()
    assert count["input_tokens"] > 100


def test_images_of_tool_results_are_read(http: httpx.Client) -> None:
    tool = {"role": "tool", "tool_call_id": "a", "content": [image_part(file_of(IMAGES[0])), TEXT]}
    answer = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}, tool], **GREEDY}
    )
    assert answer.status_code == 200, answer.text
    block = {"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "image", "source": {"type": "url", "url": data_url(file_of(IMAGES[0]))}}
    ]}  # fmt: skip
    answer = http.post(
        "/v1/messages", json={"messages": [{"role": "user", "content": [block]}], "max_tokens": 2}
    )
    assert answer.status_code == 200, answer.text


def test_clients_of_grpc_send_images(server: ThreadedServer, expected: str) -> None:
    content = [
        {"type": "image", "image": file_of(IMAGES[0])},
        {"type": "image_pil", "image_pil": IMAGES[1]},
        TEXT,
    ]
    with Client(server.server.target) as client:
        output = client.chat(
            [{"role": "user", "content": content}],
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        assert output.outputs[0].text == expected
        with pytest.raises(InvalidRequest, match="is a URL, which the server does not fetch"):
            client.chat(
                [{"role": "user", "content": [{"type": "image", "image": "https://example.com/a.png"}]}]
            )


def test_clients_of_grpc_send_large_images_in_pieces(server: ThreadedServer, expected: str) -> None:
    """Bytes behind the end of a PNG file are ignored."""
    files = [file_of(image) + bytes(5 << 20) for image in IMAGES]
    messages = [{"role": "user", "content": [*({"type": "image", "image": file} for file in files), TEXT]}]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Client(server.server.target) as client:
        info = client.server_info()
        assert info.max_message_bytes < 10 << 20 < info.max_request_bytes
        assert client.chat(messages, params).outputs[0].text == expected
        deltas = [each for each in client.chat_stream(messages, params) if isinstance(each, CompletionDelta)]
        assert "".join(each.text for each in deltas) == expected
        large = {"type": "image", "image": files[0] + bytes(info.max_request_bytes)}
        with pytest.raises(InvalidRequest, match=r"num_bytes: is \d+, must be from 1 to 33554432"):
            client.chat([{"role": "user", "content": [large]}])


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of one color: its head claims the size, its rows are zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 100_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


JPEG = file_of(picture(64, 64), "JPEG")
BAD = {
    "too many": ([image_part(JPEG)] * 5, "is one of 5 images, at most 4 of a request are allowed"),
    "wrong base64": (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,ab!c"}}], "has wrong base64",
    ),
    "surrogates": (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,\ud800"}}], "characters other than ASCII",
    ),
    "surrogates of a video": (
        [{"type": "video_url", "video_url": {"url": "data:video/png;base64,\ud800"}}], "characters other than ASCII",
    ),
    "no base64": ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}], "data URL of another form"),
    "svg": ([image_part(b"<svg xmlns='http://www.w3.org/2000/svg'/>")], "is an SVG or XML file, must be PNG, JPEG"),
    "tiff": ([image_part(file_of(picture(8, 8), "TIFF"))], "is a TIFF file, must be PNG, JPEG"),
    "pdf": ([image_part(b"%PDF-1.7")], "is a PDF file"),
    "noise": ([image_part(b"\x01" * 100)], "is no image that can be read"),
    "truncated": ([image_part(JPEG[: len(JPEG) // 2])], "is damaged"),
    "url": ([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}], "server does not fetch"),
    "file": ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "must be a data: or https: URL"),
    "detail": ([image_part(JPEG, detail="tiny")], "detail: is 'tiny', must be one of auto, low, high"),
    "audio": ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "audio is not supported"),
    "audio url": ([{"type": "audio_url", "audio_url": {"url": "data:"}}], "audio is not supported"),
    "container": (
        [{"type": "video_url", "video_url": {"url": data_url(b"ftyp", "video/mp4")}}],
        "video_url: is 'data:video/mp4;base64,ZnR5cA==', must be data:video/jpeg;base64, and the frames in base64",
    ),
    "remote video": ([{"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}], "are not decoded"),
    "no frames": ([{"type": "video", "video": []}], "must be the frames of a video"),
    "videos": ([video_part(IMAGES[:1])] * 2, "is one of 2 videos, at most 1 of a request are allowed"),
    "video": (
        [video_part([picture(8, 8)] * 9)],
        "has 9 frames, must have at most 8" if is_torchvision_available() else "the server lacks torchvision",
    ),
    "frame": (
        [video_part([IMAGES[0], IMAGES[1]])],
        "has 2 frames, of which number 2 has 30 by 70 pixels, must have 60 by 44 as the first one"
        if is_torchvision_available() else "the server lacks torchvision",
    ),
    "placeholder": ([{"type": "text", "text": "see <|image_pad|>"}], "has 1 places of images"),
    "placeholders": ([image_part(JPEG), {"type": "text", "text": "<|image_pad|>"}], "has 2 places for images"),
    "no url": ([{"type": "image_url"}], "must be the URL of an image"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_image_is_refused_by_name(http: httpx.Client, case: str) -> None:
    content, problem = BAD[case]
    body = json.dumps({"messages": [{"role": "user", "content": content}], **GREEDY})
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert problem in answer.json()["error"]["message"]


def test_bombs_and_floods_are_refused_before_a_pixel_is_decoded(http: httpx.Client) -> None:
    flood = [image_part(file_of(picture(2, 2, seed))) for seed in range(1025)]
    cases = (
        ([image_part(bomb(50_000, 50_000))], "has too many pixels"),
        ([image_part(bomb(12_000, 6_000))], "has 12000 by 6000 pixels, must have at most 67,108,864"),
        (flood, "must be 0 to 1024"),
        (flood[:999], "is one of 999 images"),
    )
    for content, problem in cases:
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert (answer.status_code, problem in answer.text) == (400, True), answer.text


def test_image_for_a_text_model_has_a_message_of_its_own(folder: Path) -> None:
    with threaded_server(folder, language_model_only=True) as server:
        body = {"messages": [{"role": "user", "content": [image_part(JPEG)]}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "is an image, and the server runs with --language-model-only" in answer.text
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}],
                                                                       "max_tokens": 2}, timeout=60)  # fmt: skip
        assert answer.status_code == 200, answer.text
