"""Run requests concurrently in one event loop, and cancel one: `python examples/async_client.py HOST:PORT`.

Leaving a stream, or canceling the task that reads it, aborts the request on the server and frees its blocks.
"""

from __future__ import annotations

import asyncio
import sys

from quire import AsyncClient, CompletionDelta, SamplingParams

PROMPTS = ["Call me", "It is a truth", "The sea was"]


async def first_words(client: AsyncClient, prompt: str, num_deltas: int) -> str:
    """Read a few deltas of a long completion, then abandon it."""
    text = ""
    async for event in client.generate_stream(prompt, SamplingParams(max_tokens=200, seed=1)):
        if isinstance(event, CompletionDelta):
            text += event.text
            num_deltas -= 1
        if num_deltas == 0:
            break
    return text


async def run(target: str) -> None:
    sampling_params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    async with AsyncClient(target) as client:
        outputs, beginning = await asyncio.gather(
            asyncio.gather(*(client.generate(prompt, sampling_params) for prompt in PROMPTS)),
            first_words(client, "Once upon a time", num_deltas=5),
        )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt!r} -> {output.outputs[0].text!r}")
    print(f"canceled after {beginning!r}")


def main() -> None:
    asyncio.run(run(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))


if __name__ == "__main__":
    main()
