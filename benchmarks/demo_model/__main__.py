"""Train the bundled demo model: a small Llama with grouped-query attention, on public-domain English.

    python -m benchmarks.demo_model --text DIR --out cluster/cli/demo/model [--minutes 30] [--json FILE]

DIR is a directory with the files named in the table WORKS of benchmarks/demo_model/works.py; each is checked against
its sha256 before use. The result is a Hugging Face model directory: weights in bfloat16, byte-level BPE tokenizer.
The model card is written by hand.

The budget is time: the learning rate follows the clock, so that a slower machine trains for fewer steps with a
complete schedule. The training state is saved every two minutes, and the same command resumes from it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.common import make_parser, report
from benchmarks.demo_model.measurements import measure
from benchmarks.demo_model.training import (
    END,
    SEED,
    encode_passages,
    new_model,
    publish,
    train,
    train_tokenizer,
)
from benchmarks.demo_model.works import read_works, split_held_out, split_passages
from quire.cluster.config.engine_options import DEMO_MODEL_PATH


def save_model(directory: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the weights in bfloat16, the configuration and the tokenizer in transformers' format."""
    model.to(torch.bfloat16).save_pretrained(directory)
    end_id = tokenizer.convert_tokens_to_ids(END)
    GenerationConfig(bos_token_id=end_id, eos_token_id=end_id, pad_token_id=end_id).save_pretrained(directory)
    tokenizer.chat_template = (DEMO_MODEL_PATH / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(directory)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--text", type=Path, metavar="DIR", required=True, help="folder with the files of WORKS"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="directory of the finished model"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of training (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir(), "quire_demo_model.pt"),
                      metavar="FILE", help="training state; training resumes from it if it exists")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    texts, held_out = zip(*map(split_held_out, read_works(arguments.text)), strict=True)
    tokenizer = train_tokenizer(list(texts))
    passages = [passage for text in texts for passage in split_passages(text, rng)]
    model = new_model(tokenizer)
    progress = train(model, encode_passages(tokenizer, passages), arguments.minutes, arguments.checkpoint)

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as name:
        staging = Path(name)
        save_model(staging, model, tokenizer)
        figures = measure(staging, list(held_out), progress)
        publish(staging, arguments.out)
    arguments.checkpoint.unlink()
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
