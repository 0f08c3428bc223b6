"""Images are asked for when they are needed, kept within bounds, and encoded again where the ranks lost them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import IMAGE_TOKEN, images_of, oracle, see, small_config

from quire.proto.errors import RequestQuarantined
from quire.proto.media import MediaItem
from quire.proto.step import WHOLE_IMAGE
from quire.proto.stream import MediaUpload, media_uploads
from quire.scheduler.core.queue import media
from quire.scheduler.kv.kv_tiers import KvTiers

LENGTHS = {bytes([each]) * 16: length for each, length in enumerate((2, 3, 4, 9))}
FIRST, SECOND, THIRD, LARGE = LENGTHS


def make_driver(**settings: Any) -> Driver:
    defaults: dict[str, Any] = {"encoder_cache_rows": 30, "eos": ()}
    return Driver(small_config(**(defaults | settings)), images=images_of([*LENGTHS]))


def prompt_with(*images: bytes, text: int = 2) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return a prompt with images between texts, and the images."""
    tokens, items = [5] * text, list[MediaItem]()
    for digest in images:
        items.append(MediaItem(digest, len(tokens), LENGTHS[digest], LENGTHS[digest], num_bytes=len(digest)))
        tokens += [IMAGE_TOKEN] * LENGTHS[digest] + [6] * text
    return tokens, tuple(items)


