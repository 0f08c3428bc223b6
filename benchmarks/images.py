"""Prompts with images over HTTP: their rate, the time to their first token, and what they cost other streams.

    python -m benchmarks.images --json benchmarks/results/images.json [--minutes 8] [-- --tensor-parallel-size 2 ...]

A server of a small random Qwen2.5-VL (`random_models.make_vision_model`) gets chats with JPEG files in data URLs. The
time to the first token is that of a call for one token, with an image of one megapixel: `cold` is a new image;
`encoded` is the same image behind another text, so that its embeddings are there and its blocks are not; `prefix`
is the same beginning with another question, so that its blocks are there; the share of the encoder follows from
`cold` and `encoded`. Each time the image is decoded and
processed. `text` is a new prompt of as many tokens without an image.

A gap is the time between two chunks of a stream of text. NUM_STREAMS streams run alone, then beside prompts of text,
then beside files of four megapixels, which the image processor shrinks to one; a prompt of text has as many tokens as
such an image, and one comes after the other. Last they run beside images that are refused: a PNG of 50,000 by 50,000
pixels, an SVG, a truncated JPEG, wrong base64, an address of the cloud's metadata, and a body of 15 MiB of small
images. These alternate, since other processes share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import re
import struct
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.http_servers import Server, quire_server
from benchmarks.random_models import make_vision_model

CALL_TIMEOUT_S = 600.0
ONE_MEGAPIXEL, FOUR_MEGAPIXELS = (1024, 1024), (2048, 2048)
NUM_FIRST_TOKENS = 8
NUM_AT_ONCE, NUM_RATE_IMAGES = 4, 16
NUM_STREAMS, STREAM_TOKENS, NUM_ROUNDS, NUM_ROUND_IMAGES = 4, 1200, 3, 8
BODY_BYTES = 15 << 20
_JSON = {"content-type": "application/json"}
MAX_MODEL_LEN = 8192
OPTIONS = "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"

Part = dict[str, Any]
# A call beside the streams.
Call = Callable[[], Awaitable[object]]


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(size: tuple[int, int], seed: int) -> Part:
    """Return an image of smooth noise, which no other seed has, as a JPEG file in a data URL."""
    coarse = np.random.default_rng(seed).integers(0, 256, (size[1] // 32, size[0] // 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file_part("jpeg", file.getvalue())


def file_part(kind: str, content: bytes) -> Part:
    return url_part(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")


def url_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def bomb() -> bytes:
    """Return a PNG file of 0.3 MB with 50,000 by 50,000 black pixels."""
    side, packer = 50_000, zlib.compressobj(9)
    row = bytes(1 + side // 8)
    pixels = b"".join(packer.compress(row * 1000) for _ in range(side // 1000)) + packer.flush()
    chunks = {b"IHDR": struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), b"IDAT": pixels, b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )


def refused_parts() -> list[list[Part]]:
    """Return the contents of messages that a server refuses."""
    photo = image_part((512, 512), 0)["image_url"]["url"]
    small = image_part((32, 32), 0)
    return [
        [file_part("png", bomb())],
        [file_part("svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>")],
        [url_part(photo[: len(photo) // 8 * 4])],
        [url_part("data:image/png;base64,!!!!")],
        [url_part("http://169.254.169.254/latest/meta-data/")],
        [small] * (BODY_BYTES // len(str(small))),
    ]


def words(rng: random.Random, count: int) -> str:
    """Return about `count` tokens of text."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(count // 2))


WARM_UP = [image_part((256, 256), 999), text_part("warm up")]


