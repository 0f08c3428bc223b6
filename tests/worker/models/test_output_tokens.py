"""OutputTokens: the last layer computes only the tokens that are read, with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowing import instance_of, not_none
from torch import Tensor

from quire.cluster.config.model_config import describe_model
from quire.proto.config import ModelConfig
from quire.proto.model.registry import check_supported
from quire.proto.model.spec import DecoderSpec
from quire.worker.attention import AttentionInputs, LayerCache
from quire.worker.comm.communicator import SingleRank
from quire.worker.models.llama.decoder import Decoder
from quire.worker.models.load_context import LoadContext
from quire.worker.models.output_tokens import OutputTokens, select_output_tokens
from quire.worker.weights.checkpoint import Checkpoint

BLOCK_SIZE, TABLE_LEN = 8, 4
# Two decodes of 9 and 3 tokens; chunks of 5, 7 and 4 tokens that end at 5, 19 and 30.
SEQ_LENS, CHUNK_LENS = [9, 3, 5, 19, 30], [5, 7, 4]
NUM_DECODES, NUM_TOKENS = 2, 18
# The first and the last chunk finish their prompts. In the order of the rows.
SAMPLED = [17, 0, 6, 1]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_decoder(folder: Path, model: ModelConfig) -> Decoder:
    spec = instance_of(DecoderSpec, check_supported(model, 1))
    load = LoadContext(Checkpoint(folder), SingleRank(), torch.float32, torch.device("cpu"), None)
    return Decoder(load, spec, BLOCK_SIZE * TABLE_LEN)


def make_step() -> tuple[Tensor, Tensor, AttentionInputs]:
    """Return token ids, positions and attention inputs."""
    num_seqs = len(SEQ_LENS)
    tables = (torch.randperm(num_seqs * TABLE_LEN) + 1).view(num_seqs, TABLE_LEN).int()
    query_lens = [1] * NUM_DECODES + CHUNK_LENS
    sequences = torch.arange(num_seqs).repeat_interleave(torch.tensor(query_lens))
    positions = torch.cat(
        [torch.arange(end - count, end) for end, count in zip(SEQ_LENS, query_lens, strict=True)]
    )
    blocks = tables[sequences, positions // BLOCK_SIZE].long()
    starts = torch.tensor([0, *CHUNK_LENS]).cumsum(0).int()
    inputs = AttentionInputs(
        NUM_DECODES,
        blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        tables,
        starts,
        torch.tensor(SEQ_LENS).int(),
    )
    return torch.randint(0, 300, (NUM_TOKENS,)).int(), positions, inputs


def make_caches(model: ModelConfig) -> list[LayerCache]:
    """Return caches of random numbers, the same in every call."""
    torch.manual_seed(1)
    num_blocks = len(SEQ_LENS) * TABLE_LEN + 1
    shape = num_blocks, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim
    return [LayerCache(torch.randn(shape)) for _ in range(model.num_layers)]


def select(sampled: list[int], inputs: AttentionInputs) -> OutputTokens:
    index = torch.tensor(sampled, dtype=torch.int64)
    return not_none(select_output_tokens(index, NUM_TOKENS, inputs))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("sampled", [SAMPLED, [], [6]], ids=["some", "none", "one"])
def test_hidden_states_are_those_of_all_tokens(kind: str, sampled: list[int], make_model: Any) -> None:
    folder = make_model(kind, seed=3)
    model = describe_model(folder, kind)
    decoder = make_decoder(folder, model)
    token_ids, positions, inputs = make_step()
    caches, own_caches = make_caches(model), make_caches(model)
    expected = decoder.forward(token_ids, positions, caches, inputs)
    outputs = select(sampled, inputs)
    found = decoder.forward(token_ids, positions, own_caches, inputs, outputs=outputs)
    torch.testing.assert_close(found, expected[outputs.index], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[outputs.sampled_index], expected[sampled], rtol=1e-5, atol=1e-5)
    for own, cache in zip(own_caches, caches, strict=True):
        assert torch.equal(own.blocks, cache.blocks)


def test_outputs_have_own_lengths_and_tables() -> None:
    inputs = make_step()[2]
    outputs = select(SAMPLED, inputs)
    assert outputs.index.tolist() == [0, 1, 6, 17]
    assert outputs.sampled_index.tolist() == [3, 0, 2, 1]
    assert outputs.inputs.num_decodes == NUM_DECODES
    assert outputs.inputs.query_start.tolist() == [0, 1, 2]
    assert outputs.inputs.seq_lens.tolist() == [9, 3, 5, 30]
    assert outputs.inputs.block_tables.tolist() == inputs.block_tables[[0, 1, 2, 4]].tolist()
    chunks = not_none(outputs.inputs.chunks)
    assert (chunks.query_lens, chunks.seq_lens) == ([1, 1], [5, 30])


@pytest.mark.parametrize(
    ("num_decodes", "sampled"), [(1, [1, 0]), (2, [1])], ids=["all tokens are sampled", "no chunks"]
)
def test_step_has_no_selection(num_decodes: int, sampled: list[int]) -> None:
    tables, lens = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    starts = torch.arange(3 - num_decodes).int()
    inputs = AttentionInputs(num_decodes, torch.arange(2), tables, starts, lens)
    assert select_output_tokens(torch.tensor(sampled), 2, inputs) is None


@pytest.mark.parametrize("tp", [1, 2])
def test_last_layer_of_prompt_computes_its_last_token(
    tp: int, make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_model("llama", seed=3), tp, num_blocks=16)
    computed: list[int] = []
    logits = Decoder.logits

    def count(self: Decoder, hidden: Tensor, *arguments: Any) -> Tensor:
        computed.append(len(hidden))
        return logits(self, hidden, *arguments)

    forward, lens = Decoder.forward, []

    def note(self: Decoder, *arguments: Any, **options: Any) -> Tensor:
        hidden = forward(self, *arguments, **options)
        lens.append(len(hidden))
        return hidden

    monkeypatch.setattr(Decoder, "forward", note)
    monkeypatch.setattr(Decoder, "logits", count)
    engine.greedy([[7, 21, 300, 45, 11, 9, 8]], 2, chunk_len=4)
    # Two chunks, of which the first samples nothing, and one decoded token.
    assert lens == [1] * (3 * tp)
    assert computed == [1] * (2 * tp)