def add(
    driver: Driver, handle: int, *images: bytes, gateway: bytes = b"gateway", **settings: Any
) -> list[int]:
    """Submit a prompt with images; return its expected output."""
    prompt, items = prompt_with(*images)
    rejected = driver.add(handle, prompt, gateway, media=items, max_tokens=4, **settings)
    assert rejected is None, rejected
    return oracle(see(prompt, items), 4, ())


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the scheduler room for the tensors of two images."""
    monkeypatch.setattr(media, "MAX_HELD_BYTES", 40)


def test_an_image_is_asked_for_once_however_many_requests_have_it() -> None:
    driver = make_driver()
    expected = [add(driver, handle, FIRST, FIRST) for handle in range(3)]
    driver.run()
    assert driver.asked == [FIRST]
    assert [driver.outputs[handle] for handle in range(3)] == expected
    assert driver.scheduler.media.num_held_bytes == 0
    assert driver.scheduler.media.cache.num_encoded == 1


def test_tenants_share_no_encoder_output() -> None:
    driver = make_driver()
    for handle, tenant in enumerate(("a", "b")):
        add(driver, handle, FIRST, tenant=tenant)
        driver.run()
    assert driver.scheduler.media.cache.num_encoded == 2


def test_others_run_while_an_image_is_awaited() -> None:
    driver = make_driver()
    driver.sends_images = False
    expected = add(driver, 0, FIRST)
    driver.add(1, [7, 8, 9], max_tokens=4)
    for _ in range(10):
        driver.step()
    assert len(driver.outputs[1]) == 4
    assert not driver.outputs[0]
    driver.sends_images = True
    driver.run()
    assert driver.outputs[0] == expected


def test_an_image_that_does_not_come_ends_its_request_alone() -> None:
    driver = make_driver()
    driver.sends_images = False
    add(driver, 0, FIRST)
    driver.now = media.UPLOAD_TIMEOUT_S + 1
    other = add(driver, 1, SECOND)
    driver.scheduler.wait(driver.now)
    driver.record(driver.scheduler.take_outgoing())
    assert driver.finishes[0].grpc_status == "UNAVAILABLE"
    assert "did not send an image" in driver.finishes[0].error
    driver.unanswered, driver.sends_images = [SECOND], True
    driver.run()
    assert driver.outputs[1] == other


def test_another_gateway_is_asked_when_the_first_gives_up() -> None:
    driver = make_driver()
    driver.sends_images = False
    add(driver, 0, FIRST, gateway=b"one")
    expected = add(driver, 1, FIRST, gateway=b"two")
    driver.unanswered = []
    driver.abort(0, b"one")
    driver.plan()
    assert [gateway for gateway, _ in driver.scheduler.media.take_asks()] == [b"two"]
    driver.unanswered, driver.sends_images = [FIRST], True
    driver.run()
    assert driver.outputs[1] == expected


@pytest.mark.usefixtures("small_room")
def test_more_images_than_there_is_room_for_come_in_turn() -> None:
    driver = make_driver(encoder_cache_rows=4)
    expected = add(driver, 0, FIRST, SECOND, THIRD, LARGE, FIRST)
    others = add(driver, 1, LARGE, THIRD)
    driver.run()
    assert driver.outputs[0] == expected
    assert driver.outputs[1] == others
    assert driver.scheduler.media.num_held_bytes == 0


def test_an_image_larger_than_the_cache_is_served_in_chunks() -> None:
    driver = make_driver(encoder_cache_rows=3, max_num_batched_tokens=4)
    expected = add(driver, 0, LARGE, FIRST)
    driver.run()
    assert driver.outputs[0] == expected
    assert driver.scheduler.media.cache.num_bytes <= driver.config.encoder_cache_bytes


def test_a_chunk_has_a_whole_image_if_its_tokens_attend_to_each_other() -> None:
    driver = make_driver(attends_within="all", max_num_batched_tokens=10)
    expected = add(driver, 0, LARGE, THIRD, SECOND)
    driver.run()
    assert driver.outputs[0] == expected
    ends = np.cumsum([int(plan.chunk_lens[0]) for plan in driver.plans if plan.chunk_lens.size])
    _, items = prompt_with(LARGE, THIRD, SECOND)
    assert not any(item.start < end < item.end for item in items for end in ends.tolist())
    prompt, items = prompt_with(LARGE)
    driver = make_driver(attends_within="all", max_num_batched_tokens=8)
    rejected = driver.add(1, prompt, media=items, max_tokens=4)
    assert rejected is not None
    assert "max_num_batched_tokens" in rejected.error


def test_no_state_is_saved_within_an_image_whose_tokens_attend_to_each_other() -> None:
    driver = make_driver(
        attends_within="all", max_num_batched_tokens=10, num_state_slots=9, block_size=2, num_blocks=64
    )
    # Of the first prompt the end lies within an image; at the second one's the prompts branch within it.
    expected = [add(driver, 0, SECOND, LARGE), add(driver, 1, SECOND, LARGE, FIRST)]
    driver.run()
    for handle, images in enumerate([(SECOND, LARGE), (SECOND, LARGE, THIRD)], 2):
        expected.append(add(driver, handle, *images))
        driver.run()
    assert [driver.outputs[handle] for handle in range(4)] == expected
    assert driver.scheduler.blocks.state_slots.num_saved


@pytest.mark.parametrize("kept", [KvTiers.NONE, KvTiers.ALL])
def test_ranks_that_were_replaced_encode_again_without_another_upload(kept: KvTiers) -> None:
    driver = make_driver(max_num_batched_tokens=4)
    expected = add(driver, 0, SECOND, LARGE)
    for _ in range(3):
        driver.plan()
        driver.apply_result()
    driver.lose_ranks(kept=kept)
    driver.run()
    assert driver.outputs[0] == expected
    assert driver.asked == [SECOND, LARGE]


def slow_driver(**settings: Any) -> Driver:
    """Return a driver of a model whose encoder computes a tenth of an image in a step."""
    driver = make_driver(**settings)
    work = 10 * driver.config.encoder_step_work
    return make_driver(image_work=work, **settings)


def encoded_shares(driver: Driver) -> list[int]:
    return [share for plan in driver.plans for share in plan.encode_shares.tolist()]


def test_a_large_image_is_encoded_over_several_steps_beside_streams() -> None:
    driver = slow_driver()
    driver.add(0, [7, 8, 9], max_tokens=40)
    driver.step()
    expected = add(driver, 1, FIRST, LARGE)
    driver.run(depth=2)
    tenths = [WHOLE_IMAGE * tenth // 10 for tenth in range(1, 11)]
    assert encoded_shares(driver) == tenths * 2
    assert driver.outputs[1] == expected
    assert len(driver.outputs[0]) == 40
    # The stream has a token in each step in which a part of an image is computed.
    assert not any(plan.held_rows.size for plan in driver.plans if plan.encodes.size)


def test_a_row_that_waits_for_its_image_is_not_preempted_for_others() -> None:
    driver = slow_driver(max_num_seqs=1)
    expected = [add(driver, handle, image) for handle, image in enumerate((FIRST, SECOND, FIRST))]
    driver.run(most_steps=500)
    assert [driver.outputs[handle] for handle in range(3)] == expected
    assert driver.scheduler.stats.num_preemptions == 0


def test_small_images_are_encoded_together() -> None:
    work = make_driver(max_num_batched_tokens=64).config.encoder_step_work // 2
    driver = make_driver(image_work=work, max_num_batched_tokens=64)
    expected = add(driver, 0, FIRST, SECOND, THIRD)
    driver.run()
    assert driver.outputs[0] == expected
    assert encoded_shares(driver) == [WHOLE_IMAGE] * 3
    assert [plan.encodes.size for plan in driver.plans if plan.encodes.size] == [2, 1]


def test_an_image_in_part_is_dropped_with_the_request_that_waits_for_it() -> None:
    driver = slow_driver()
    driver.add(0, [7, 8, 9], max_tokens=40)
    add(driver, 1, LARGE)
    for _ in range(4):
        driver.step()
    (media_id,) = {each for plan in driver.plans for each in plan.encodes.tolist()}
    assert driver.scheduler.media.cache.num_bytes
    driver.abort(1)
    driver.run()
    assert [plan.media_drops.tolist() for plan in driver.plans if plan.media_drops.size] == [[media_id]]
    assert driver.scheduler.media.cache.num_bytes == driver.scheduler.media.cache.num_encoded == 0
    expected = add(driver, 2, LARGE)
    driver.run()
    assert driver.outputs[2] == expected


def test_ranks_that_were_replaced_begin_an_image_in_part_again() -> None:
    driver = slow_driver()
    expected = add(driver, 0, LARGE)
    for _ in range(4):
        driver.step()
    driver.lose_ranks()
    driver.run()
    assert driver.outputs[0] == expected
    assert driver.asked == [LARGE]
    assert encoded_shares(driver).count(WHOLE_IMAGE) == 1


def test_an_image_that_fails_the_ranks_before_its_prompt_has_a_row_is_quarantined() -> None:
    driver = slow_driver()
    prompt, items = prompt_with(LARGE, text=0)
    driver.add(0, [*prompt, 5], media=items, max_tokens=4)
    driver.add(1, [7, 8, 9], max_tokens=40)
    for _ in range(2):
        while not (plan := driver.plan()) or not plan.encodes.size:
            driver.apply_result()
        assert not any(new.media for new in plan.new)
        driver.lose_ranks(is_step_error=True, step_id=plan.step_id)
    driver.run()
    assert driver.finishes[0].error_reason == RequestQuarantined.reason
    assert len(driver.outputs[1]) == 40


def test_an_encoder_output_is_found_by_a_later_request() -> None:
    driver = make_driver(prefix_caching=False)
    for handle in range(2):
        expected = add(driver, handle, FIRST, THIRD)
        driver.run()
        assert driver.outputs[handle] == expected
    assert driver.asked == [FIRST, THIRD]
    assert driver.scheduler.media.cache.num_encoded == 2


def test_pieces_that_contradict_the_announcement_end_the_request() -> None:
    driver = make_driver()
    driver.sends_images = False
    add(driver, 0, FIRST)
    (upload,) = media_uploads(FIRST, {"digest": np.zeros(17, np.uint8)})
    driver.scheduler.receive_media(upload, driver.now)
    driver.record(driver.scheduler.take_outgoing())
    assert driver.finishes[0].grpc_status == "INVALID_ARGUMENT"
    assert "was announced with 16" in driver.finishes[0].error
    assert driver.scheduler.media.num_held_bytes == 0


def test_an_image_that_nobody_waits_for_is_dropped() -> None:
    driver = make_driver()
    (upload,) = media_uploads(FIRST, driver.images[FIRST])
    assert isinstance(upload, MediaUpload)
    driver.scheduler.receive_media(upload, driver.now)
    assert driver.scheduler.media.num_held_bytes == 0


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (MediaItem(FIRST, 0, 2, 2), "has 2 embeddings for 0 image tokens"),
        (MediaItem(FIRST, 2, 2, 1), "has 1 embeddings for 2 image tokens"),
        (
            MediaItem(FIRST, 2, 2, 2, (2, 1, 1), time_step=1e6),
            "the position 1000002 in time, the context has",
        ),
    ],
)
def test_images_that_do_not_match_the_prompt_are_refused(item: MediaItem, problem: str) -> None:
    prompt, _ = prompt_with(FIRST)
    rejected = make_driver().add(0, prompt, media=(item,))
    assert rejected is not None
    assert problem in rejected.error


def test_a_model_that_reads_no_images_refuses_them() -> None:
    driver = Driver(small_config())
    prompt, items = prompt_with(FIRST)
    rejected = driver.add(0, prompt, media=items)
    assert rejected is not None
    assert "reads none" in rejected.error
