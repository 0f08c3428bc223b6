"""LLM reads images: greedy outputs are those of transformers with the model's own processor."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_models import QWEN_TOKENS, file_of, frames_url, picture, qwen_image_processor, save_qwen_vl
from transformers.utils import is_torchvision_available

from quire import LLM, SamplingParams
from quire.proto.errors import InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PAD = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PAD = "<|vision_start|><|video_pad|><|vision_end|>"
# The tokens of images and videos, which transformers would look for.
NO_MEDIA = {256 + QWEN_TOKENS.index(f"<|{kind}_pad|>"): -100.0 for kind in ("image", "video")}
IMAGES = [picture(60, 44, 1), picture(30, 70, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_vl(tmp_path_factory.mktemp("qwen-vl"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", num_kv_blocks=200, max_num_batched_tokens=64) as llm:
        yield llm


def check_against_transformers(
    folder: Path, token_ids: list[int] | None, images: list[Any], generated: list[int], video: Any = None
) -> None:
    """Assert that each token is the most likely one after its prefix."""
    import torch
    from transformers import AutoTokenizer, AutoVideoProcessor, Qwen2_5_VLForConditionalGeneration

    assert token_ids is not None
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    pads = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    ids = torch.tensor([token_ids + generated])
    inputs = qwen_image_processor()(images=images, return_tensors="np") if images else {}
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in inputs.items()}
    kinds = (ids == pads[0]).int() + 2 * (ids == pads[1])
    if video is not None:  # 4 frames per second, 2 of them in a frame of the grid
        own = AutoVideoProcessor.from_pretrained(folder)([video], do_sample_frames=False, return_tensors="pt")
        tensors |= {**own, "second_per_grid_ts": torch.tensor([0.5])}
    with torch.inference_mode():
        logits = model(ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **tensors).logits[0]
    for token_id, row in zip(generated, logits[len(token_ids) - 1 : -1], strict=True):
        assert row.max() - row[token_id] < 1e-3


def test_images_of_a_prompt_are_read_as_by_transformers(llm: LLM, folder: Path) -> None:
    text = f"first {PAD} second {PAD} what?"
    (output,) = llm.generate({"prompt": text, "multi_modal_data": {"image": IMAGES}}, GREEDY)
    check_against_transformers(folder, output.prompt_token_ids, IMAGES, list(output.outputs[0].token_ids))
    (other,) = llm.generate({"prompt": text, "multi_modal_data": {"image": IMAGES[::-1]}}, GREEDY)
    check_against_transformers(folder, other.prompt_token_ids, IMAGES[::-1], list(other.outputs[0].token_ids))


def test_chat_has_images_anywhere(llm: LLM, folder: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(file_of(IMAGES[1])).decode()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [{"type": "image_pil", "image_pil": IMAGES[0]}, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": "A."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "and"}, {"type": "image_url", "image_url": {"url": url}}],
        },
    ]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt is not None
    assert output.prompt.startswith("<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n<|vision_start|>")
    check_against_transformers(folder, output.prompt_token_ids, IMAGES, list(output.outputs[0].token_ids))


def test_video_beside_an_image_is_read_as_by_transformers(llm: LLM, folder: Path) -> None:
    if not is_torchvision_available():
        pytest.skip("torchvision is not installed")
    video = [picture(40, 36, seed) for seed in range(5)]
    data = {"video": video, "image": IMAGES[0]}
    prompt: Any = {
        "prompt": f"{PAD} and {VIDEO_PAD}?", "multi_modal_data": data, "mm_processor_kwargs": {"fps": 4}
    }  # fmt: skip
    params = replace(GREEDY, logit_bias=NO_MEDIA)
    (output,) = llm.generate(prompt, params)
    token_ids = list(output.outputs[0].token_ids)
    check_against_transformers(folder, output.prompt_token_ids, IMAGES[:1], token_ids, video)
    content = [{"type": "video_url", "video_url": {"url": frames_url(video)}}, {"type": "text", "text": "?"}]
    (output,) = llm.chat([{"role": "user", "content": content}], params, mm_processor_kwargs={"fps": 4})
    token_ids = list(output.outputs[0].token_ids)
    check_against_transformers(folder, output.prompt_token_ids, [], token_ids, video)


def test_token_ids_are_expanded_or_have_the_images_tokens_already(llm: LLM) -> None:
    text: Any = {"prompt": f"a{PAD}b", "multi_modal_data": {"image": IMAGES[0]}}
    (output,) = llm.generate(text, GREEDY)
    short = llm.get_tokenizer().encode(f"a{PAD}b")
    for token_ids in (short, output.prompt_token_ids):
        prompt: Any = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": IMAGES[0]}}
        (same,) = llm.generate(prompt, GREEDY)
        assert same.prompt_token_ids == output.prompt_token_ids
        assert same.outputs[0].token_ids == output.outputs[0].token_ids


def test_prefix_with_an_image_is_cached_for_the_same_image_alone(llm: LLM) -> None:
    def cached(seed: int, **options: Any) -> int:
        prompt: Any = {"prompt": f"{PAD} describe it", "multi_modal_data": {"image": picture(64, 64, seed)}}
        return llm.generate(prompt, GREEDY, **options)[0].num_cached_tokens or 0

    assert cached(7) == 0
    assert cached(7) >= 48
    assert cached(8) == 0
    assert cached(7, tenant="other") == 0


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": IMAGES[0]}}, "0 places for images"),
        ({"prompt": PAD * 2, "multi_modal_data": {"image": IMAGES[0]}}, "2 places for images"),
        (PAD, "1 places of images"),
        (
            {"prompt": PAD, "multi_modal_data": {"video": [1]}},
            r"video\[0\]: is of type int, must be a list of PIL",
        ),
        ({"prompt": PAD, "multi_modal_data": {"audio": [1]}}, "has audio, must have image and video alone"),
        ({"prompt": PAD, "multi_modal_data": {"image": picture(4, 900)}}, "cannot be processed"),
    ],
)
def test_images_that_do_not_match_are_refused(llm: LLM, prompt: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        llm.generate(prompt, GREEDY)