class Caller:
    """Calls of one server's chat endpoint.

    Args:
        clock: returns the seconds that are measured.
    """

    def __init__(
        self, client: httpx.AsyncClient, model: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._client, self._model, self.clock = client, model, clock

    def _body(self, parts: list[Part], max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": parts}]
        settings = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self._model, "messages": messages, **settings}

    async def call(self, parts: list[Part]) -> tuple[float, int]:
        """Return the seconds of a call for one token, and the tokens of its prompt."""
        started = self.clock()
        response = await self._client.post("/v1/chat/completions", json=self._body(parts, 1))
        elapsed = self.clock() - started
        response.raise_for_status()
        return elapsed, int(response.json()["usage"]["prompt_tokens"])

    def refused(self, parts: list[Part]) -> Call:
        """Return a call that the server is to refuse, in a thread: a large body would stall the streams."""
        content = json.dumps(self._body(parts, 1)).encode()
        url = str(self._client.base_url.join("/v1/chat/completions"))
        post = partial(httpx.post, url, content=content, headers=_JSON, timeout=CALL_TIMEOUT_S)

        async def call() -> None:
            response = await asyncio.to_thread(post)
            if response.status_code not in (400, 413):
                raise RuntimeError(f"the server answered {response.status_code}, must be 400 or 413")

        return call

    async def gaps(self, text: str) -> list[float]:
        """Return the seconds between the chunks of a stream of STREAM_TOKENS tokens."""
        body = self._body([text_part(text)], STREAM_TOKENS) | {"stream": True}
        arrivals = []
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    arrivals.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(arrivals)]


# The ways to a first token |-> what is new in its prompt.
WAYS = {
    "text": "a new prompt of text, about {} tokens",
    "cold": "a new image of 1 megapixel, {} tokens",
    "encoded": "the same image behind another text",
    "prefix": "the same beginning with another question",
}


class FirstTokens:
    """Times to the first token of prompts with an image of one megapixel, a new one each time."""

    def __init__(self) -> None:
        self._rng, self._seeds = random.Random(1), itertools.count()
        self._times: dict[str, list[float]] = {way: [] for way in WAYS}
        self._num_tokens = 0

    async def measure(self, caller: Caller) -> None:
        """Measure each way once."""
        rng, image = self._rng, image_part(ONE_MEGAPIXEL, next(self._seeds))
        first, other = words(rng, 8), words(rng, 8)
        for way, beginning in (("cold", first), ("encoded", other), ("prefix", other)):
            question = text_part(words(rng, 16))
            elapsed, self._num_tokens = await caller.call([text_part(beginning), image, question])
            self._times[way].append(elapsed)
        elapsed, _ = await caller.call([text_part(words(rng, self._num_tokens))])
        self._times["text"].append(elapsed)

    def figures(self) -> dict[str, Figure]:
        """Return the medians, and the share of the encoder."""
        found = {way: median(times) for way, times in self._times.items()}
        figures = {
            f"first_token_ms.{way}": Figure(1e3 * found[way], "ms", note.format(self._num_tokens))
            for way, note in WAYS.items()
        }
        saved, note = 1 - found["encoded"] / found["cold"], "of the time to a first token with a new image: "
        note += "its tensors' way to the rank, and the encoder"
        return figures | {"first_token.encoder_percent": Figure(100 * saved, "%", note)}


class Rate:
    """The images per second of NUM_AT_ONCE clients, each of which sends one after the other."""

    def __init__(self) -> None:
        self._seeds, self._rates = itertools.count(1000), list[float]()

    async def measure(self, caller: Caller) -> None:
        """Measure the rate of NUM_RATE_IMAGES new images."""
        seeds = itertools.islice(self._seeds, NUM_RATE_IMAGES)

        async def client() -> None:
            for seed in seeds:
                await caller.call([image_part(ONE_MEGAPIXEL, seed), text_part("a question")])

        started = caller.clock()
        await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
        self._rates.append(NUM_RATE_IMAGES / (caller.clock() - started))

    def figures(self) -> dict[str, Figure]:
        """Return the median."""
        note = f"1 megapixel each, one new token, {NUM_AT_ONCE} clients"
        return {"per_s": Figure(median(self._rates), "images/s", note)}


