"""TransformersModel: names of stored tensors, and the checks before a model serves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_models import Scheme, write_quantized
from reference import Reference, prompts_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPTNeoXPreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.quantized_linear import QuantizedWeight
from quire.proto.errors import ConfigError, ModelLoadError
from quire.worker.attention import AttentionInputs, LayerCache
from quire.worker.comm.communicator import SingleRank
from quire.worker.models import fused_decode
from quire.worker.models.transformers.attention_adapters import alibi_slopes
from quire.worker.models.transformers.paged_interface import IMPLEMENTATION, PagedStep
from quire.worker.models.transformers.paged_selfcheck import run_paged_selfcheck
from quire.worker.rank.runner import ModelRunner
from quire.worker.weights import linear_weight
from quire.worker.weights.linear_weight import LinearWeight


def rewrite(folder: Path, copy: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Copy a model directory and change its tensors."""
    shutil.copytree(folder, copy)
    save_file(change(load_file(folder / "model.safetensors")), copy / "model.safetensors")
    return copy


def test_published_checkpoint_of_base_model_gives_tokens_of_transformers(
    make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    """GPT-2 as published has no prefix, no head, and unused masks."""

    def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return bare | {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}

    folder = make_model("gpt2", seed=7)
    engine = make_engine(rewrite(folder, tmp_path / "published", published))
    (prompt,) = prompts_of([9], seed=1)
    (generated,) = engine.greedy([prompt], 12)
    Reference(folder).check_generate(prompt, generated)


def test_model_logs_that_its_steps_run_op_by_op(
    make_model: Any, make_engine: Any, log_of: Callable[[str], list[str]]
) -> None:
    logged = log_of(fused_decode.__name__)
    make_engine(make_model("gpt2", seed=7))
    (message,) = logged
    assert message.endswith(": its layers are modules of transformers")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"),
            r"no tensor .*h\.1\.mlp\.c_fc\.weight'",
        ),
        (
            lambda tensors: tensors.update(extra=torch.ones(1)),
            "1 tensors that the model does not use: extra",
        ),
        (
            lambda tensors: tensors.update({"transformer.ln_f.weight": torch.ones(63)}),
            r"'transformer\.ln_f\.weight' .* shape \[63\], expected \[64\]",
        ),
    ],
)
def test_missing_unused_or_misshapen_tensor_raises(
    make_model: Any, engine_config: Any, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        change(tensors)
        return tensors

    folder = rewrite(make_model("gpt2", seed=7), tmp_path / "damaged", changed)
    with pytest.raises(ModelLoadError, match=words):
        ModelRunner(engine_config(folder), SingleRank())


def test_buffer_that_model_does_not_compute_raises(
    make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPTNeoXPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ConfigError, match=r"does not compute the buffer gpt_neox\.rotary_emb\.inv_freq"):
        ModelRunner(engine_config(make_model("gpt_neox", seed=7)), SingleRank())


def test_alibi_slopes_equal_transformers() -> None:
    for num_heads in range(1, 72):
        expected = _get_alibi_slopes(num_heads, torch.device("cpu"))
        torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), expected)


