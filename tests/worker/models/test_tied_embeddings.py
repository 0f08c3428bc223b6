"""A matrix that is both embedding and head lies in memory once where it can be looked up as the head needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.linear import Layout
from quire.worker.comm.communicator import SingleRank
from quire.worker.models.layers import LoadContext, VocabParallelEmbedding, VocabParallelHead
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.linear_weight import PlainWeight

VOCAB_SIZE, HIDDEN_SIZE = 384, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_and_head_share_their_numbers(dtype: torch.dtype, make_model: Any) -> None:
    checkpoint = Checkpoint(make_model("llama", tie_word_embeddings=True))
    load = LoadContext(checkpoint, SingleRank(), dtype, torch.device("cpu"))
    embedding = VocabParallelEmbedding(load, "model.embed_tokens", VOCAB_SIZE, HIDDEN_SIZE)
    token_ids = torch.tensor([0, VOCAB_SIZE - 1, 77, 63, 64])
    before = embedding.forward(token_ids)
    matrix = embedding.weight.weight.clone()
    head = VocabParallelHead(load, "lm_head", HIDDEN_SIZE, VOCAB_SIZE, embedding)
    assert isinstance(head.weight, PlainWeight)
    if head.weight.packed.panels is None and head.weight.packed.layout is not Layout.PLAIN:
        pytest.skip("the packed numbers do not lie in known panels here")
    assert embedding.weight is head.weight.packed
    assert torch.equal(embedding.forward(token_ids), before)
    x = torch.randn(2, HIDDEN_SIZE).to(dtype)
    expected = x.double() @ matrix.double().t()
    torch.testing.assert_close(head.forward(x).double(), expected, atol=2e-2, rtol=2e-2)
