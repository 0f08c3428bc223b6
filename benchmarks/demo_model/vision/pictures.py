"""Drawn pictures of shapes and digits, and the facts that each one shows."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

DIGITS = tuple("0123456789")
SHAPES = ("circle", "square", "triangle", "star", "cross")
KINDS = (*SHAPES, *DIGITS)
MAX_COUNT = 4

RGB = tuple[int, int, int]

# Color |-> examples; a drawn color differs from one of them by at most JITTER in each channel.
COLORS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (215, 35, 35)),
    "green": ((0, 255, 0), (0, 128, 0), (45, 165, 65)),
    "blue": ((0, 0, 255), (35, 80, 205)),
    "yellow": ((255, 255, 0), (240, 205, 40)),
    "orange": ((255, 165, 0), (240, 130, 25)),
    "purple": ((128, 0, 128), (150, 60, 190)),
    "black": ((0, 0, 0), (25, 25, 25)),
    "white": ((255, 255, 255), (240, 240, 240)),
    "gray": ((128, 128, 128), (160, 160, 160)),
}
JITTER = 12
MIN_CONTRAST = 120.0  # distance in RGB of a picture's two colors
PLAIN_BACKGROUNDS, PLAIN_SHARE = ("white", "black", "gray"), 0.6
DIGIT_SHARE = 0.5  # of the pictures
# What lies on a unit circle: the corners' number, and the radius of every second one.
_CORNERS = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.42)}
_FIRST_CORNER = {"square": math.pi / 4, "triangle": -math.pi / 2, "star": -math.pi / 2}


@dataclass(frozen=True, slots=True)
class Scene:
    """The facts of a picture.

    Attributes:
        kind: a member of KINDS.
        count: the number of shapes; 1 if it shows a digit.
    """

    kind: str
    color: str
    background: str
    count: int = 1

    @property
    def is_digit(self) -> bool:
        return self.kind in DIGITS


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn image and its facts."""

    scene: Scene
    image: Image.Image


def draw_picture(rng: random.Random) -> Picture:
    """Return a picture of random content, size, aspect ratio and sharpness; equal states of `rng` draw equal ones."""
    width, height = _size(rng)
    is_digit = rng.random() < DIGIT_SHARE
    background = rng.choice(PLAIN_BACKGROUNDS if rng.random() < PLAIN_SHARE else tuple(COLORS))
    paper = _shade(background, rng)
    color, ink = _contrasting(background, paper, rng)
    count = 1 if is_digit or rng.random() < 0.4 else rng.randint(2, MAX_COUNT)
    scene = Scene(rng.choice(DIGITS if is_digit else SHAPES), color, background, count)
    mask = _digit_mask(scene.kind, width, height, rng) if is_digit else _shape_mask(scene, width, height, rng)
    image = Image.new("RGB", (width, height), paper)
    image.paste(ink, mask=mask)
    return Picture(scene, _disturb(image, rng))


def _size(rng: random.Random) -> tuple[int, int]:
    short = rng.randint(48, 144) if rng.random() < 0.9 else rng.randint(145, 320)
    long = short if rng.random() < 0.4 else round(short * rng.uniform(1.0, 1.9))
    return (short, long) if rng.random() < 0.5 else (long, short)


def _shade(color: str, rng: random.Random) -> RGB:
    example = rng.choice(COLORS[color])
    red, green, blue = (min(255, max(0, channel + rng.randint(-JITTER, JITTER))) for channel in example)
    return red, green, blue


def _contrasting(background: str, paper: RGB, rng: random.Random) -> tuple[str, RGB]:
    """Return another color than the background's, which is well visible on it."""
    while True:
        color = rng.choice(tuple(COLORS))
        ink = _shade(color, rng)
        if color != background and math.dist(ink, paper) >= MIN_CONTRAST:
            return color, ink


def _digit_mask(digit: str, width: int, height: int, rng: random.Random) -> Image.Image:
    """Return where the ink of a digit is, in Pillow's default font, turned by up to 12 degrees."""
    size = max(20, round(min(width, height) * rng.uniform(0.5, 1.15)))
    stroke = round(size * rng.uniform(0.0, 0.05))
    font = ImageFont.load_default(size)
    left, top, right, bottom = map(round, font.getbbox(digit, stroke_width=stroke))
    glyph = Image.new("L", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(glyph).text((1 - left, 1 - top), digit, fill=255, font=font, stroke_width=stroke)
    glyph = glyph.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, expand=True)
    mask = Image.new("L", (width, height))
    free_x, free_y = max(0, width - glyph.width), max(0, height - glyph.height)
    mask.paste(glyph, (rng.randint(0, free_x), rng.randint(0, free_y)))
    return mask


def _shape_mask(scene: Scene, width: int, height: int, rng: random.Random) -> Image.Image:
    """Return where the ink of the shapes is; they do not touch."""
    largest = min(width, height) * (0.46 if scene.count == 1 else 0.19)
    radius = largest * rng.uniform(0.5 if scene.count == 1 else 0.7, 1.0)
    mask = Image.new("L", (width, height))
    draw = ImageDraw.Draw(mask)
    for x, y in _centers(scene.count, radius, width, height, rng):
        turn = rng.uniform(-0.2, 0.2)
        if scene.kind == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        elif scene.kind == "cross":
            for angle in (turn, turn + math.pi / 2):
                arm = radius * math.cos(angle), radius * math.sin(angle)
                ends = (x - arm[0], y - arm[1], x + arm[0], y + arm[1])
                draw.line(ends, fill=255, width=max(3, round(radius * 0.55)))
        else:
            draw.polygon(_polygon(scene.kind, x, y, radius, turn), fill=255)
    return mask


def _polygon(kind: str, x: float, y: float, radius: float, turn: float) -> list[tuple[float, float]]:
    num_corners, inner = _CORNERS[kind]
    corners = []
    for index in range(num_corners):
        angle = _FIRST_CORNER[kind] + turn + 2 * math.pi * index / num_corners
        length = radius * (inner if index % 2 else 1.0)
        corners.append((x + length * math.cos(angle), y + length * math.sin(angle)))
    return corners


def _centers(
    count: int, radius: float, width: int, height: int, rng: random.Random
) -> list[tuple[float, float]]:
    """Return centers of circles that lie in the picture and do not touch; begin anew while there is no room."""
    while True:
        found: list[tuple[float, float]] = []
        for _ in range(20 * count):
            center = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if all(math.dist(center, other) > 2.15 * radius for other in found):
                found.append(center)
            if len(found) == count:
                return found


def _disturb(image: Image.Image, rng: random.Random) -> Image.Image:
    """Blur a quarter of the pictures and add noise to half of them."""
    if rng.random() < 0.25:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.2)))
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0, rng.uniform(2, 14), (image.height, image.width, 3)
        )
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    return image
