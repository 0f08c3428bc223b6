"""CTranslate2, in batches of 16 that all generate as many tokens as the longest output of the batch."""

import json
import tempfile
from pathlib import Path

from engine import Generate, Requests, parse_arguments, serve

BATCH_LEN = 16


def name_special_tokens(config: Path, name: str) -> None:
    """Set the missing special tokens of a configuration: CTranslate2 does not load a model without them.

    They never stop generation here, because ends are ignored.
    """
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({key: name if value is None else value for key, value in fields.items()}))


def main() -> None:
    arguments = parse_arguments(__doc__)

    def load() -> Generate:
        import ctranslate2
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        with tempfile.TemporaryDirectory() as folder:
            converted = Path(folder) / "model"
            ctranslate2.converters.TransformersConverter(arguments.model_dir).convert(str(converted))
            name_special_tokens(converted / "config.json", names[-1])
            generator = ctranslate2.Generator(
                str(converted),
                device="cpu",
                compute_type=arguments.dtype,
                inter_threads=1,
                intra_threads=arguments.threads,
            )

        def generate(requests: Requests) -> list[int]:
            for start in range(0, len(requests), BATCH_LEN):
                batch = requests[start : start + BATCH_LEN]
                longest = max(length for _, length in batch)
                results = generator.generate_batch(
                    [[names[token_id] for token_id in ids] for ids, _ in batch],
                    max_length=longest,
                    min_length=longest,
                    include_prompt_in_result=False,
                    sampling_topk=1,
                    beam_size=1,
                    end_token=[],
                )
                if any(len(result.sequences_ids[0]) != longest for result in results):
                    raise RuntimeError(f"an output is shorter than {longest} tokens")
            return [length for _, length in requests]

        return generate

    serve(load)


if __name__ == "__main__":
    main()
