"""Images and videos of prompts: their places among the tokens, and what is refused, with a processor of the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from image_models import frames_url, picture, save_qwen_vl

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.text.media.image_source import ImageSource, ProcessedImage
from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.prompt_images import ImagePrompt
from quire.cluster.text.requests.request import RequestChecker
from quire.cluster.text.requests.tokenizer import load_tokenizer
from quire.proto.config import EngineConfig
from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingParams

FRAMES = tuple(picture(8, 8, seed) for seed in range(3))
IMAGE, VIDEO = ImageSource(image=picture(8, 8)), ImageSource(kind="video", frames=FRAMES)


class FakeProcessor:
    """Makes 2 tokens of an image, and 2 of each frame of a video with a text between them. An ImageProcessor."""

    def __init__(self, tokenizer: Any, video_problem: str = "") -> None:
        self._tokenizer = tokenizer
        self.video_problem = video_problem
        self.num_processed = 0

    def process(self, source: ImageSource, settings: Mapping[str, Any], root: bytes) -> ProcessedImage:
        self.num_processed += 1
        pad, frames = f"<|{source.kind}_pad|>", source.num_frames or 1
        text = "a".join([pad * 2] * frames)
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        digest = self.num_processed.to_bytes(16, "little")
        seconds = 0.5 if source.kind == "video" else 0.0
        tensors = {"pixel_values": np.zeros(4, np.float32)}
        return ProcessedImage(
            digest, pad, text, ids, 2 * frames, (frames, 2, 4), tensors, source.kind, seconds
        )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = save_qwen_vl(tmp_path_factory.mktemp("qwen-vl"))
    limits = '{"image": 2, "video": {"count": 1, "num_frames": 4}}'
    return resolve(EngineOptions(str(folder), device="cpu", limit_mm_per_prompt=limits), Machine(2, 0))


def checker(config: EngineConfig, video_problem: str = "") -> RequestChecker:
    tokenizer = load_tokenizer(config.model)
    return RequestChecker(config, tokenizer, image_processor=FakeProcessor(tokenizer, video_problem))


def placed(checker: RequestChecker, prompt: Any) -> list[tuple[int, int, int, float]]:
    """Return start, number of tokens, frames and time step of each item of a checked prompt."""
    media = checker.check(prompt, SamplingParams()).media
    return [(item.start, item.num_tokens, item.grid[0], item.time_step) for item in media]


def test_images_and_videos_stand_in_the_order_of_the_text(config: EngineConfig) -> None:
    check = checker(config)
    text = "b<|image_pad|>c<|video_pad|><|image_pad|>"
    expected = [(1, 2, 1, 1.0), (4, 8, 3, 2.0), (12, 2, 1, 1.0)]
    for images in ((IMAGE, IMAGE, VIDEO), (VIDEO, IMAGE, IMAGE), (IMAGE, VIDEO, IMAGE)):
        assert placed(check, ImagePrompt(text, images)) == expected
    ids = load_tokenizer(config.model).encode(text, add_special_tokens=False)
    assert placed(check, ImagePrompt(ids, (IMAGE, VIDEO, IMAGE))) == expected
    whole = check.check(ImagePrompt(text, (IMAGE, VIDEO, IMAGE)), SamplingParams()).prompt_token_ids
    assert placed(check, ImagePrompt(whole.tolist(), (IMAGE, VIDEO, IMAGE))) == expected


def test_chat_has_videos_by_url_and_by_frames(config: EngineConfig) -> None:
    check = checker(config)
    for part in (
        {"type": "video_url", "video_url": {"url": frames_url(FRAMES, "JPEG")}},
        {"type": "video", "video": list(FRAMES)},
    ):
        content = [{"type": "text", "text": "b"}, part, {"type": "image", "image": picture(8, 8)}]
        items = placed(check, Chat([{"role": "user", "content": content}]))
        assert [(num_tokens, frames) for _, num_tokens, frames, _ in items] == [(8, 3), (2, 1)]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (ImagePrompt("<|video_pad|>" * 2, (VIDEO, VIDEO)), r"video\[1\]: is one of 2 videos, at most 1"),
        (
            ImagePrompt("<|video_pad|>", (replace(VIDEO, frames=FRAMES * 2),)),
            "has 6 frames, must have at most 4",
        ),
        (ImagePrompt("<|image_pad|>", (VIDEO,)), "has 0 places for videos"),
        (ImagePrompt("<|video_pad|><|image_pad|>", (VIDEO,)), "has 1 places of images"),
        (ImagePrompt("<|video_pad|><|video_pad|>", (VIDEO,)), "has 2 places for videos"),
        ("<|video_pad|>", "has 1 places of videos"),
    ],
)
def test_videos_that_do_not_match_are_refused(config: EngineConfig, prompt: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        checker(config).check(prompt, SamplingParams())


def test_images_within_a_video_are_refused(config: EngineConfig) -> None:
    pads = load_tokenizer(config.model).encode("<|video_pad|><|image_pad|>", add_special_tokens=False)
    prompt = ImagePrompt([pads[0], pads[1], pads[1], *[pads[0]] * 5], (VIDEO, IMAGE))
    with pytest.raises(InvalidRequest, match="an image is at tokens 1 to 3, must be between 8 and 8"):
        checker(config).check(prompt, SamplingParams())


def test_model_with_one_token_for_both_reads_images_or_videos(config: EngineConfig) -> None:
    """As GLM-4V."""
    assert config.model.vision is not None
    token_id = config.model.vision.image_token_id
    vision = replace(config.model.vision, video_token_id=token_id)

    class OneToken(FakeProcessor):
        def process(self, source: ImageSource, settings: Mapping[str, Any], root: bytes) -> ProcessedImage:
            made = super().process(source, settings, root)
            video_pad = config.model.vision.video_token_id if config.model.vision else None
            return replace(
                made, token_ids=tuple(token_id if id == video_pad else id for id in made.token_ids)
            )

    tokenizer = load_tokenizer(config.model)
    shared = replace(config, model=replace(config.model, vision=vision))
    check = RequestChecker(shared, tokenizer, image_processor=OneToken(tokenizer))
    assert placed(check, ImagePrompt("b<|image_pad|>c<|image_pad|>", (IMAGE, IMAGE))) == [
        (1, 2, 1, 1.0), (4, 2, 1, 1.0),
    ]  # fmt: skip
    ids = tokenizer.encode("b<|video_pad|>c", add_special_tokens=False)
    assert placed(check, ImagePrompt(ids, (VIDEO,))) == [(1, 8, 3, 2.0)]
    both = ImagePrompt("<|image_pad|><|video_pad|>", (IMAGE, VIDEO))
    with pytest.raises(
        InvalidRequest, match=r"video\[0\]: is a video beside images, and .* reads one of both"
    ):
        check.check(both, SamplingParams())


def test_model_without_videos_says_why_and_reads_images(config: EngineConfig) -> None:
    check = checker(config, "the server lacks torchvision, which processes videos")
    assert (check.reads_images, check.reads_videos) == (True, False)
    assert placed(check, ImagePrompt("<|image_pad|>", (IMAGE,))) == [(0, 2, 1, 1.0)]
    with pytest.raises(InvalidRequest, match="is a video, and the server lacks torchvision"):
        check.check(ImagePrompt("<|video_pad|>", (VIDEO,)), SamplingParams())
    texts_alone = RequestChecker(config, load_tokenizer(config.model))
    with pytest.raises(InvalidRequest, match=r"is a video, and .* reads text only"):
        texts_alone.check(ImagePrompt("<|video_pad|>", (VIDEO,)), SamplingParams())
