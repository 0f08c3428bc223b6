"""Train the bundled vision model: a small Qwen2.5-VL that reads drawn shapes, colors and digits.

    python -m benchmarks.demo_model.vision --out cluster/cli/demo/vision_model [--minutes 25] [--json FILE]

The script draws each picture itself and knows what it shows, so that there is no data to load. The result is a
Hugging Face model directory: weights in bfloat16, byte-level BPE tokenizer, chat template and image processor.
The model card is written by hand.

The budget is time, on one core: the learning rate follows the clock, so that a slower machine trains for fewer
steps with a complete schedule. The training state is saved every two minutes, and the same command resumes from it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.common import make_parser, report
from benchmarks.demo_model.training import SEED, publish
from benchmarks.demo_model.vision.measurements import measure
from benchmarks.demo_model.vision.training import (
    PAD,
    TURN_END,
    Encoder,
    Learner,
    new_image_processor,
    new_model,
    train,
    train_tokenizer,
)


def save_model(directory: Path, model: Qwen2_5_VLForConditionalGeneration, encoder: Encoder) -> None:
    """Write the weights in bfloat16, the configuration, the tokenizer and the image processor."""
    model.to(torch.bfloat16).save_pretrained(directory)
    ids = encoder.special_ids
    # top_k of 1: an answer is the likeliest one unless a request asks otherwise.
    recommended = {"do_sample": True, "top_k": 1}
    generation = GenerationConfig(eos_token_id=ids[TURN_END], pad_token_id=ids[PAD], **recommended)
    generation.save_pretrained(directory)
    encoder.tokenizer.save_pretrained(directory)
    encoder.images.save_pretrained(directory)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="directory of the finished model"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="of training (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir(), "quire_vision_model.pt"),
                      metavar="FILE", help="training state; training resumes from it if it exists")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    encoder = Encoder(train_tokenizer(), new_image_processor())
    learner = Learner(new_model(encoder.tokenizer))
    progress = train(learner, encoder, arguments.minutes, arguments.checkpoint)

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as name:
        staging = Path(name)
        save_model(staging, learner.model, encoder)
        figures = measure(staging, progress)
        publish(staging, arguments.out)
    arguments.checkpoint.unlink()
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