# One scheme of each layout; the model is one that transformers' modules compute.
QUANTIZED = {
    "gptq-act-order": Scheme("gptq", act_order=True),
    "awq": Scheme("awq"),
    "packed": Scheme("packed"),
    "int8": Scheme("codes", bits=8, group_len=None, symmetric=True),
    "float8-blocks": Scheme("float8", is_float=True, block=(48, 32)),
    "nvfp4": Scheme("nvfp4", group_len=16, is_float=True),
    "mxfp4": Scheme("mxfp4", is_float=True),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_model_gives_tokens_of_dequantized_weights(
    name: str, tp: int, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    quantized, twin = write_quantized(make_model("olmo", seed=7), tmp_path, QUANTIZED[name])
    (prompt,) = prompts_of([9], seed=1)
    (generated,) = make_engine(quantized, tp).greedy([prompt], 8)
    Reference(twin).check_generate(prompt, generated)


def test_quantized_experts_give_tokens_of_dequantized_weights(
    make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    source = make_model("flex_olmo", seed=7, num_experts=4, num_experts_per_tok=2)
    quantized, twin = write_quantized(source, tmp_path, Scheme("awq"))
    (prompt,) = prompts_of([9], seed=1)
    (generated,) = make_engine(quantized).greedy([prompt], 8)
    Reference(twin).check_generate(prompt, generated)


def test_online_quantization_applies_to_linear_layers(
    make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.dtype] = []
    make = linear_weight.make_linear_weight

    def record(weight: QuantizedWeight, dtype: torch.dtype, *, keep_codes: bool) -> LinearWeight:
        made.append(weight.codes.dtype)
        return make(weight, dtype, keep_codes=keep_codes)

    monkeypatch.setattr(linear_weight, "make_linear_weight", record)
    ModelRunner(engine_config(make_model("olmo", seed=7), quantization="int8"), SingleRank())
    # Queries, keys, values, output, gate, up and down of three layers.
    assert made.count(torch.int8) >= 21


def selfcheck(forward: Callable[..., Tensor]) -> None:
    run_paged_selfcheck(forward, 1, (1, 8), torch.float32, torch.device("cpu"))


def test_selfcheck_passes_for_independent_tokens() -> None:
    selfcheck(lambda token_ids, positions, caches, inputs: torch.outer(positions + 1.0, torch.ones(8)))


def test_selfcheck_fails_if_tokens_depend_on_batch() -> None:
    with pytest.raises(ConfigError, match="depend on other tokens of the batch by more than attention"):
        selfcheck(
            lambda token_ids, positions, caches, inputs: torch.outer(positions.cumsum(0) + 1.0, torch.ones(8))
        )


def test_selfcheck_fails_for_nan() -> None:
    with pytest.raises(ConfigError, match="depend on other tokens"):
        selfcheck(lambda token_ids, positions, caches, inputs: torch.full((len(token_ids), 8), torch.nan))


def test_selfcheck_error_of_model_is_one_line() -> None:
    def forward(*args: Any) -> Tensor:
        raise KeyError("gate\nand more")

    with pytest.raises(ConfigError, match=r"^it does not run on paged caches: 'gate\\nand more'$"):
        selfcheck(forward)


@pytest.fixture
def inputs() -> AttentionInputs:
    """One token of one sequence."""
    ids = torch.zeros(1, 1, dtype=torch.int32)
    return AttentionInputs(
        1, torch.zeros(1, dtype=torch.int64), ids, ids[0], torch.ones(1, dtype=torch.int32)
    )


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ({}, {"s_aux": torch.ones(3)}, r"sinks of shape \[3\] for 2 heads"),
        ({}, {"position_bias": torch.ones(2)}, "arguments that are not supported: position_bias"),
        ({}, {"attention_mask": torch.ones(1)}, "arguments that are not supported: attention_mask"),
        ({"is_causal": False}, {}, "not causal"),
        ({}, {"is_causal": False}, "not causal"),
        ({"layer_type": "sliding_attention"}, {}, "call attention without the window"),
        ({"num_kv_heads": 2}, {}, r"but its configuration has 1 KV heads of 8"),
        ({"head_dim": 16}, {}, r"but its configuration has 1 KV heads of 8"),
    ],
)
def test_unsupported_attention_call_raises(
    inputs: AttentionInputs, module: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    step = PagedStep(1)
    head_dim, num_kv_heads = module.pop("head_dim", 8), module.pop("num_kv_heads", 1)
    q, k, v = (torch.ones(1, count, 1, head_dim) for count in (2, num_kv_heads, num_kv_heads))
    arguments = {"attention_mask": None} | arguments
    own = SimpleNamespace(paged_step=step, layer_idx=0, **module)
    cache = LayerCache(torch.zeros(1, 2, 1, 16, 8))
    with pytest.raises(ConfigError, match=words), step.bind([cache], inputs):
        ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](own, q, k, v, **arguments)


@pytest.mark.parametrize(("window", "seen"), [(0, "all"), (9, "9")])
def test_layer_that_attends_beyond_its_window_raises(inputs: AttentionInputs, window: int, seen: str) -> None:
    """The cache has only the tokens of the window."""
    step, cache = PagedStep(1, (8,)), LayerCache(torch.zeros(1, 2, 1, 16, 8))
    q, kv = torch.ones(1, 2, 8), torch.ones(1, 1, 8)
    words = f"layer 0 attends to {seen} tokens, but its configuration has a window of 8"
    with step.bind([cache], inputs):
        step.attend(0, q, kv, kv, 1.0, AttentionVariant(window=8))
    with pytest.raises(ConfigError, match=words), step.bind([cache], inputs):
        step.attend(0, q, kv, kv, 1.0, AttentionVariant(window=window))


def test_layer_that_attends_twice_raises(inputs: AttentionInputs) -> None:
    step = PagedStep(2)
    caches = [LayerCache(torch.zeros(1, 2, 1, 16, 8)) for _ in range(2)]
    q, kv = torch.ones(1, 2, 8), torch.ones(1, 1, 8)
    with step.bind(caches, inputs):
        for layer in (0, 1):
            step.attend(layer, q, kv, kv, 1.0, PLAIN)

    def attend_twice() -> None:
        with step.bind(caches, inputs):
            for _ in range(2):
                step.attend(1, q, kv, kv, 1.0, PLAIN)

    with pytest.raises(ConfigError, match=r"attend in the order \[1, 1\]"):
        attend_twice()
