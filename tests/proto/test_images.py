"""Images in digests, positions and frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.proto.digests import make_root, prefix_hashes
from quire.proto.errors import ConfigError
from quire.proto.media import MediaItem, layout_of
from quire.proto.model.rope import Rope
from quire.proto.model.vision import read_vision
from quire.proto.step import EncoderInput, StepPlan
from quire.proto.vision import VisionSpec, rotary_positions

ROOT = make_root("model")
TOKENS = [1, 2, 9, 9, 9, 9, 3, 4, 5, 6, 7, 8]


def hashes(*items: MediaItem) -> list[bytes]:
    return prefix_hashes(TOKENS, 4, ROOT, items)


def item(digest: bytes, start: int, num_tokens: int = 4) -> MediaItem:
    return MediaItem(digest * 16, start, num_tokens, num_tokens)


def test_blocks_that_an_image_touches_have_it_in_their_hashes() -> None:
    assert hashes(item(b"a", 2)) == hashes(item(b"a", 2))
    assert not set(hashes(item(b"a", 2))) & set(hashes(item(b"b", 2)))
    assert not set(hashes(item(b"a", 2))) & set(hashes())


def test_blocks_before_an_image_do_not_know_of_it() -> None:
    assert hashes(item(b"a", 8, 2))[:2] == hashes()[:2]
    assert hashes(item(b"a", 8, 2))[2] != hashes()[2]


def test_the_place_of_an_image_is_part_of_the_hash() -> None:
    assert hashes(item(b"a", 2, 2))[0] != hashes(item(b"a", 1, 2))[0]


def test_text_has_equal_positions_and_an_image_those_of_its_grid() -> None:
    image = MediaItem(b"a" * 16, 2, 6, 6, (1, 4, 6))
    positions, shift = rotary_positions(11, [image], [np.arange(2, 8)], merge_size=2)
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert positions[:, 8:].tolist() == [[5, 6, 7]] * 3
    assert shift == -3


def test_sections_of_a_rotation_follow_each_other_or_alternate() -> None:
    frequencies = (1.0,) * 8
    assert Rope(frequencies).axes() == [0] * 8
    assert Rope(frequencies, sections=(2, 3, 3)).axes() == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = Rope(frequencies, sections=(4, 2, 2), interleaved_sections=True)
    assert interleaved.axes() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_frames_of_a_video_have_times_by_their_rate() -> None:
    """As in Qwen2.5-VL: 2 positions a second, 3 frames a second, 2 of them in a frame of the grid."""
    step = float(np.float32(2) * np.float32(2 / 3))
    video = MediaItem(b"a" * 16, 1, 8, 8, (4, 2, 4), time_step=step)
    positions, shift = rotary_positions(10, [video], [np.arange(1, 9)], merge_size=2)
    assert positions[:, 1:9].tolist() == [[1, 1, 2, 2, 3, 3, 5, 5], [1] * 8, [1, 2] * 4]
    assert positions[:, 9].tolist() == [3] * 3
    assert shift == -6
    assert positions.max() <= video.last_time == 6


def test_frames_with_text_between_them_are_like_images() -> None:
    """As in Qwen3-VL, whose text has the times."""
    places = np.array([1, 2, 5, 6])
    video = MediaItem(b"a" * 16, 1, 6, 4, (2, 2, 4))
    positions, shift = rotary_positions(8, [video], [places], merge_size=2)
    assert positions[0].tolist() == [0, 1, 1, 3, 4, 5, 5, 7]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert shift == 0


@pytest.mark.parametrize(
    ("image", "token_ids", "problem"),
    [
        (MediaItem(b"a" * 16, 0, 6, 6), [9] * 6, "has no grid"),
        (MediaItem(b"a" * 16, 0, 6, 6, (1, 4, 4)), [9] * 6, "6 embeddings for a grid"),
        (
            MediaItem(b"a" * 16, 0, 7, 6, (1, 4, 6)),
            [9, 9, 9, 1, 9, 9, 9],
            "other tokens within the 6 of a frame",
        ),
        (MediaItem(b"a" * 16, 0, 6, 6, (1, 4, 6)), [9] * 6, ""),
        (MediaItem(b"a" * 16, 0, 6, 6, (1, 4, 6)), [9] * 5 + [7], "6 embeddings for 5 image tokens"),
        (MediaItem(b"a" * 16, 0, 5, 4, (2, 2, 4)), [7, 7, 1, 7, 7], ""),
        (MediaItem(b"a" * 16, 0, 5, 4, (2, 2, 4)), [7, 1, 7, 7, 7], "other tokens within the 2 of a frame"),
    ],
)
def test_an_image_must_fit_its_grid(image: MediaItem, token_ids: list[int], problem: str) -> None:
    vision = VisionSpec("kind", 9, 8, merge_size=2, has_grid_positions=True)
    if 7 in token_ids and image.grid[0] > 1:
        vision = replace(vision, video_token_id=7)
    found = vision.check_item(image, np.array(token_ids, np.int32))
    assert problem in found
    assert bool(problem) == bool(found)


def test_frames_of_a_video_are_encoded_alone() -> None:
    vision = VisionSpec(
        "kind", 9, 8, num_parameters=5, layer_windows=(0, 4), patch_bytes=2, hf={"hidden_size": 3}
    )
    image = MediaItem(b"a" * 16, 0, 6, 6, (1, 4, 6), num_bytes=24 * 2)
    video = MediaItem(b"a" * 16, 0, 6, 6, (3, 2, 4), num_bytes=24 * 2)
    assert vision.work(image) == 24 * (5 + 2 * (24 + 4) * 3)
    assert vision.work(video) == 24 * (5 + 2 * (8 + 4) * 3)


def test_the_frame_of_an_image_is_no_plan() -> None:
    tensors = {"pixels": np.arange(6, dtype=np.float32).reshape(2, 3), "grid": np.array([[1, 2, 3]])}
    data = b"".join(each.tobytes() for each in tensors.values())
    sent = EncoderInput(7, layout_of(tensors), data)
    frame = sent.encode()
    assert EncoderInput.is_frame(frame)
    assert not EncoderInput.is_frame(StepPlan(1, 1, 0).encode())
    received = EncoderInput.decode(frame)
    assert received == sent
    for name, tensor in received.tensors().items():
        assert tensor.dtype == tensors[name].dtype
        assert tensor.tolist() == tensors[name].tolist()


def test_an_encoder_that_cannot_be_read_is_refused_by_name() -> None:
    assert read_vision("model", "LlamaForCausalLM", {}) is None
    with pytest.raises(ConfigError, match="model: the configuration of its image encoder"):
        read_vision("model", "Qwen2_5_VLForConditionalGeneration", {"vision_config": {}})
