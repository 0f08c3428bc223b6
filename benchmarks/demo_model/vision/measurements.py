"""Accuracy of the vision model on pictures that it was not trained on, on the saved files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from benchmarks.common import Figure
from benchmarks.demo_model.training import Progress
from benchmarks.demo_model.vision.conversations import (
    Conversation,
    about_one,
    about_two,
    one_after_the_other,
    without_picture,
)
from benchmarks.demo_model.vision.pictures import draw_picture
from benchmarks.demo_model.vision.training import Encoder

HELD_OUT_SEED = 2_000_003  # training draws with SEED plus the number of steps
NUM_PICTURES = 300  # of each topic
MAX_NEW_TOKENS = 48
EVALUATION_BATCH = 50


def load(directory: Path) -> tuple[Qwen2_5_VLForConditionalGeneration, Encoder]:
    """Return the saved model in bfloat16, with transformers' own classes."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.bfloat16).eval()
    images = AutoImageProcessor.from_pretrained(directory, backend="pil")
    return model, Encoder(AutoTokenizer.from_pretrained(directory), images)


def held_out(topic: str, count: int) -> Iterator[Conversation]:
    """Yield conversations about pictures that the model has not seen.

    Args:
        topic: a key of TOPICS for one question about one picture, or a key of `FORMS`.
    """
    rng = random.Random(f"{HELD_OUT_SEED} {topic}")
    wants_digit = {"digit": True, "shape": False, "count": False}.get(topic)
    while count:
        if topic in FORMS:
            yield FORMS[topic](rng)
        else:
            picture = draw_picture(rng)
            if wants_digit is not None and picture.scene.is_digit != wants_digit:
                continue
            yield about_one(picture, rng, (topic,))
        count -= 1


# Form of a conversation of several turns |-> its function; the last answer is the one that is measured.
FORMS: dict[str, Callable[[random.Random], Conversation]] = {
    "two_pictures": about_two,
    "newer_picture": one_after_the_other,
    "no_picture": without_picture,
}


@torch.inference_mode()
def answers(
    model: Qwen2_5_VLForConditionalGeneration, encoder: Encoder, conversations: list[Conversation]
) -> list[str]:
    """Return the greedy answers to the last questions of the conversations."""
    found: list[str] = []
    for start in range(0, len(conversations), EVALUATION_BATCH):
        asked = [
            replace(own, messages=own.messages[:-1])
            for own in conversations[start : start + EVALUATION_BATCH]
        ]
        batch = encoder.encode(asked, prompts=True)
        output = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        found += encoder.decode(output[:, batch["input_ids"].shape[1] :])
    return found


def accuracy(model: Qwen2_5_VLForConditionalGeneration, encoder: Encoder, topic: str, count: int) -> float:
    """Return the share of held-out conversations whose last answer is true in each word."""
    conversations = list(held_out(topic, count))
    found = answers(model, encoder, conversations)
    right = [own.messages[-1]["content"] == answer for own, answer in zip(conversations, found, strict=True)]
    return sum(right) / len(right)


TOPIC_NOTES = {
    "color": "color of what is shown",
    "shape": "which of five shapes",
    "digit": "which digit",
    "count": "one to four shapes",
    "background": "color of the background",
    "yes_no": "yes or no, and the truth",
    "describe": "kind, color, background and count, all of them",
    "two_pictures": "one or both of two pictures in a message",
    "newer_picture": "the newer one of two pictures in a conversation",
    "no_picture": "a message of text alone",
}


def measure(directory: Path, progress: Progress) -> dict[str, Figure]:
    """Measure the model saved in `directory`."""
    model, encoder = load(directory)
    figures = {
        "num_params": Figure(
            sum(own.numel() for own in model.parameters()), "parameters", "tied ones counted once"
        ),
        "num_steps": Figure(progress.num_steps, "steps"),
        "train_minutes": Figure(progress.elapsed_s / 60, "min", "wall time of training alone"),
    }
    for topic, note in TOPIC_NOTES.items():
        share = accuracy(model, encoder, topic, NUM_PICTURES)
        figures[f"accuracy.{topic}"] = Figure(share, "share", f"{NUM_PICTURES} held-out questions: {note}")
    return {f"vision_model.{name}": figure for name, figure in figures.items()}
