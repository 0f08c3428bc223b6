"""The whole worker on a stand-in GPU, which separates host and device memory and knows streams and recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import triton_device
from fakes import small_config
from kernel_references import find_reference
from stand_in_gpu import (
    StandInGpu,
    Stream,
    StreamError,
    current_gpu,
    installed,
    is_installed,
)
from torch import Tensor

from quire.kernels import decode_splits, dispatch
from quire.kernels.paged_attention import paged_decode_attention
from quire.kernels.quantized_linear import (
    FLOAT8,
    QuantizedWeight,
    float8_linear,
    quantize,
    supports_float8_linear,
)
from quire.proto.errors import RankFailed
from quire.proto.step import RowLogitsProcessors, RowSampling
from quire.worker import attention
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.memory import host_to_device
from quire.worker.memory.cache_engine import CacheEngine
from quire.worker.memory.device_to_host import HostCopy
from quire.worker.memory.host_to_device import to_device
from quire.worker.models.llama.decoder import Decoder
from quire.worker.sampling import sampler
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.sampling_table import SamplingTable
from quire.worker.step import batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
assert triton_device

DEVICE = torch.device("cuda", 0)
GREEDY = RowSampling(temperature=0.0)
SAMPLED = RowSampling(temperature=0.8, seed=1)
KEPT = RowSampling(temperature=1.1, seed=2, top_k=20, top_p=0.9)
PROCESSED = RowSampling(
    seed=3, logits_processors=RowLogitsProcessors(2, 1.5, 0.5, 0.25, ((7, 2.0),), ((9,), (8, 9, 10)))
)
REPORTED = RowSampling(temperature=0.0, logprobs=2)
PROMPTS = [[5, 17, 99, 3, 42, 7, 11], [8], list(range(30, 42)), [8, 9], [3, 200, 9]]
# Two cache groups, and sequences of several windows.
TWO_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
GROUPS: dict[str, Any] = {"model": TWO_LAYERS, "block_size": 4}


class StepKernels:
    """Triton's kernels for steps, and their references for the preparation of the engine, which saves 15 s.

    Attributes:
        is_warm: the engine is prepared.
    """

    def __init__(self) -> None:
        self.is_warm = False

    def find(self, module: str, name: str) -> Callable[..., Any]:
        reference = find_reference(module, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            if not self.is_warm:
                return reference(*args, **kwargs)
            return getattr(import_module(f"quire.kernels.gpu.{module}"), name)(*args, **kwargs)

        return launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with installed(monkeypatch) as gpu:
        yield gpu


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "qwen3_moe", "stand_in": find_reference},
        {"kind": "deepseek_v3", "stand_in": find_reference},
        {
            "kind": "glm_moe_dsa",
            "stand_in": find_reference,
            "model": {"num_hidden_layers": 2, "index_topk": 5},
        },
        {"kind": "gpt_oss", "stand_in": find_reference},
        pytest.param({"stand_in": None}, marks=pytest.mark.slow),
        pytest.param({"cuda_graphs": False}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.slow),
        {"kind": "mixtral", "quantization": "int8", "stand_in": find_reference},
        {"kind": "gemma2", "stand_in": find_reference, **GROUPS},
        {"pp": 2, "stand_in": find_reference, "model": {"num_hidden_layers": 2}},
        pytest.param(
            {"pp": 3, "stand_in": find_reference, "model": {"num_hidden_layers": 3}, "cuda_graphs": False},
            marks=pytest.mark.slow,
        ),
        pytest.param({"kind": "gemma2", **GROUPS}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(
        key if value is find_reference else f"{key}={value}"
        for key, value in settings.items()
        if value is not TWO_LAYERS
    ),
)
def test_worker_gives_tokens_of_cpu(
    make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Load, profile, allocate, prefill, decode with graphs, sample, and close."""
    settings = {
        "kind": "llama",
        "stand_in": (kernels := StepKernels()).find,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        **settings,
    }
    kind, stand_in = settings.pop("kind"), settings.pop("stand_in")
    folder = make_model(
        kind, **{"num_hidden_layers": 1, "num_key_value_heads": 2, **settings.pop("model", {})}
    )
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)

    def generate(**more: Any) -> list[list[int]]:
        samplings = (GREEDY, SAMPLED, KEPT, PROCESSED, REPORTED)
        sequences = [planned(list(prompt), 4, each) for prompt, each in zip(PROMPTS, samplings, strict=True)]
        engine = make_engine(folder, **{**settings, **more})
        if is_installed():
            current_gpu().num_syncs.clear()
            kernels.is_warm = True
        engine.generate(sequences, chunk_len=8)
        engine.close()
        return [sequence.generated for sequence in sequences]

    expected = generate()
    with installed(monkeypatch, stand_in=stand_in) as gpu:
        assert generate(device="cuda") == expected
        # Steps wait for nothing but their tokens.
        assert set(gpu.num_syncs) == {"event.synchronize"}
        assert (gpu.num_replays > 0) == settings.get("cuda_graphs", True)
        assert gpu.allocated == 0


