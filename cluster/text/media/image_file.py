"""Files of images and frames, decoded within limits: few formats, few pixels, upright and without transparency."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

import numpy as np

from .image_source import ImageError, ImageSource

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Decoded, these are 192 MB; a scan of a page of A3 with 600 dots per inch has 70 million.
MAX_PIXELS = 64 << 20
# Longest side of an image with the detail `low`.
LOW_DETAIL_SIDE = 512


def open_image(source: ImageSource, max_pixels: int = MAX_PIXELS) -> Any:
    """Return the PIL.Image in RGB; of an animation the first frame.

    The size is read from the head of the file, before a pixel is decoded. Transparent pixels become white.

    Raises:
        ImageError: the file is no image of an allowed format, is damaged, or has too many pixels.
    """
    image = _open(source.file(), max_pixels) if source.image is None else source.image
    try:
        image = _upright(image)
        if source.detail == "low":
            image.thumbnail((LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))
        return _without_transparency(image)
    except MemoryError:
        raise
    except Exception as error:  # PIL's decoders raise many kinds
        raise ImageError(f"is damaged: {_first_line(error)}") from error


def open_video(source: ImageSource, max_pixels: int = MAX_PIXELS) -> Any:
    """Return the frames of a video, [frames, height, width, 3] uint8. They have at most `max_pixels` altogether.

    Raises:
        ImageError: a frame is no image that can be read, or has another size than the first one.
    """
    frames, video = source.frame_sources(), None
    for index, frame in enumerate(frames):
        try:
            image = open_image(frame, max_pixels // len(frames))
            if video is None:
                video = np.empty((len(frames), image.height, image.width, 3), np.uint8)
            height, width = video.shape[1:3]
            if image.size != (width, height):
                raise ImageError(
                    f"has {image.width} by {image.height} pixels, must have {width} by {height} as the first one"
                )
        except ImageError as error:
            raise ImageError(f"has {len(frames)} frames, of which number {index + 1} {error}") from error
        video[index] = np.asarray(image)
    return video


def _open(data: bytes, max_pixels: int) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are checked below
            image = Image.open(BytesIO(data), formats=FORMATS)
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise ImageError(f"has too many pixels, must have at most {max_pixels:,}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"is {_kind(data)}, must be PNG, JPEG, WebP or GIF") from error
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(f"is damaged: {_first_line(error)}") from error
    if width * height > max_pixels:
        raise ImageError(f"has {width} by {height} pixels, must have at most {max_pixels:,} altogether")
    return image


def _upright(image: Any) -> Any:
    """Return the image turned as its EXIF data says. Damaged EXIF data is ignored, as by browsers."""
    from PIL import ImageOps

    try:
        turn = image.getexif().get(0x0112, 1)
    except Exception:
        turn = 1
    image.load()
    return ImageOps.exif_transpose(image) if turn in range(2, 9) else image


def _without_transparency(image: Any) -> Any:
    """Return the image in RGB, on white."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    elif image.mode.startswith("I;16"):  # of which `convert` keeps the low byte, clipped
        image = image.point(lambda value: value / 256).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _kind(data: bytes) -> str:
    """Return what a file is that is no image of an allowed format."""
    start = data[:256].lstrip().lower()
    if b"<svg" in start or start.startswith(b"<?xml"):
        return "an SVG or XML file"
    if data[4:8] == b"ftyp":
        return "a HEIC, AVIF or video file"
    for magic, name in _MAGIC.items():
        if data.startswith(magic):
            return name
    return "no image that can be read"


_MAGIC = {b"%PDF": "a PDF file", b"BM": "a BMP file", b"II*\0": "a TIFF file", b"MM\0*": "a TIFF file"}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
