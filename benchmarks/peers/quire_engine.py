"""quire itself, through `LLM.generate`."""

from engine import Generate, Requests, parse_arguments, serve


def main() -> None:
    arguments = parse_arguments(__doc__)

    def load() -> Generate:
        from quire import LLM, SamplingParams

        llm = LLM(
            arguments.model_dir,
            tensor_parallel_size=arguments.tensor_parallel_size,
            device="cpu",
            dtype=arguments.dtype,
            max_model_len=2048,
        )

        def generate(requests: Requests) -> list[int]:
            params = [
                SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for _, length in requests
            ]
            outputs = llm.generate([ids for ids, _ in requests], params)
            return [len(output.outputs[0].token_ids) for output in outputs]

        return generate

    serve(load)


if __name__ == "__main__":
    main()
