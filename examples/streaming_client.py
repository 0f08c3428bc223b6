"""Print tokens as they arrive, then usage and timings: `python examples/streaming_client.py HOST:PORT`."""

from __future__ import annotations

import sys

from quire import Client, CompletionDelta, CompletionFinished, SamplingParams


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    sampling_params = SamplingParams(max_tokens=48, temperature=0.8, seed=7)
    with Client(target) as client:
        for event in client.generate_stream("It was a dark night, and", sampling_params):
            if isinstance(event, CompletionDelta):
                print(event.text, end="", flush=True)
            elif isinstance(event, CompletionFinished):
                print(f"\n{event.finish_reason}; {event.usage}; {event.timings}")


if __name__ == "__main__":
    main()