async def measure_caches(client: httpx.AsyncClient) -> dict[str, Figure]:
    """Return the memory of what a server keeps of images, by its metrics."""
    response = await client.get("/metrics")
    response.raise_for_status()
    names = {
        "outputs": 'quire_encoder_cache_bytes{.*state="held"',
        "room": 'quire_encoder_cache_bytes{.*state="free"',
        "tensors": "quire_image_tensor_bytes{",
    }
    notes = {
        "outputs": "encoder outputs on each rank, after the calls above",
        "room": "for more of them",
        "tensors": "tensors in the scheduler, after the calls above",
    }
    figures = {}
    for name, pattern in names.items():
        found = re.search(rf"^{pattern}[^}}]*}} (\S+)$", response.text, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the server has no metric {pattern}")
        figures[f"images.memory_mb.{name}"] = Figure(float(found[1]) / 1e6, "MB", notes[name])
    return figures


async def measure_gaps(caller: Caller, deadline: float) -> dict[str, Figure]:
    """Return quantiles of the gaps of streams of text, alone and beside other prompts."""
    rng, seeds = random.Random(2), itertools.count(5000)
    image = image_part(FOUR_MEGAPIXELS, next(seeds))
    _, num_tokens = await caller.call([image])

    def texts() -> Iterator[Call]:
        return (partial(caller.call, [text_part(words(rng, num_tokens))]) for _ in itertools.count())

    def images() -> Iterator[Call]:
        """Draw the images of a round before it: drawing one takes longer than a step."""
        drawn = [image_part(FOUR_MEGAPIXELS, next(seeds)) for _ in range(NUM_ROUND_IMAGES)]
        return (partial(caller.call, [each]) for each in drawn)

    hostile = [caller.refused(parts) for parts in refused_parts()]
    ways: dict[str, Callable[[], Iterator[Call]]] = {
        "alone": lambda: iter(()),
        "beside_text": texts,
        "beside_images": images,
        "beside_refused": lambda: itertools.cycle(hostile),
    }
    gaps: dict[str, list[float]] = {way: [] for way in ways}
    arrived = dict.fromkeys(ways, 0)
    for _ in range(NUM_ROUNDS):
        for way, other in ways.items():
            if time.monotonic() < deadline or not gaps[way]:
                found, count = await _round(caller, other(), rng)
                gaps[way] += found
                arrived[way] += count
    figures = {}
    for way, found in gaps.items():
        others = "that were refused" if way == "beside_refused" else f"of {num_tokens} tokens each"
        note = f"{NUM_STREAMS} streams, {arrived[way]} other prompts {others}"
        for name, share in (("p50", 50), ("p99", 99), ("max", 100)):
            value = 1e3 * float(np.percentile(found, share))
            figures[f"images.gap_ms.{way}.{name}"] = Figure(value, "ms", note)
    return figures


async def _round(caller: Caller, others: Iterator[Call], rng: random.Random) -> tuple[list[float], int]:
    """Return the gaps of NUM_STREAMS streams, and the number of other calls that were answered meanwhile."""
    count = 0

    async def call_others() -> None:
        nonlocal count
        for call in others:
            await call()
            count += 1

    beside = asyncio.create_task(call_others())
    streams: list[Awaitable[list[float]]] = [caller.gaps(words(rng, 16)) for _ in range(NUM_STREAMS)]
    try:
        found = await asyncio.gather(*streams)
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    return [gap for own in found for gap in own], count


async def measure(server: Server, minutes: float) -> dict[str, Figure]:
    """Measure a server that is ready."""
    deadline = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=CALL_TIMEOUT_S, limits=limits) as client:
        caller = Caller(client, server.model)
        await caller.call(WARM_UP)
        first_tokens, rate = FirstTokens(), Rate()
        for _ in range(NUM_FIRST_TOKENS):
            await first_tokens.measure(caller)
        await rate.measure(caller)
        figures = named("images", first_tokens.figures() | rate.figures())
        figures |= await measure_caches(client)
        return figures | await measure_gaps(caller, deadline)


def named(prefix: str, figures: Mapping[str, Figure]) -> dict[str, Figure]:
    return {f"{prefix}.{name}": figure for name, figure in figures.items()}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after which no other round of gaps begins"
    )
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="quire-images-") as name:
        folder = Path(name) / "vision"
        make_vision_model(folder)
        with quire_server(folder, *OPTIONS, *arguments.options) as server:
            figures = asyncio.run(measure(server, arguments.minutes))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
