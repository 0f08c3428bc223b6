"""Files of images: the formats, the sizes and the damage that are allowed."""

from __future__ import annotations

import base64
import io
import random
from contextlib import suppress

import numpy as np
import pytest
from image_models import file_of, frames_url, picture
from PIL import Image

from quire.cluster.text.media.image_file import open_image, open_video
from quire.cluster.text.media.image_source import ImageError, ImageSource


def opened(data: bytes, **options: int) -> np.ndarray:
    return np.asarray(open_image(ImageSource(data=data), **options))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_of_lossless_files_are_kept(kind: str, mode: str) -> None:
    image = picture(13, 7, mode=mode) if kind != "GIF" else picture(13, 7, mode="L")
    data = file_of(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(opened(data), np.asarray(image.convert("RGB")))


def test_first_frame_of_an_animation_is_taken() -> None:
    frames = [picture(9, 9, seed, "L") for seed in range(3)]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(opened(data), np.asarray(frames[0].convert("RGB")))


def test_image_is_turned_as_its_exif_data_says() -> None:
    image = picture(10, 6)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    data = file_of(image, "PNG", exif=exif)
    np.testing.assert_array_equal(opened(data), np.rot90(np.asarray(image), -1))


def test_transparent_pixels_are_white() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0] = 10, 20, 30, 255
    found = opened(file_of(Image.fromarray(pixels)))
    assert found[0, 0].tolist() == [10, 20, 30]
    assert found[1].tolist() == [[255] * 3] * 2


def test_sixteen_bits_of_gray_are_scaled() -> None:
    pixels = np.array([[0, 0x8000, 0xFFFF]], np.uint16)
    found = opened(file_of(Image.fromarray(pixels)))
    assert [int(value) for value in found[0, :, 0]] == [0, 128, 255]


def test_low_detail_fits_into_512_pixels() -> None:
    image = open_image(ImageSource(image=picture(1200, 300), detail="low"))
    assert image.size == (512, 128)
    assert open_image(ImageSource(image=picture(1200, 300), detail="high")).size == (1200, 300)


def test_size_is_checked_before_pixels_are_decoded() -> None:
    data = file_of(picture(100, 100))
    with pytest.raises(ImageError, match="has 100 by 100 pixels, must have at most 9,999 altogether"):
        opened(data[:64], max_pixels=9_999)  # the rest of the file is not there


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damaged_files_raise_image_errors_alone(kind: str) -> None:
    data = file_of(picture(40, 30), kind)
    rng = random.Random(kind)
    for _ in range(150):
        damaged = bytearray(data[: rng.randrange(1, len(data))] if rng.random() < 0.5 else data)
        for _ in range(rng.randrange(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with suppress(ImageError):
            opened(bytes(damaged))


@pytest.mark.parametrize(
    ("kind", "name"), [("BMP", "a BMP file"), ("TIFF", "a TIFF file"), ("ICO", "no image")]
)
def test_other_formats_are_refused(kind: str, name: str) -> None:
    with pytest.raises(ImageError, match=f"is {name}.*, must be PNG, JPEG, WebP or GIF"):
        opened(file_of(picture(16, 16), kind))


def test_data_urls_are_read_and_others_are_named() -> None:
    data = file_of(picture(8, 8))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert ImageSource(url=url).file() == data
    assert ImageSource(image=Image.open(io.BytesIO(data))).file().startswith(b"\x89PNG")
    for wrong, problem in (
        ("data:image/png,abc", "another form"),
        ("data:;base64,", "is empty"),
        ("data:", "form"),
    ):
        with pytest.raises(ImageError, match=problem):
            ImageSource(url=wrong).file()


FRAMES = [picture(9, 6, seed) for seed in range(3)]


def test_frames_of_a_video_are_decoded_in_order() -> None:
    expected = np.stack([np.asarray(frame) for frame in FRAMES])
    for source in (
        ImageSource(kind="video", url=frames_url(FRAMES)),
        ImageSource(kind="video", frames=tuple(FRAMES)),
        ImageSource(kind="video", frames=tuple(map(file_of, FRAMES))),
    ):
        assert (source.num_frames, source.is_remote) == (3, False)
        np.testing.assert_array_equal(open_video(source, max_pixels=3 * 54), expected)


def test_each_frame_has_the_limits_of_an_image() -> None:
    jpeg = file_of(FRAMES[1], "JPEG")
    cases = {
        "of which number 2 has 8 by 6 pixels, must have 9 by 6 as the first one": file_of(picture(8, 6)),
        "has 3 frames, of which number 2 is damaged": jpeg[: len(jpeg) // 2],
        "of which number 2 is a HEIC, AVIF or video file, must be": b"\0\0\0\x18ftypmp42" + bytes(40),
        "of which number 2 has 90 by 6 pixels, must have at most 100 altogether": file_of(picture(90, 6)),
    }
    for problem, frame in cases.items():
        source = ImageSource(kind="video", frames=(FRAMES[0], frame, FRAMES[2]))
        with pytest.raises(ImageError, match=problem):
            open_video(source, max_pixels=302)
    with pytest.raises(ImageError, match="number 2 is empty"):
        open_video(ImageSource(kind="video", url=frames_url(FRAMES[:1]) + ","))
