"""Train a draft head for the demo model (EAGLE-3, Li et al., 2025), on text that the demo model writes.

    python -m benchmarks.demo_model.draft_head --text DIR --out cluster/cli/demo/draft_head [--minutes 25]

The bundled head was made so in 18 minutes on one core of an EPYC (AVX-512): 3,407 steps.

The head reads the hidden states of three layers of the demo model and the next token, and predicts the token after
that. It shares the embedding and the output layer of the demo model, which stays as it is. Training unrolls NUM_STEPS
drafted tokens: from the second on, the head reads its own hidden states, as it does when it drafts.

The texts are continued by the demo model itself, half greedily and half at temperature 0.8, and the loss is the
cross-entropy to its probabilities of each token, because a head must agree with the model and not with the books. The
budget is time, as for the demo model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.common import Figure, make_parser, report
from benchmarks.demo_model.eagle3_reference import Eagle3Reference, HeadSizes
from benchmarks.demo_model.training import SEED, encode_works, learning_rate, timed_steps, train_step
from quire import LLM, SamplingParams
from quire.cluster.config.engine_options import DEMO_MODEL_PATH

SIZES = HeadSizes(hidden=256, target_hidden=256, intermediate=128, num_heads=4, num_kv_heads=2, head_dim=32)
AUX_LAYERS = (2, 3, 4)  # hidden states before these layers; the last one is the output of the last layer
NUM_STEPS = 5  # drafted tokens of the training objective
SEQ_LEN, PROMPT_LEN = 256, 48
BATCH_SIZE = 8
NUM_SEQUENCES = 3000
LOSS_SHARE = 0.25  # of the pairs whose logits a step computes: logits take most of the time
PEAK_LEARNING_RATE, WARM_UP = 2e-3, 0.03
STEP_WEIGHT = 0.8  # of a drafted token's loss, relative to the one before it


def write_sequences(prompts: list[list[int]]) -> Tensor:
    """Return the prompts as the demo model continues them, [N, SEQ_LEN]."""
    rows: list[list[int]] = []
    with LLM("demo", device="cpu", prefix_caching=False) as llm:
        for index, temperature in enumerate((0.0, 0.8)):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=SEQ_LEN - PROMPT_LEN,
                ignore_eos=True,
                seed=SEED,
                detokenize=False,
            )
            outputs = llm.generate(prompts[index::2], params, use_tqdm=False)
            rows += [
                [*prompt, *output.outputs[0].token_ids]
                for prompt, output in zip(prompts[index::2], outputs, strict=True)
            ]
    return torch.tensor(rows)


def cut_prompts(passages: list[list[int]], rng: random.Random, count: int) -> list[list[int]]:
    """Return beginnings and middles of passages, PROMPT_LEN tokens each."""
    long_enough = [passage for passage in passages if len(passage) >= PROMPT_LEN]
    prompts = []
    for _ in range(count):
        passage = rng.choice(long_enough)
        start = rng.randrange(len(passage) - PROMPT_LEN + 1) if rng.random() < 0.7 else 0
        prompts.append(passage[start : start + PROMPT_LEN])
    return prompts


class Target:
    """The demo model, frozen: the features that the head reads, and its predictions."""

    def __init__(self, path: Path) -> None:
        self.model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.embedding, self.output = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        self.norm = self.model.model.norm
        self._before_norm: Tensor | None = None
        self.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._before_norm = inputs[0]

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states that the head reads of tokens [B, S], [B, S, 3 E] in bfloat16."""
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model.model(token_ids, output_hidden_states=True, use_cache=False)
        assert self._before_norm is not None
        states = [*output.hidden_states[:-1], self._before_norm]
        return torch.cat([states[layer].bfloat16() for layer in AUX_LAYERS], dim=-1)

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """Return the model's logits after tokens with features [M, 3 E], [M, V]."""
        output_of_last_layer = features[:, -self.output.shape[1] :]
        return F.linear(self.norm(output_of_last_layer.float()), self.output).float()


@dataclass(frozen=True, slots=True)
class Examples:
    """Sequences that the demo model has written, [N, S], and their features [N, S, 3 E]."""

    token_ids: Tensor
    features: Tensor

    @staticmethod
    def of(target: Target, token_ids: Tensor) -> Examples:
        return Examples(token_ids, torch.cat([target.features(own) for own in token_ids.split(BATCH_SIZE)]))

    def select(self, rows: Tensor) -> Examples:
        return Examples(self.token_ids[rows], self.features[rows])


