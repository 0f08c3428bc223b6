"""Published quantized checkpoints: greedy tokens of two ranks equal those of the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_checkpoints import CHECKPOINTS, write_published
from reference import prompts_of

from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_checkpoint_gives_tokens_of_dequantized_weights(
    name: str, make_model: Any, make_engine: Any, planned: Any, tmp_path: Path
) -> None:
    published = CHECKPOINTS[name]
    source = make_model(published.kind, seed=3, **published.overrides)
    quantized, twin = write_published(source, tmp_path, published)
    generated = []
    for folder, tp in ((quantized, 2), (twin, 1)):
        sequences = [planned(prompt, 10, GREEDY) for prompt in prompts_of([5, 30], seed=3)]
        make_engine(folder, tp).generate(sequences, chunk_len=16)
        generated.append([sequence.generated for sequence in sequences])
    assert generated[0] == generated[1]
    assert len(set(generated[0][0] + generated[0][1])) > 4
