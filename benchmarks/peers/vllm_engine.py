"""vLLM's CPU build, through `LLM.generate`."""

import os

from engine import Generate, Requests, parse_arguments, serve


def main() -> None:
    arguments = parse_arguments(__doc__)
    ranks, threads = arguments.tensor_parallel_size, arguments.threads
    # Cores per rank: for example 0-1 for one rank, or 0|1 for two.
    bounds = [(rank * threads // ranks, (rank + 1) * threads // ranks - 1) for rank in range(ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(f"{low}-{high}" for low, high in bounds)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"

    def load() -> Generate:
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=arguments.model_dir,
            dtype=arguments.dtype,
            tensor_parallel_size=ranks,
            max_model_len=2048,
            max_num_seqs=128,
            seed=0,
        )

        def generate(requests: Requests) -> list[int]:
            params = [
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False)
                for _, length in requests
            ]
            prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        return generate

    serve(load)


if __name__ == "__main__":
    main()