def unroll(head: Eagle3Reference, target: Target, examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield of each drafted token the head's input of the output layer, [M, E], and the features of the token before.

    These, [M, 3 E], tell how the model continues there.
    """
    embedded = F.embedding(examples.token_ids[:, 1:-1], target.embedding)
    for step, hidden in enumerate(head.unroll(embedded, examples.features[:, :-2].float(), NUM_STEPS)):
        yield head.normalize(hidden).flatten(0, 1), examples.features[:, 1 + step : -1].flatten(0, 1)


def loss_of(head: Eagle3Reference, target: Target, examples: Examples) -> Tensor:
    """Return the loss of a batch."""
    loss = torch.zeros(())
    for step, (hidden, features) in enumerate(unroll(head, target, examples)):
        chosen = torch.randperm(len(hidden))[: int(LOSS_SHARE * len(hidden))]
        logits = F.linear(hidden[chosen], target.output).float()
        wanted = target.logits(features[chosen]).softmax(-1)
        loss = loss + STEP_WEIGHT**step * F.cross_entropy(logits, wanted)
    return loss


@torch.no_grad()
def measure(head: Eagle3Reference, target: Target, examples: Examples) -> list[float]:
    """Return the share of each drafted token that is the model's most likely one."""
    return [
        (F.linear(hidden, target.output).argmax(-1) == target.logits(features).argmax(-1))
        .float()
        .mean()
        .item()
        for hidden, features in unroll(head, target, examples)
    ]


def train(head: Eagle3Reference, target: Target, examples: Examples, minutes: float) -> int:
    """Train until `minutes` have passed; return the number of steps."""
    matrices = [parameter for parameter in head.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in head.parameters() if parameter.ndim == 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    num_steps = 0
    for num_steps, share in timed_steps(minutes):
        batch = examples.select(torch.randperm(len(examples.token_ids))[:BATCH_SIZE])
        rate = learning_rate(share, PEAK_LEARNING_RATE, WARM_UP)
        loss = train_step(head, optimizers, partial(loss_of, head, target, batch), rate)
        if num_steps % 50 == 0:
            shares = " ".join(f"{own:.2f}" for own in measure(head, target, batch))
            print(f"step {num_steps}  {share:.0%}  loss {loss:.3f}  agreement {shares}", flush=True)
    return num_steps


def save(head: Eagle3Reference, target: Target, out: Path) -> None:
    """Write the head in the published layout of EAGLE-3, in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    own = target.model.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": SIZES.hidden,
        "intermediate_size": SIZES.intermediate,
        "num_attention_heads": SIZES.num_heads,
        "num_key_value_heads": SIZES.num_kv_heads,
        "head_dim": SIZES.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": SIZES.eps,
        "rope_parameters": {"rope_theta": SIZES.rope_theta, "rope_type": "default"},
        "max_position_embeddings": own.max_position_embeddings,
        "vocab_size": own.vocab_size,
        "bos_token_id": own.bos_token_id,
        "eos_token_id": own.eos_token_id,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--text", type=Path, metavar="DIR", required=True, help="folder with the files of WORKS"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="directory of the head")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    target = Target(DEMO_MODEL_PATH)
    with LLM("demo", device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
    passages, tested = encode_works(tokenizer, arguments.text, rng)
    examples = Examples.of(target, write_sequences(cut_prompts(passages, rng, NUM_SEQUENCES)))
    test = Examples.of(target, write_sequences(cut_prompts(tested, rng, 64)))
    head = Eagle3Reference(SIZES)
    num_steps = train(head, target, examples, arguments.minutes)
    save(head, target, arguments.out)
    figures = {
        f"draft_head.agreement.{step + 1}": Figure(
            share, "", "of held-out prompts, as the model continues them"
        )
        for step, share in enumerate(measure(head, target, test))
    }
    figures["draft_head.num_steps"] = Figure(
        num_steps, "steps", f"{BATCH_SIZE} sequences of {SEQ_LEN} tokens"
    )
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
