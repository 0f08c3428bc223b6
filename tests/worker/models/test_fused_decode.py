"""FusedDecode: bit-identical to the layers run op by op, for the decoders that support it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from narrowing import instance_of, not_none
from torch import Tensor

from quire.cluster.config.model_config import describe_model
from quire.kernels.lora import LoraGroups, group_tokens
from quire.proto.model.quantization import Quantization
from quire.proto.model.registry import check_supported
from quire.proto.model.spec import DecoderSpec
from quire.proto.step import RowSampling
from quire.worker.attention import AttentionInputs, LayerCache
from quire.worker.comm.communicator import SingleRank
from quire.worker.lora.layers import NO_LORA, LoraLayers, PartFactors
from quire.worker.lora.step_adapters import NO_ADAPTERS, StepAdapters
from quire.worker.memory.cache_engine import QUANTIZED_DTYPES
from quire.worker.models.llama import decoder as decoder_module
from quire.worker.models.llama.decoder import Decoder
from quire.worker.models.load_context import LoadContext
from quire.worker.models.moe import moe
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.weight_slice import WeightSlice

pytestmark = pytest.mark.usefixtures("two_threads")

BLOCK_SIZE, NUM_BLOCKS, TABLE_LEN, NUM_POSITIONS = 8, 60, 5, 128

# Covers biases of q, k and v; norms of heads; windows; layers without positions; several rotations; a rotated half of
# a head that is not a whole vector; norms after a sublayer; soft caps; scaled residual additions.
SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "llama-short-heads": {},
    "qwen2": {"head_dim": 32},
    "qwen3": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
    "ministral": {
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"num_attention_heads": 4},
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma2": {},
    "gemma3_text": {},
    "granite": {},
    "mixtral": {"sliding_window": 11},
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "glm4_moe": {},
}
# Biases after a sum over the ranks, norms only after sublayers, attention sinks, a length that is not a whole vector,
# norms of another kind.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "olmo2": {},
    "gpt_oss": {},
    "llama-odd": {"intermediate_size": 130},
    "cohere": {},
}
UNSUPPORTED_REASONS = {
    "llama-odd": "rows of 130 numbers of torch.float32 are not whole vectors",
    "cohere": "its norms are no RMSNorm",
}

MakeDecoder = Callable[..., Decoder]


@pytest.fixture
def make_decoder(make_model: Any) -> MakeDecoder:
    def make(
        kind: str,
        dtype: torch.dtype = torch.float32,
        quantization: Quantization | None = None,
        lora: LoraLayers = NO_LORA,
    ) -> Decoder:
        folder = make_model(kind.split("-")[0], seed=3, **(SUPPORTED | UNSUPPORTED)[kind])
        spec = instance_of(DecoderSpec, check_supported(describe_model(folder, kind), 1))
        load = LoadContext(
            Checkpoint(folder), SingleRank(), dtype, torch.device("cpu"), quantization, lora=lora
        )
        return Decoder(load, spec, NUM_POSITIONS)

    return make


def make_caches(decoder: Decoder, dtype: torch.dtype, stored: torch.dtype) -> list[LayerCache]:
    """Return caches of random numbers; quantized ones have scales."""
    torch.manual_seed(1)
    caches = []
    for layer in decoder.layers:
        dense = layer.to_dense_layer(list(decoder.rotary))
        assert dense is not None
        assert dense.qkv.matrix is not None
        assert dense.output.matrix is not None
        num_heads = dense.output.matrix.in_features // dense.head_dim
        num_kv_heads = (dense.qkv.matrix.out_features // dense.head_dim - num_heads) // 2
        slots = NUM_BLOCKS, 2, num_kv_heads, BLOCK_SIZE
        if stored == dtype:
            caches.append(LayerCache(torch.randn(*slots, dense.head_dim).to(dtype)))
        else:
            codes = torch.randint(-100, 100, (*slots, dense.head_dim)).to(stored)
            caches.append(LayerCache(codes, torch.rand(slots) / 50))
    return caches


def make_step(num_tokens: int) -> tuple[Tensor, Tensor, AttentionInputs]:
    """Return token ids, positions and attention inputs of a step in which every sequence decodes."""
    torch.manual_seed(num_tokens)
    tables = (torch.randperm(NUM_BLOCKS - 1) + 1)[: num_tokens * TABLE_LEN].view(num_tokens, TABLE_LEN).int()
    seq_lens = torch.randint(1, TABLE_LEN * BLOCK_SIZE + 1, (num_tokens,)).int()
    positions = seq_lens.long() - 1
    blocks = tables.long().gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    token_ids = torch.randint(0, 300, (num_tokens,)).int()
    return token_ids, positions, AttentionInputs(num_tokens, slots, tables, torch.zeros(1).int(), seq_lens)


def clone(caches: list[LayerCache]) -> list[LayerCache]:
    return [
        LayerCache(cache.blocks.clone(), None if cache.scales is None else cache.scales.clone())
        for cache in caches
    ]


def assert_equal_bits(
    decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, batch_sizes: Sequence[int] = (1, 2, 7, 11)
) -> None:
    """Compare fused and op-by-op steps of several batch sizes: hidden states and cache contents."""
    fused = decoder.fused_decode
    assert fused is not None
    caches = make_caches(decoder, dtype, stored)
    by_ops = clone(caches)
    for num_tokens in batch_sizes:
        token_ids, positions, inputs = make_step(num_tokens)
        assert fused.supports(num_tokens, inputs)
        hidden = decoder.forward(token_ids, positions, caches, inputs)
        decoder.fused_decode = None
        expected = decoder.forward(token_ids, positions, by_ops, inputs)
        decoder.fused_decode = fused
        assert expected.isfinite().all()
        assert torch.equal(hidden, expected)
        for one, other in zip(caches, by_ops, strict=True):
            assert torch.equal(one.blocks.view(torch.uint8), other.blocks.view(torch.uint8))
            assert one.scales is None or torch.equal(one.scales, not_none(other.scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SUPPORTED)
def test_fused_decode_is_bit_identical_to_ops(
    kind: str, dtype: torch.dtype, make_decoder: MakeDecoder
) -> None:
    assert_equal_bits(make_decoder(kind, dtype), dtype, dtype)


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_decode_is_bit_identical_with_quantized_cache_and_weights(
    kv_dtype: str, dtype: torch.dtype, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder("llama", dtype, Quantization("int8"))
    assert_equal_bits(decoder, dtype, QUANTIZED_DTYPES[kv_dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_fused_decode_with_adapters_is_bit_identical_to_ops(
    kind: str, dtype: torch.dtype, make_decoder: MakeDecoder
) -> None:
    """Of three slots: one with several ranks, one that changes parts of layers, and one that is not used."""
    lora = LoraLayers(3, 6, dtype, torch.device("cpu"))
    decoder = make_decoder(kind, dtype, None, lora)
    without = hidden_of(decoder, dtype)
    for slot, layer in itertools.product((0, 2), lora):
        parts = [random_factors(part, slot, index, dtype) for index, part in enumerate(layer.parts)]
        layer.put(slot, layer.pack(parts))
    for slots in ([0], [2, -1], [0, 2, 2, -1, 0, 0, 2]):
        groups = LoraGroups(*map(torch.from_numpy, group_tokens(np.array(slots, np.int32))))
        lora.step = StepAdapters(groups)
        assert_equal_bits(decoder, dtype, dtype, [len(slots)])
    assert not torch.equal(hidden_of(decoder, dtype), without)
    lora.step = NO_ADAPTERS
    assert torch.equal(hidden_of(decoder, dtype), without)


def random_factors(part: WeightSlice, slot: int, index: int, dtype: torch.dtype) -> PartFactors | None:
    """Return factors of one part of a layer; slot 2 changes every other part alone."""
    rank, (_, num_inputs), (_, num_outputs) = 4 + index, part.inputs, part.outputs
    if slot == 2 and index % 2:
        return None
    return PartFactors(
        (torch.randn(rank, num_inputs) / num_inputs**0.5).to(dtype), torch.randn(rank, num_outputs).to(dtype)
    )


def hidden_of(decoder: Decoder, dtype: torch.dtype) -> Tensor:
    token_ids, positions, inputs = make_step(7)
    assert decoder.fused_decode is not None
    assert decoder.fused_decode.supports(7, inputs)
    return decoder.forward(token_ids, positions, make_caches(decoder, dtype, dtype), inputs)


def test_experts_with_adapters_run_op_by_op(make_decoder: MakeDecoder) -> None:
    lora = LoraLayers(1, 4, torch.float32, torch.device("cpu"))
    assert make_decoder("mixtral", torch.float32, None, lora).fused_decode is None


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_decoder_has_no_fused_decode_and_logs_why(
    kind: str, make_decoder: MakeDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert make_decoder(kind).fused_decode is None
    (message,) = [record.getMessage() for record in caplog.records if "op by op" in record.getMessage()]
    assert message.endswith(UNSUPPORTED_REASONS.get(kind, "a layer is of a kind without fused ops"))


def test_experts_that_are_multiplied_one_by_one_are_logged_once(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch, log_of: Callable[[str], list[str]]
) -> None:
    logged = log_of(decoder_module.__name__)
    make_decoder("mixtral")
    assert logged == []
    monkeypatch.setattr(moe, "supports", lambda weights: False)
    make_decoder("mixtral")
    assert [message for message in logged if "one by one" in message] == logged
    assert len(logged) == 1


def test_step_with_prompt_chunk_is_not_supported(make_decoder: MakeDecoder) -> None:
    fused = make_decoder("llama").fused_decode
    assert fused is not None
    inputs = make_step(2)[2]
    assert not fused.supports(5, inputs)


def test_fused_decode_follows_change_of_cache(make_decoder: MakeDecoder) -> None:
    """The profile run uses a cache of its own before the real one is allocated."""
    decoder = make_decoder("llama")
    token_ids, positions, inputs = make_step(1)
    one = make_caches(decoder, torch.float32, torch.float32)
    other = clone(one)
    assert torch.equal(
        decoder.forward(token_ids, positions, one, inputs),
        decoder.forward(token_ids, positions, other, inputs),
    )
    assert torch.equal(one[-1].blocks, other[-1].blocks)


@pytest.mark.parametrize(("kind", "tp"), [("gemma2", 2), ("llama", 4), ("qwen3_moe", 2)])
def test_fused_decode_on_several_ranks_gives_same_tokens(
    kind: str, tp: int, make_model: Any, make_engine: Any, planned: Any
) -> None:
    """With more ranks than KV heads, ranks share heads."""
    folder = make_model(kind, seed=3, num_key_value_heads=2)
    tokens = []
    for is_fused in (True, False):
        engine = make_engine(folder, tp)
        for runner in engine.runners:
            assert runner.memory.loaded.model.fused_decode is not None
            if not is_fused:
                runner.memory.loaded.model.fused_decode = None
        sequences = [planned(list(range(5, 5 + length)), 12, RowSampling(0.0)) for length in (3, 9)]
        engine.generate(sequences)
        tokens.append([sequence.generated for sequence in sequences])
    assert tokens[0] == tokens[1]
