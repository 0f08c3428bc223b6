"""The vision model, its tokenizer and image processor, and its training on conversations about drawn pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.demo_model.training import PEAK_LEARNING_RATE, SEED, Progress, run_training
from benchmarks.demo_model.vision.conversations import Conversation, random_conversation
from benchmarks.demo_model.vision.pictures import COLORS, KINDS, MAX_COUNT, Picture, draw_picture

CHAT_TEMPLATE = """\
{#- Parts of type image or image_url become one <|image_pad|> each, which the image processor multiplies. -#}
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\\n" -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ("image", "image_url") -%}{{- "<|vision_start|><|image_pad|><|vision_end|>" -}}
{%- elif part.type == "text" -%}{{- part.text -}}
{%- else -%}{{- raise_exception("the demo model reads text and images, not " + part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE = "<|image_pad|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END, "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
VOCAB_SIZE = 512
CONTEXT_LEN = 2048
PATCH_SIZE, MERGE_SIZE = 8, 2
MIN_PIXELS, MAX_PIXELS = 64 * 64, 80 * 80  # 16 to 25 tokens: what a core can learn in half an hour
BATCH_SIZE, PICTURE_BATCH = 16, 32
PROBE_SHARE, PROBE_WEIGHT = 0.3, 0.2
PICTURE_STEPS = 2  # of the vision tower alone, before each step with conversations
# Fact of a Scene |-> its values, which the probe tells apart.
FACTS: dict[str, tuple[object, ...]] = {
    "kind": KINDS, "color": tuple(COLORS), "background": tuple(COLORS), "count": tuple(range(1, MAX_COUNT + 1)),
}  # fmt: skip
IGNORED = -100  # a label that no loss is computed for


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the conversations' texts; all 256 bytes are in its alphabet."""
    rng = random.Random(SEED)
    texts = [
        content if isinstance(content, str) else part["text"]
        for _ in range(1500)
        for message in random_conversation(rng).messages
        for content in [message["content"]]
        for part in ([{}] if isinstance(content, str) else [own for own in content if own["type"] == "text"])
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def new_image_processor() -> Qwen2VLImageProcessorPil:
    """Return the processor that scales an image to 64 to 100 patches."""
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Return an untrained model whose heads, KV heads, intermediate sizes and vocabulary are divisible by 2.

    That allows tensor parallelism of 2 ranks. A window is a square of 4 by 4 tokens, so that a picture has more than
    one if it is not a square.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": ids[TURN_END],
        "pad_token_id": None,  # it would keep gradients from an embedding
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "window_size": 4 * PATCH_SIZE * MERGE_SIZE,
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": 128,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def new_optimizers(learner: Learner) -> list[Optimizer]:
    """Return Muon for the matrices of the layers and of the merger, and AdamW for the rest."""
    ends = {id(learner.model.get_input_embeddings().weight), id(learner.probe.weight)}
    matrices = [own for own in learner.parameters() if own.ndim == 2 and id(own) not in ends]
    others = [own for own in learner.parameters() if own.ndim != 2 or id(own) in ends]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@dataclass(frozen=True)
class Encoder:
    """The tokenizer and the image processor: from conversations to the model's inputs."""

    tokenizer: PreTrainedTokenizerFast
    images: Qwen2VLImageProcessorPil

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Special token |-> its id."""
        return {token: self.tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}

    def encode(self, conversations: list[Conversation], *, prompts: bool = False) -> dict[str, Tensor]:
        """Return a batch of inputs of the model, with labels of the assistant's tokens.

        Args:
            prompts: the conversations end with a question: pad on the left, and add no labels.
        """
        pictures = [picture for own in conversations for picture in own.pictures]
        patches = self.encode_pictures(pictures) if pictures else {}
        grids = iter(patches["image_grid_thw"].tolist() if pictures else ())
        texts = self.tokenizer.apply_chat_template(
            [own.messages for own in conversations], tokenize=False, add_generation_prompt=prompts
        )
        rows = [self._with_placeholders(ids, grids) for ids in self.tokenizer(texts)["input_ids"]]
        length = max(map(len, rows))
        pad = self.special_ids[PAD]
        padding = [[pad] * (length - len(row)) for row in rows]
        input_ids = torch.tensor(
            [[*own, *row] if prompts else [*row, *own] for row, own in zip(rows, padding, strict=True)]
        )
        batch = {
            "input_ids": input_ids,
            "attention_mask": (input_ids != pad).long(),
            "mm_token_type_ids": (input_ids == self.special_ids[IMAGE]).int(),
        }
        if not prompts:
            batch["labels"] = torch.tensor([self._labels(row) for row in input_ids.tolist()])
        return batch | patches

    def encode_pictures(self, pictures: list[Picture]) -> dict[str, Tensor]:
        """Return the pictures' patches and grids."""
        return dict(self.images([picture.image for picture in pictures], return_tensors="pt"))

    def _with_placeholders(self, ids: list[int], grids: Iterator[list[int]]) -> list[int]:
        """Return the ids with as many placeholders for each image as the model makes embeddings of it."""
        found: list[int] = []
        for token in ids:
            is_image = token == self.special_ids[IMAGE]
            found += [token] * (_num_tokens(next(grids)) if is_image else 1)
        return found

    def _labels(self, ids: list[int]) -> list[int]:
        """Return the ids of the assistant's answers and their ends, and IGNORED for other positions."""
        labels = [IGNORED] * len(ids)
        is_answer = False
        for position, token in enumerate(ids):
            if ids[max(0, position - len(self._answer_start)) : position] == self._answer_start:
                is_answer = True
            if is_answer:
                labels[position] = token
                is_answer = token != self.special_ids[TURN_END]
        return labels

    @cached_property
    def _answer_start(self) -> list[int]:
        ids: list[int] = self.tokenizer(f"{TURN_START}assistant\n")["input_ids"]
        return ids

    def decode(self, ids: Tensor) -> list[str]:
        """Return the texts of generated rows up to the end of the turn."""
        texts: list[str] = self.tokenizer.batch_decode(ids)
        return [text.split(TURN_END)[0] for text in texts]


def _num_tokens(grid: list[int]) -> int:
    frames, height, width = grid
    return frames * height * width // MERGE_SIZE**2


class Learner(nn.Module):
    """The model, and a linear probe of its image embeddings that is thrown away after training.

    The probe names the facts of a picture from the mean of its embeddings. Its loss trains the vision tower alone in
    the first PROBE_SHARE of the time, before the decoder can read a picture, and in most steps afterwards: they take
    half the time of a step with conversations, for more pictures.
    """

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.probe = nn.Linear(model.config.vision_config.out_hidden_size, sum(map(len, FACTS.values())))

    def picture_loss(self, inputs: dict[str, Tensor], facts: Tensor) -> Tensor:
        """Return the cross-entropy in nats of the pictures' facts, [N, len(FACTS)]."""
        features = self.model.get_image_features(**inputs).pooler_output
        return self._probe_loss(features, facts)

    def _probe_loss(self, features: tuple[Tensor, ...], facts: Tensor) -> Tensor:
        logits = self.probe(torch.stack([own.mean(0) for own in features])).float()
        parts = logits.split([len(values) for values in FACTS.values()], dim=-1)
        losses = [F.cross_entropy(part, facts[:, index]) for index, part in enumerate(parts)]
        return torch.stack(losses).sum()

    def answer_loss(self, batch: dict[str, Tensor], facts: Tensor) -> Tensor:
        """Return the cross-entropy in nats of the assistant's tokens, and PROBE_WEIGHT times that of the facts."""
        inputs = dict(batch)
        wanted = inputs.pop("labels")[:, 1:]
        vision = self.model.get_image_features(inputs.pop("pixel_values"), inputs["image_grid_thw"])
        hidden = self.model.model(**inputs, mm_encoder_outputs={"image": vision}, use_cache=False)
        is_wanted = wanted != IGNORED
        logits = self.model.lm_head(hidden.last_hidden_state[:, :-1][is_wanted])
        answers = F.cross_entropy(logits.float(), wanted[is_wanted])
        return answers + PROBE_WEIGHT * self._probe_loss(vision.pooler_output, facts)


def facts_of(pictures: list[Picture]) -> Tensor:
    """Return the index of each fact of each picture in FACTS, [N, len(FACTS)]."""
    return torch.tensor(
        [
            [values.index(getattr(picture.scene, fact)) for fact, values in FACTS.items()]
            for picture in pictures
        ]
    )


def train(learner: Learner, encoder: Encoder, minutes: float, checkpoint: Path) -> Progress:
    """Train until `minutes` have passed in total, including earlier runs that left the checkpoint."""

    def work(progress: Progress) -> Iterator[tuple[Callable[[], Tensor], int]]:
        rng = random.Random(SEED + progress.num_steps)
        conversations = conversation_steps(rng)
        while True:
            for _ in range(PICTURE_STEPS):
                pictures = [draw_picture(rng) for _ in range(PICTURE_BATCH)]
                yield partial(learner.picture_loss, encoder.encode_pictures(pictures), facts_of(pictures)), 0
            if progress.elapsed_s / (60 * minutes) >= PROBE_SHARE:
                yield next(conversations)

    def conversation_steps(rng: random.Random) -> Iterator[tuple[Callable[[], Tensor], int]]:
        """Yield losses of batches of conversations of about equal length, so that there is little padding."""
        while True:
            drawn = [random_conversation(rng) for _ in range(8 * BATCH_SIZE)]
            drawn.sort(key=lambda own: len(str(own.messages)))
            batches = [drawn[start : start + BATCH_SIZE] for start in range(0, len(drawn), BATCH_SIZE)]
            rng.shuffle(batches)
            for conversations in batches:
                batch = encoder.encode(conversations)
                facts = facts_of([picture for own in conversations for picture in own.pictures])
                yield partial(learner.answer_loss, batch, facts), int((batch["labels"] != IGNORED).sum())

    # With one thread and short sequences, "sdpa" takes 1.4 times as long, most of it in the backward pass.
    learner.model.set_attn_implementation("eager")
    return run_training(learner, new_optimizers(learner), work, minutes, checkpoint)