@pytest.mark.parametrize(("cuda_graphs", "expected"), [(True, (4, 0)), (False, (0, 3))])
def test_replayed_steps_split_no_decodes(
    make_model: Any,
    make_engine: Any,
    planned: Any,
    monkeypatch: pytest.MonkeyPatch,
    cuda_graphs: bool,
    expected: tuple[int, int],
) -> None:
    """The graph splits them, so that doing it before would be lost. Steps: a prompt, and three decodes."""
    num_splits = [0]
    split = decode_splits.split_decodes

    def count(*args: Any) -> Any:
        num_splits[0] += 1
        return split(*args)

    monkeypatch.setattr(attention, "split_decodes", count)
    folder = make_model("llama", num_hidden_layers=1, num_key_value_heads=2)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "cuda_graphs": cuda_graphs}
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        engine = make_engine(folder, device="cuda", **settings)
        num_splits[0] = gpu.num_replays = 0
        engine.generate([planned([5, 17, 99, 3], 4, GREEDY)])
        assert (gpu.num_replays, num_splits[0]) == expected


def test_float8_layers_of_a_gpu_sum_fast(gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the CPU's numbers, and no op waits."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weight = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), FLOAT8)
    settings: list[dict[str, Any]] = []
    multiply = torch._scaled_mm

    def record(*args: Any, **kwargs: Any) -> Any:
        settings.append(kwargs)
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: False)
    on_device = QuantizedWeight(weight.codes.to(DEVICE), weight.scales.to(DEVICE))
    assert supports_float8_linear(on_device)
    found = float8_linear(x.to(DEVICE), on_device)
    assert set(gpu.num_syncs) == {"to_device"}, "of the inputs"
    assert [each["use_fast_accum"] for each in settings] == [True]
    torch.testing.assert_close(found.cpu(), float8_linear(x, weight), atol=0.1, rtol=0.02)


class Twice(SingleRank):
    """Two ranks whose tensors are the same."""

    size = 2

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack((tensor, tensor))


def test_truncated_sampling_of_two_ranks_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wide nucleus, for which a rank's candidates do not suffice, and in parts of two rows."""
    monkeypatch.setattr(sampler, "MAX_GATHERED_ROWS", 2)
    local = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    table = SamplingTable(4, 400)
    wide = RowSampling(top_p=0.99, temperature=3.0, seed=1)
    for row, sampling in enumerate(
        (wide, RowSampling(top_k=5), RowSampling(top_p=0.5), RowSampling(min_p=0.1))
    ):
        table.put(row, sampling)
    rows, lens = np.arange(4, dtype=np.int32), np.full(4, 7, dtype=np.int32)
    whole = Sampler(Shard(0, 1, 400), SingleRank(), torch.device("cpu"))
    expected, _ = whole.sample(torch.cat((local, local), dim=1), table, rows, lens)
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        on_device = to_device(local.numpy(), DEVICE, torch.float32)
        gpu.num_syncs.clear()
        sharded = Sampler(Shard(0, 2, 400), Twice(), DEVICE)
        found, _ = sharded.sample(on_device, table, rows, lens)
        assert not gpu.num_syncs
        assert found.cpu().tolist() == expected.tolist()


