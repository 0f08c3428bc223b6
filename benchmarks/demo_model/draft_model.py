"""Train a smaller model that drafts for the demo model, by the demo model's own distribution of each next token.

    python -m benchmarks.demo_model.draft_model --text DIR --out cluster/cli/demo/draft_model [--minutes 19]

The bundled one was made so in 17 minutes on one core of an EPYC (AVX-512): 6,107 steps.

It is one layer of half the width, with the demo model's vocabulary. Its embedding begins with the directions in which
the demo model's varies most. Half of the texts are those of the demo model, and half are written by that model. The
loss is the cross-entropy to the demo model's probabilities, because a draft must agree with the model and not with
the books. The budget is time, as for the demo model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import Figure, make_parser, report
from benchmarks.demo_model.draft_head import BATCH_SIZE, PROMPT_LEN, cut_prompts, write_sequences
from benchmarks.demo_model.training import (
    SEED,
    SHORT_LEN,
    batches,
    encode_works,
    learning_rate,
    new_optimizers,
    timed_steps,
    train_step,
)
from quire import LLM
from quire.cluster.config.engine_options import DEMO_MODEL_PATH

HIDDEN, INTERMEDIATE, NUM_HEADS, HEAD_DIM = 128, 352, 4, 32
NUM_SEQUENCES, NUM_TEST_PROMPTS = 6000, 64


def new_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return an untrained model of one layer, whose sizes allow tensor parallelism of up to 4 ranks."""
    own = target.config
    config = LlamaConfig(
        vocab_size=own.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=own.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight
        _, _, directions = torch.linalg.svd(embedding, full_matrices=False)
        model.model.embed_tokens.weight.copy_(embedding @ directions[:HIDDEN].T)
    return model


def mixed_batches(texts: Iterator[Tensor], written: Tensor) -> Iterator[Tensor]:
    """Yield batches of token ids: of texts, and in turn of what the demo model has written, [N, S]."""
    for batch in texts:
        yield batch
        yield written[torch.randint(len(written), (BATCH_SIZE,))]


def loss_of(model: LlamaForCausalLM, target: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return the cross-entropy in nats to the probabilities that the target gives after each token of `rows`."""
    with torch.no_grad():
        wanted = target(input_ids=rows, use_cache=False).logits.float().softmax(-1)
    logits = model(input_ids=rows, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


def train(model: LlamaForCausalLM, target: LlamaForCausalLM, source: Iterator[Tensor], minutes: float) -> int:
    """Train until `minutes` have passed; return the number of steps."""
    optimizers, num_steps = new_optimizers(model), 0
    for num_steps, share in timed_steps(minutes):
        loss_of_rows = partial(loss_of, model, target, next(source))
        loss = train_step(model, optimizers, loss_of_rows, learning_rate(share))
        if num_steps % 100 == 0:
            print(f"step {num_steps}  {share:.0%}  loss {loss:.3f}", flush=True)
    return num_steps


@torch.no_grad()
def agreement(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Return the share of the tokens behind the prompts of `rows` that are the model's most likely ones."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT_LEN - 1 :]
    return (logits.argmax(-1) == rows[:, PROMPT_LEN:]).float().mean().item()


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write configuration and weights, in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--text", type=Path, metavar="DIR", required=True, help="folder with the files of WORKS"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="directory of the model")
    parser.add_argument("--minutes", type=float, default=19.0, help="of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    target: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)
    with LLM("demo", device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
    passages, tested = encode_works(tokenizer, arguments.text, rng)
    test = write_sequences(cut_prompts(tested, rng, NUM_TEST_PROMPTS))
    written = write_sequences(cut_prompts(passages, rng, NUM_SEQUENCES))
    model = new_draft(target)
    source = mixed_batches(batches(passages, SHORT_LEN, rng), written)
    num_steps = train(model, target.eval(), source, arguments.minutes)
    save(model, arguments.out)
    half = len(test) // 2
    report(
        {
            "draft_model.agreement.greedy": Figure(
                agreement(model.float(), test[:half]), "", "of held-out prompts, as the model continues them"
            ),
            "draft_model.agreement.sampled": Figure(agreement(model, test[half:]), "", "at temperature 0.8"),
            "draft_model.num_steps": Figure(num_steps, "steps", f"of {SHORT_LEN} tokens per sequence"),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
