"""Quantized models: greedy tokens equal those of a full-precision model with the dequantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import SCHEMES, Scheme, write_quantized
from quick_cases import diagonal
from safetensors.torch import load_file, save_file
from stand_in_gpu import installed
from torch import Tensor

from quire.kernels.native.library import is_available
from quire.kernels.quantized_linear import QuantizedWeight, dequantize
from quire.proto.errors import ConfigError, ModelLoadError
from quire.proto.model.quantization import MODELOPT_BLOCK, Quantization, read_quantization
from quire.proto.model.registry import check_supported
from quire.worker.comm.communicator import SingleRank
from quire.worker.rank.runner import ModelRunner
from quire.worker.weights import linear_weight
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.device_writer import DeviceWriter
from quire.worker.weights.linear_weight import PackedCodes, PlainWeight, read_linear
from quire.worker.weights.quantized_layouts import read_quantized
from quire.worker.weights.weight_slice import WeightSlice

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Scheme |-> the quantized model and its twin of dequantized weights."""
    source = make_model("qwen2", seed=3)
    return {
        name: write_quantized(source, tmp_path_factory.mktemp("quantized"), scheme)
        for name, scheme in SCHEMES.items()
    }


def scheme_of(folder: Path, engine_config: Any) -> Quantization:
    found = read_quantization(engine_config(folder).model)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "modelopt-fp8", "modelopt-fp8-blocks"])
def test_modelopt_has_its_quantization_in_either_file(
    name: str, folders: Any, engine_config: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders[name][0], folder)
    config = json.loads((folder / "config.json").read_text())
    stored = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    own = {"producer": stored.pop("producer"), "quantization": {"quant_algo": stored["quant_algo"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert scheme_of(folder, engine_config) == scheme_of(folders[name][0], engine_config)


def test_other_algorithms_of_modelopt_are_refused(engine_config: Any, folders: Any) -> None:
    model = engine_config(folders["modelopt-fp8"][0]).model
    stored = model.hf["quantization_config"] | {"quant_algo": "W4A8_AWQ"}
    with pytest.raises(
        ConfigError, match="quant_algo 'W4A8_AWQ' is not supported; supported: FP8, FP8_PER_CH"
    ):
        read_quantization(replace(model, hf=model.hf | {"quantization_config": stored}))
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "W4A8_AWQ"}}
    stored |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(ConfigError, match="quant_algo of a layer 'W4A8_AWQ' is not supported"):
        read_quantization(replace(model, hf=model.hf | {"quantization_config": stored}))


def test_layers_of_modelopt_may_differ_in_precision(folders: Any, make_engine: Any, tmp_path: Path) -> None:
    """Attention in FP8 and the other layers in NVFP4, or in full precision."""
    generated = []
    for twin in (False, True):
        folder = tmp_path / f"mixed-{twin}"
        shutil.copytree(folders["modelopt-fp8"][twin], folder)
        attention, others = (
            load_file(folders[name][twin] / "model.safetensors")
            for name in ("modelopt-fp8", "modelopt-nvfp4")
        )
        others = {name: tensor for name, tensor in others.items() if "self_attn" not in name}
        mixed = {name: tensor for name, tensor in attention.items() if "self_attn" in name} | others
        save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        if not twin:
            layers = {
                f"model.layers.{index}.{layer}": {"quant_algo": algorithm}
                for index in range(3)
                for layer, algorithm in (("self_attn.q_proj", "FP8"), ("mlp.down_proj", "NVFP4"))
            }
            config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
        generated += make_engine(folder, 2, num_blocks=16).greedy([[7, 21, 300, 45]], 12)
    assert generated[0] == generated[1]


def test_scales_of_modelopt_per_block_are_found_for_any_slice(tmp_path: Path) -> None:
    codes, scales = torch.randn(300, 512).to(torch.float8_e4m3fn), torch.rand(3, 4) + 0.5
    tensors = {"x.weight": codes, "x.weight_scale": scales[:, None, :, None].contiguous()}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = Quantization("modelopt", block_shape=MODELOPT_BLOCK)
    expected = codes.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)
    for dim, start, length in ((0, 100, 150), (0, 256, 44), (1, 64, 256), (1, 100, 200)):
        found = read_quantized(
            Checkpoint(tmp_path), WeightSlice("x", (300, 512), dim, start, length), quantization, CPU
        )
        assert found is not None
        torch.testing.assert_close(dequantize(found).float(), expected.narrow(dim, start, length))


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "float8-blocks", "awq", "gptq-symmetric", "packed"])
def test_experts_keep_their_codes(name: str, folders: Any, engine_config: Any) -> None:
    quantized, _ = folders[name]
    part = WeightSlice("model.layers.0.mlp.down_proj", (64, 128), 1, 0, 128)
    arguments = Checkpoint(quantized), [part], torch.bfloat16, CPU, scheme_of(quantized, engine_config)
    kept = read_linear(*arguments, keep_codes=True)
    assert isinstance(kept, PackedCodes)
    plain = read_linear(*arguments)
    assert isinstance(plain, PlainWeight)
    assert kept.matrix.nbytes < plain.packed.weight.nbytes * 0.7
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(kept.multiply(x), plain.multiply(x))