def test_recorded_sampling_of_two_ranks_gives_the_same_tokens(
    thread_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, whole distributions and truncated rows together, whose candidates suffice."""
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    table = SamplingTable(5, 400)
    kinds = GREEDY, SAMPLED, RowSampling(top_k=5), RowSampling(top_p=0.5, seed=4), RowSampling(min_p=0.1)
    for row, sampling in enumerate(kinds):
        table.put(row, sampling)
    rows, lens = np.arange(5, dtype=np.int32), np.full(5, 7, dtype=np.int32)
    whole = Sampler(Shard(0, 1, 400), SingleRank(), torch.device("cpu"))
    expected, _ = whole.sample(logits, table, rows, lens)
    with installed(monkeypatch, stand_in=find_reference):
        group = thread_group(2)

        def sample(rank: int) -> tuple[list[int], list[int]]:
            shard = Shard(rank, 2, 400)
            sampler = Sampler(shard, group.communicator(rank), DEVICE)
            local = to_device(logits[:, shard.start : shard.end].numpy(), DEVICE, torch.float32)
            parameters = table.gather(rows, lens, DEVICE)
            is_truncated = to_device(table.filtered, DEVICE, torch.bool)
            together = sampler.sample_recorded(local, parameters, is_truncated)
            return together.cpu().tolist(), sampler.sample_recorded(local, parameters, None).cpu().tolist()

        for together, plain in group.run(sample, range(2)):
            assert together == expected.tolist()
            assert plain[:2] == together[:2]


def break_device(patch: pytest.MonkeyPatch) -> None:
    """Leave the inputs of a step on the host."""
    patch.setattr(
        batch, "to_device_together", lambda arrays, device: [torch.from_numpy(each) for each in arrays]
    )


def break_copy(patch: pytest.MonkeyPatch) -> None:
    """Read the tokens before the device has copied them."""
    patch.setattr(HostCopy, "wait", lambda copy: [each.numpy() for each in copy._copies])


def break_recording(patch: pytest.MonkeyPatch) -> None:
    """Read a value in the step that is recorded, such as the longest length."""
    compute = paged_decode_attention

    def read_lens(q: Any, cache: Any, tables: Any, lens: Any, *rest: Any) -> Any:
        assert lens.max().item() >= 0
        return compute(q, cache, tables, lens, *rest)

    patch.setattr(attention, "paged_decode_attention", read_lens)


def break_stream(patch: pytest.MonkeyPatch) -> None:
    """Launch the model on a stream that waits for none."""
    forward, stream = Decoder.forward, Stream()

    def launch(*args: Any) -> Any:
        with current_gpu().on_stream(stream):
            return forward(*args)

    patch.setattr(Decoder, "forward", launch)


def break_sync(patch: pytest.MonkeyPatch) -> None:
    """Copy from memory that is not pinned, which makes the host wait in every step."""
    patch.setattr(host_to_device, "_send", lambda tensor, device: tensor.to(device))


@pytest.mark.parametrize(
    ("break_worker", "shown"),
    [
        (break_device, "mixes a tensor on the host"),
        (break_copy, "other tokens"),
        (break_recording, "no graph"),
        (break_stream, "is read before the stream that wrote it ends"),
        (break_sync, "the host waits: event.synchronize, to_device"),
    ],
)
def test_fault_of_the_worker_fails(
    make_model: Any,
    make_engine: Any,
    planned: Any,
    monkeypatch: pytest.MonkeyPatch,
    break_worker: Callable[[pytest.MonkeyPatch], None],
    shown: str,
) -> None:
    """Each class of mistakes, put into the worker, is noticed by what test_worker_gives_tokens_of_cpu checks."""
    folder = make_model("llama", num_hidden_layers=1, num_key_value_heads=2)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4}

    def generate(**more: Any) -> list[int]:
        sequence = planned([5, 17, 99, 3], 4, GREEDY)
        engine = make_engine(folder, **settings, **more)
        if is_installed():
            current_gpu().num_syncs.clear()
        engine.generate([sequence], chunk_len=8)
        tokens: list[int] = sequence.generated
        return tokens

    expected = generate()

    def find_problem() -> str:
        try:
            tokens = generate(device="cuda")
        except (AssertionError, RankFailed, RuntimeError) as error:
            return str(error)
        gpu = current_gpu()
        if tokens != expected:
            return "other tokens"
        if not gpu.num_replays:
            return "no graph"
        return f"the host waits: {', '.join(sorted(gpu.num_syncs))}"

    with installed(monkeypatch, stand_in=find_reference):
        assert find_problem() == "the host waits: event.synchronize"
    with monkeypatch.context() as patch:
        break_worker(patch)
        with installed(monkeypatch, stand_in=find_reference):
            assert shown in find_problem()


def make_cache(num_host_blocks: int = 4) -> CacheEngine:
    """Return a cache of 6 blocks on the device, block i filled with i."""
    config = small_config(num_host_blocks=num_host_blocks)
    cache = CacheEngine(config, 6, num_host_blocks, torch.float32, DEVICE)
    for layer in cache.layers:
        for block in range(6):
            layer.blocks[block].fill_(block)
    return cache


def test_swapped_blocks_come_back(gpu: StandInGpu) -> None:
    """Blocks 1 and 2 go to host memory and come back as 3 and 4; the host waits for neither."""
    cache = make_cache()
    cache.swap_out(torch.tensor([[1, 1], [2, 2]]))
    cache.swap_in(torch.tensor([[1, 3], [2, 4]]))
    cache.wait_for_swaps()
    assert not gpu.num_syncs
    torch.cuda.synchronize()
    held = [float(cache.layers[-1].blocks[block].mean().item()) for block in range(6)]
    assert held == [0.0, 1.0, 2.0, 1.0, 2.0, 5.0]
    assert cache.measure_swap_rates().blocks_per_s > 0


def test_write_that_does_not_wait_for_a_swap_fails(gpu: StandInGpu) -> None:
    cache = make_cache()
    cache.swap_out(torch.tensor([[1, 1]]))
    with pytest.raises(StreamError, match="is written while"):
        cache.layers[0].blocks[1].zero_()
    cache.wait_for_swaps()
    cache.layers[0].blocks[1].zero_()


def test_reset_rank_keeps_its_blocks_unless_another_one_is_new(
    make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new rank launches every kernel, in blocks of all ranks. Block 0 is scratch."""
    folder = make_model("llama", num_hidden_layers=1, num_key_value_heads=2)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with installed(monkeypatch, stand_in=find_reference):
        (runner,) = make_engine(folder, device="cuda", **settings).runners
        (layer,) = runner.memory.kv.cache.layers
        before = layer.blocks.fill_(7.0).cpu()[1:]
        runner.reset(has_new_ranks=False)
        assert torch.equal(layer.blocks.cpu()[1:], before)
        runner.reset(has_new_ranks=True)
        assert not torch.equal(layer.blocks.cpu()[1:], before)
