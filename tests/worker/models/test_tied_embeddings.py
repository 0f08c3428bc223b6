"""Tied embedding and head share one matrix in memory if its packed layout supports look-ups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.linear import Layout
from quire.worker.comm.communicator import SingleRank
from quire.worker.models.load_context import LoadContext
from quire.worker.models.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.linear_weight import PlainWeight

VOCAB_SIZE, HIDDEN_SIZE = 384, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tied_embedding_and_head_share_packed_weight(dtype: torch.dtype, make_model: Any) -> None:
    checkpoint = Checkpoint(make_model("llama", tie_word_embeddings=True))
    load = LoadContext(checkpoint, SingleRank(), dtype, torch.device("cpu"))
    plain = VocabParallelEmbedding(load, "model.embed_tokens", VOCAB_SIZE, HIDDEN_SIZE)
    token_ids = torch.tensor([0, VOCAB_SIZE - 1, 77, 63, 64])
    before, matrix = plain.forward(token_ids), plain.weight.weight
    embedding = VocabParallelEmbedding(load, "model.embed_tokens", VOCAB_SIZE, HIDDEN_SIZE, tied=True)
    head = VocabParallelHead(load, "lm_head", HIDDEN_SIZE, VOCAB_SIZE, embedding)
    assert isinstance(head.weight, PlainWeight)
    if head.weight.packed.matrix is None and head.weight.packed.layout is not Layout.PLAIN:
        pytest.skip("the packed layout of this machine does not support look-ups")
    assert embedding.weight is head.weight.packed
    assert torch.equal(embedding.forward(token_ids), before)
    x = torch.randn(2, HIDDEN_SIZE).to(dtype)
    expected = x.double() @ matrix.double().t()
    torch.testing.assert_close(head.forward(x).double(), expected, atol=2e-2, rtol=2e-2)
