"""transformers: `generate` for one request, continuous batching for several."""

import functools
import os
from typing import Any

from engine import Generate, Requests, parse_arguments, serve

# Longest prompt and output of the workloads, together.
MAX_LEN = 2048
PAGE_LEN = 32
RESULT_TIMEOUT_S = 1


def main() -> None:
    arguments = parse_arguments(__doc__)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"

    def load() -> Generate:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        torch.set_num_threads(arguments.threads)
        dtype = getattr(torch, arguments.dtype)

        def load_model(attention: str | None) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                arguments.model_dir, dtype=dtype, attn_implementation=attention
            ).eval()

        alone = load_model(None)  # its own choice, since some models have no attention

        @functools.cache
        def batching() -> Any:
            """Return the manager of a second copy, once there are several requests: some models have no such mode."""
            manager = load_model("paged|sdpa").init_continuous_batching(
                generation_config=GenerationConfig(
                    do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=MAX_LEN
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    max_batch_tokens=MAX_LEN, page_size=PAGE_LEN, num_blocks=1024
                ),
            )
            manager.start()
            return manager

        def generate_one(ids: list[int], length: int) -> int:
            with torch.inference_mode():
                out = alone.generate(
                    torch.tensor([ids]), do_sample=False, min_new_tokens=length, max_new_tokens=length,
                    pad_token_id=0,
                )  # fmt: skip
            return out.shape[1] - len(ids)

        def generate(requests: Requests) -> list[int]:
            if len(requests) == 1:
                return [generate_one(*requests[0])]
            manager = batching()
            names = [manager.add_request(ids, max_new_tokens=length) for ids, length in requests]
            lengths: dict[str, int] = {}
            while len(lengths) < len(names):
                result = manager.get_result(timeout=RESULT_TIMEOUT_S)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    lengths[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
            return [lengths[name] for name in names]

        return generate

    serve(load)


if __name__ == "__main__":
    main()
