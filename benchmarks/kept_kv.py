"""Seconds that a failed step costs running sequences, with the KV of the other steps and without.

    python -m benchmarks.kept_kv --json benchmarks/results/kept_kv.json

Runs the bundled demo model in this process, without Ray. One step fails in the middle of the generation. The time is
that from the failure to the next token of every sequence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common import Figure, make_parser, report
from quire import LLM, SamplingParams
from quire.cluster.config.engine_options import DEMO_MODEL
from quire.cluster.offline.in_process import InProcessEngine, InProcessGroup
from quire.proto.errors import RankFailed
from quire.proto.step import StepPlan
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.service.worker_group import Rebuilt

MAX_TOKENS = 64
BLOCK_SIZE = 16


@dataclass
class FailingGroup:
    """Fails one step of a group once all sequences decode.

    Attributes:
        failed_at, resumed_at: monotonic time of the failure, and of the first step after it that samples for every
            sequence; 0.0 before.
        num_tokens: computed in between.
    """

    group: InProcessGroup
    kept: KvTiers
    failed_at: float = 0.0
    resumed_at: float = 0.0
    num_tokens: int = 0
    num_decodes: int = 0

    def install(self) -> None:
        broadcast, rebuild = self.group.broadcast, self.group.rebuild

        def failing_broadcast(plan: StepPlan) -> None:
            if not plan.chunk_rows.size:
                self.num_decodes += 1
            if self.num_decodes == MAX_TOKENS // 2 and not self.failed_at:
                self.failed_at = time.perf_counter()
                raise RankFailed(0, "on command", plan.step_id, is_step_error=False)
            broadcast(plan)
            if self.failed_at and not self.resumed_at:
                self.num_tokens += int(plan.chunk_lens.sum())
                if not plan.chunk_rows.size:
                    self.resumed_at = time.perf_counter()

        def partly_kept(epoch: int) -> Rebuilt:
            return replace(rebuild(epoch), kept=self.kept)

        self.group.broadcast = failing_broadcast  # type: ignore[method-assign]
        self.group.rebuild = partly_kept  # type: ignore[method-assign]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=928, help="of each sequence")
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    expected: list[list[int]] | None = None
    for name, kept in {"without": KvTiers.NONE, "with": KvTiers.ALL}.items():
        failing, outputs = measure(arguments.sequences, arguments.prompt_tokens, kept)
        assert expected in (None, outputs), "the failure changed the outputs"
        expected = outputs
        note = f"{arguments.sequences} sequences of {arguments.prompt_tokens + MAX_TOKENS // 2} tokens"
        figures[f"kept_kv.{name}.tokens"] = Figure(failing.num_tokens, "tokens computed again", note)
        figures[f"kept_kv.{name}.s"] = Figure(failing.resumed_at - failing.failed_at, "s", note)
    report(figures, arguments.json)


def measure(
    num_sequences: int, num_prompt_tokens: int, kept: KvTiers
) -> tuple[FailingGroup, list[list[int]]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 1000, num_prompt_tokens).tolist() for _ in range(num_sequences)]
    num_blocks = num_sequences * (2 + (num_prompt_tokens + MAX_TOKENS) // BLOCK_SIZE)
    with LLM(DEMO_MODEL, device="cpu", num_kv_blocks=num_blocks, max_num_seqs=num_sequences) as llm:
        engine = llm._engine
        assert isinstance(engine, InProcessEngine)
        failing = FailingGroup(engine._group, kept)
        failing.install()
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        )
    return failing, [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