@pytest.mark.parametrize("name", SCHEMES)
def test_read_quantized_slices_equal_written_weights(name: str, folders: Any, engine_config: Any) -> None:
    quantized, twin = folders[name]
    checkpoint, quantization = Checkpoint(quantized), scheme_of(quantized, engine_config)
    expected = load_file(twin / "model.safetensors")
    for layer, shape in (("self_attn.q_proj", (128, 64)), ("mlp.down_proj", (64, 128))):
        layer = f"model.layers.0.{layer}"
        for dim in range(2):
            for num_ranks in (1, 2, 4):
                length = shape[dim] // num_ranks
                parts = [WeightSlice(layer, shape, dim, rank * length, length) for rank in range(num_ranks)]
                found = [read_quantized(checkpoint, part, quantization, CPU) for part in parts]
                if "down_proj" in layer and name == "some-layers-left":
                    assert found == [None] * num_ranks
                    continue
                together = torch.cat([dequantize(weight) for weight in found if weight], dim)
                torch.testing.assert_close(together, expected[f"{layer}.weight"], rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_unpacked_on_the_gpu(
    name: str, folders: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read by several threads through page-locked memory, and no copy of them waits for the GPU."""
    checkpoint, quantization = Checkpoint(folders[name][0]), scheme_of(folders[name][0], engine_config)
    parts = [
        WeightSlice(f"model.layers.0.{layer}", shape, dim, shape[dim] // 2, shape[dim] // 2)
        for layer, shape in (("self_attn.q_proj", (128, 64)), ("mlp.down_proj", (64, 128)))
        for dim in range(2)
    ]
    expected = [read_quantized(checkpoint, part, quantization, CPU) for part in parts]
    written: list[int] = []
    write = DeviceWriter.write

    def note(writer: DeviceWriter, own: Any) -> None:
        own = list(own)
        written.extend(part.num_bytes for part in own)
        write(writer, own)

    monkeypatch.setattr(DeviceWriter, "write", note)
    with installed(monkeypatch):
        for part, weight in zip(parts, expected, strict=True):
            written.clear()
            found = read_quantized(checkpoint, part, quantization, torch.device("cuda", 0))
            assert (found is None) == (weight is None)
            if found is None or weight is None:
                continue
            assert sum(written) >= weight.codes.nbytes
            for ours, theirs in zip(fields_of(found), fields_of(weight), strict=True):
                assert torch.equal(ours, theirs)
        checkpoint.close()


def fields_of(weight: QuantizedWeight) -> list[Tensor]:
    """Return the tensors of a weight, as bytes in host memory."""
    tensors = weight.codes.view(torch.uint8), weight.scales.float(), weight.zeros, weight.group_index
    return [tensor.cpu() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize(("name", "tp"), diagonal(SCHEMES, [1, 2]))
def test_quantized_model_gives_tokens_of_dequantized_weights(
    name: str, tp: int, folders: Any, make_engine: Any
) -> None:
    prompts = [[7, 21, 300, 45, 12], [101, 9]]
    generated = []
    for folder in folders[name]:
        generated.append(make_engine(folder, tp, num_blocks=16).greedy(prompts, 12))
    assert generated[0] == generated[1]
    assert len(set(generated[0][0])) > 4


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "int8", "some-layers-left"])
def test_quantized_kernel_gives_tokens_of_dequantized_weights(
    name: str, folders: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights stay quantized as on a GPU; the kernel's PyTorch twin multiplies."""
    monkeypatch.setattr(linear_weight, "has_quantized_kernel", lambda weight: True)
    generated = []
    for folder in folders[name]:
        generated += make_engine(folder, 2, num_blocks=16).greedy([[7, 21, 300, 45, 12]], 10)
    assert generated[0] == generated[1]


def test_read_linear_returns_float8_weight_if_supported(
    folders: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, twin = folders["float8"]
    part = WeightSlice("model.layers.1.mlp.up_proj", (128, 64), 0, 64, 64)
    monkeypatch.setattr(linear_weight, "supports_float8_linear", lambda weight: weight.is_per_output)
    found = read_linear(
        Checkpoint(quantized), [part], torch.float32, CPU, scheme_of(quantized, engine_config)
    )
    assert isinstance(found, linear_weight.Float8Weight)
    x = torch.randn(3, 64)
    expected = read_linear(Checkpoint(twin), [part], torch.float32, CPU).multiply(x)
    error = (found.multiply(x) - expected).abs()
    assert 0 < error.max() < 0.2  # the activations are rounded to float8


def test_groups_split_across_ranks_give_same_tokens(
    make_model: Any, tmp_path: Path, make_engine: Any
) -> None:
    """Four ranks have 32 inputs of down_proj each, half of a group."""
    quantized, twin = write_quantized(make_model("llama", seed=3), tmp_path, Scheme("awq", group_len=64))
    tokens = []
    for folder in (quantized, twin):
        tokens += make_engine(folder, 4, num_blocks=16).greedy([[7, 21, 300, 45]], 12)
    assert tokens[0] == tokens[1]


def test_unaligned_slice_of_packed_words_raises_config_error(
    make_model: Any, tmp_path: Path, engine_config: Any, thread_group: Any
) -> None:
    source = make_model("llama", intermediate_size=112)
    quantized, _ = write_quantized(source, tmp_path, Scheme("gptq", group_len=None))
    comm = thread_group(4).communicator(1)
    with pytest.raises(
        ConfigError, match=r"gate_proj: a rank's slice from 28 to 56 is not aligned to words of 8"
    ):
        ModelRunner(engine_config(quantized, 4), comm)


@pytest.mark.parametrize("method", ["int8", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_online_quantization_equals_quantized_checkpoint(
    method: str, tp: int, make_model: Any, tmp_path: Path, engine_config: Any, thread_group: Any
) -> None:
    """Each rank's layer equals that of a compressed checkpoint with the same rounding."""
    source = make_model("llama", seed=3)
    scheme = Scheme("codes", bits=8, group_len=None, symmetric=True, is_float=method == "fp8")
    quantized, _ = write_quantized(source, tmp_path, scheme)
    stored = scheme_of(quantized, engine_config)
    shape, x = (64, 128), torch.randn(3, 128 // tp)
    for rank in range(tp):
        part = WeightSlice("model.layers.2.mlp.down_proj", shape, 1, rank * 128 // tp, 128 // tp)
        online = read_linear(Checkpoint(source), [part], torch.float32, CPU, Quantization(method))
        read = read_linear(Checkpoint(quantized), [part], torch.float32, CPU, stored)
        # The scales of that checkpoint have 11 bits.
        torch.testing.assert_close(online.multiply(x), read.multiply(x), rtol=2e-2, atol=2e-2)
        plain = read_linear(Checkpoint(source), [part], torch.float32, CPU)
        error = (online.multiply(x) - plain.multiply(x)).abs().max()
        assert 1e-4 < error < (0.05 if method == "int8" else 0.2)


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_online_quantization_gives_same_tokens_on_any_number_of_ranks(
    method: str, make_model: Any, make_engine: Any
) -> None:
    tokens = []
    for tp in (1, 2, 4):
        engine = make_engine(make_model("llama", seed=3), tp, num_blocks=16, quantization=method)
        tokens += engine.greedy([[7, 21, 300, 45]], 12)
    assert tokens[0] == tokens[1] == tokens[2]


def test_projections_with_different_quantization_are_stacked(
    make_model: Any, tmp_path: Path, engine_config: Any
) -> None:
    source = make_model("llama")
    quantized, twin = write_quantized(source, tmp_path, Scheme("awq", ignored="k_proj"))
    names = [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    sizes = (128, 64, 64)
    parts = [WeightSlice(name, (size, 64), 0, 0, size) for name, size in zip(names, sizes, strict=True)]
    found = read_linear(Checkpoint(quantized), parts, torch.float32, CPU, scheme_of(quantized, engine_config))
    expected = read_linear(Checkpoint(twin), parts, torch.float32, CPU)
    x, bias = torch.randn(5, 64), torch.randn(256)
    torch.testing.assert_close(found.multiply(x, bias), expected.multiply(x, bias), rtol=1e-4, atol=1e-4)


DOWN = "model.layers.0.mlp.down_proj"


def index_99(index: Tensor) -> Tensor:
    return index.index_fill(0, torch.tensor(5), 99)


@pytest.mark.parametrize(
    ("scheme", "name", "change", "words"),
    [
        ("gptq", "bias", lambda _: torch.ones(64), rf"{DOWN}\.bias"),
        ("gptq", "g_idx", index_99, "down_proj' has group indices from 0 to 99, must be 0 to 3"),
        ("awq", "qweight", Tensor.long, r"qweight' is stored as torch\.int64, expected torch\.int32"),
        # Tools write such checkpoints if they are not told to compress them.
        ("int8", "weight", Tensor.float, "weight' is stored as torch.float32 beside its scales"),
        # Some gptq tools store a bias of zeros for every layer.
        ("gptq", "bias", lambda _: torch.zeros(64), ""),
    ],
    ids=["bias", "group", "dtype", "full precision", "zero bias"],
)
def test_damaged_tensor_raises_model_load_error(
    scheme: str,
    name: str,
    change: Callable[[Any], Tensor],
    words: str,
    folders: Any,
    tmp_path: Path,
    engine_config: Any,
) -> None:
    folder = Path(shutil.copytree(folders[scheme][0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.{name}"] = change(tensors.get(f"{DOWN}.{name}"))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=words) if words else nullcontext():
        ModelRunner(engine_config(folder), SingleRank())


def test_layers_of_gptq_may_have_other_bits_and_groups(
    folders: Any, make_model: Any, tmp_path: Path, engine_config: Any
) -> None:
    source = make_model("qwen2", seed=3)
    other, twin = write_quantized(source, tmp_path, Scheme("gptq", bits=8, group_len=16))
    layer = DOWN
    (tmp_path / "mixed").mkdir()
    tensors = load_file(folders["gptq"][0] / "model.safetensors")
    tensors |= {
        name: tensor
        for name, tensor in load_file(other / "model.safetensors").items()
        if name.startswith(layer)
    }
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    quantization = scheme_of(folders["gptq"][0], engine_config)
    for start in (0, 64):
        part = WeightSlice(layer, (64, 128), 1, start, 64)
        found = read_quantized(Checkpoint(tmp_path / "mixed"), part, quantization, CPU)
        assert found is not None
        expected = load_file(twin / "model.safetensors")[f"{layer}.weight"][:, start : start + 64]
        torch.testing.assert_close(dequantize(found), expected, rtol=1e-6, atol=1e-7)


def test_block_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    codes = torch.randn(32, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 0.25], [2.0, 8.0]])
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = Quantization("float8", block_shape=(16, 16))
    found = read_quantized(Checkpoint(tmp_path), WeightSlice("x", (32, 32), 0, 8, 16), quantization, CPU)
    assert found is not None
    expected = codes.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(dequantize(found).float(), expected[8:24])


@pytest.mark.parametrize(
    "part", [WeightSlice("x", (48, 128), 0, 16, 32), WeightSlice("x", (48, 128), 1, 64, 64)]
)
def test_experts_of_float8_checkpoints_may_be_float4(part: WeightSlice, tmp_path: Path) -> None:
    """As those of DeepSeek-V4: the lower half of a byte is the first of two numbers."""
    codes, exponents = torch.randint(0, 16, (48, 128)), torch.randint(-9, 9, (48, 4))
    tensors = {
        "x.weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8),
        "x.weight_scale_inv": exponents.float().exp2().to(torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = Quantization("float8", block_shape=(128, 128), has_float4_experts=True)
    found = read_quantized(Checkpoint(tmp_path), part, quantization, CPU)
    assert found is not None
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes & 7]
    expected = magnitudes * (1 - 2 * (codes >> 3)) * exponents.float().exp2().repeat_interleave(32, 1)
    rows, columns = (slice(start, start + length) for start, length in (part.outputs, part.inputs))
    assert torch.equal(dequantize(found), expected[rows, columns])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes' is not supported .*; supported: gptq, awq"),
        ({"quant_method": "gguf"}, r"'gguf' is not supported \(take the model in safetensors"),
        ({"quant_method": "quark"}, "'quark' is not supported; supported: gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "gptq bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq version 'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "cannot be read: ValueError: group size 0"),
        ({"quant_method": "gptq"}, "quantization_config cannot be read: KeyError: 'bits'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "fp8 expert_dtype 'fp6' is not supported; supported: fp8"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "cannot be read: ValueError: block size 0 x 1"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "marlin-24"}}},
         "compressed-tensors format 'marlin-24' is not supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"a": {"weights": {"type": "int", "num_bits": 2}}}}, r"weights \('int', 2\)"),
        ([1], "its quantization_config is not a JSON object"),
        ("gptq", "its quantization_config is not a JSON object"),
        ({"quant_method": ["gptq"]}, r"method \['gptq'\] is not supported; supported: gptq"),
        ({"quant_method": "gptq", "bits": 4.0}, "gptq bits 4.0 is not supported"),
        ({"quant_method": "gptq", "bits": 4, "group_size": True}, "cannot be read: ValueError: group size True"),
        ({"quant_method": "fp8", "weight_block_size": [float("inf"), 1]}, "cannot be read: OverflowError"),
        ({"quant_method": "fp8", "weight_block_size": []}, "cannot be read: ValueError"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": [1]},
         "cannot be read: AttributeError"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
         "cannot be read: KeyError: 'quant_algo'"),
    ],
)  # fmt: skip
def test_unsupported_quantization_config_raises_config_error(
    change: Any, words: str, make_model: Any, engine_config: Any
) -> None:
    model = engine_config(make_model("llama")).model
    model = replace(model, hf=model.hf | {"quantization_config": change})
    with pytest.raises(ConfigError, match=words):
        check_supported(model, 1)


def test_online_quantization_of_quantized_checkpoint_raises_config_error(
    folders: Any, engine_config: Any
) -> None:
    model = replace(engine_config(folders["awq"][0]).model, quantization="int8")
    with pytest.raises(ConfigError, match=r"is quantized already \(awq\); leave the option out"):
        check_supported(model, 1)


def test_unknown_quantization_option_raises_config_error(make_model: Any, engine_config: Any) -> None:
    model = replace(engine_config(make_model("llama")).model, quantization="int3")
    with pytest.raises(ConfigError, match="quantization is 'int3', must be int8 or fp8"):
        check_supported(model, 1)


@pytest.mark.parametrize(
    ("layout", "word"), [("gptq", 0x76543210), ("packed", 0x76543210), ("awq", 0x75316420)]
)
def test_packed_word_has_documented_bit_order(layout: str, word: int, tmp_path: Path) -> None:
    """The word of the numbers 0 to 7 as each tool packs it: adjacent inputs, or outputs in AWQ's order."""
    words, one = torch.tensor([[word]], dtype=torch.int32), torch.ones(8, 8).half()
    zeros = torch.zeros(8, 1, dtype=torch.int32)
    tensors = {
        "gptq": {
            "qweight": words.repeat(1, 8),
            "qzeros": zeros,
            "scales": one,
            "g_idx": torch.arange(8).int(),
        },
        "awq": {"qweight": words.repeat(8, 1), "qzeros": zeros, "scales": one},
        "packed": {"weight_packed": words.repeat(8, 1), "weight_scale": one},
    }[layout]
    save_file(
        {f"x.{key}": tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    quantization = Quantization("compressed" if layout == "packed" else layout, bits=4, group_len=1)
    found = read_quantized(Checkpoint(tmp_path), WeightSlice("x", (8, 8), 0, 0, 8), quantization, CPU)
    assert found is not None
    numbers = torch.arange(8.0).expand(8, 8) - (8 if layout == "packed" else 0)
    assert torch.equal(dequantize(found), numbers.t() if layout == "awq" else numbers)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_packed_zero_points_of_one_word_are_read(num_groups: int, tmp_path: Path) -> None:
    """Eight outputs, as of a layer with a number per head."""
    zeros = torch.arange(8).expand(num_groups, 8) + torch.arange(num_groups)[:, None]
    words = sum(zeros[:, output] << 4 * output for output in range(8))
    tensors = {
        "weight_packed": torch.zeros(8, num_groups, dtype=torch.int32),
        "weight_scale": torch.ones(8, num_groups),
        "weight_zero_point": torch.as_tensor(words).view(torch.int32)[::2].view(1, -1),
    }
    save_file(
        {f"x.{key}": tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    part, quantization = WeightSlice("x", (8, 8 * num_groups), 0, 0, 8), Quantization("compressed", bits=4)
    found = read_quantized(Checkpoint(tmp_path), part, quantization, CPU)
    assert found is not None
    assert torch.equal(dequantize(found), -zeros.t().repeat_interleave(8, dim=1).float())


def test_groups_that_do_not_divide_the_inputs_raise_model_load_error(tmp_path: Path) -> None:
    """Their length is not stored: it was guessed, and all but the first group had wrong scales."""
    tensors = {
        "x.weight_packed": torch.zeros(8, 5, dtype=torch.int32),
        "x.weight_scale": torch.ones(8, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    part, quantization = WeightSlice("x", (8, 40), 0, 0, 8), Quantization("compressed", bits=4)
    with pytest.raises(ModelLoadError, match="3 groups, which do not divide its 40 inputs"):
        read_quantized(Checkpoint(tmp_path), part, quantization, CPU)
