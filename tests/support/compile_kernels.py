"""Compiles every Triton kernel for a compute capability, without such a GPU: ``python compile_kernels.py 80``.

The wrappers run on CPU tensors while launches are recorded instead of made. Each recorded kernel is then compiled
with the types, tiles and options of its launch. Prints one line per kernel: name, bytes of shared memory, bytes of
stack per thread. Fails if a kernel needs more shared memory than the GPU has, or if attention in a 16-bit type
spills registers to the stack.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quire.kernels.all_reduce_norm import NUM_SIGNALS, Peers
from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.decode_splits import split_decodes
from quire.kernels.gpu import (
    activation,
    all_reduce_norm,
    block_tables,
    fused_qk_norm_rope_kv_write,
    gumbel,
    norm,
    paged_cache,
    paged_decode,
    paged_prefill,
    quantize_tokens,
    quantized_linear,
    sample_full,
    sample_top_k_top_p,
    topk_tokens,
)
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from quire.kernels.quantized_linear import QuantizedWeight

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
# Bytes per thread that attention may spill: see kernels.gpu.tile_configs.
MAX_STACK_BYTES = 16
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}

launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []


def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    launches.append((kernel, args, kwargs))


def launch_everything() -> None:
    launch_attention(32, 8, 128, 16, torch.bfloat16)
    launch_attention(14, 2, 64, 32, torch.bfloat16)
    launch_attention(8, 8, 80, 16, torch.float16)
    launch_attention(4, 1, 256, 64, torch.bfloat16)
    launch_attention(32, 8, 128, 16, torch.float32)
    launch_attention(4, 1, 256, 64, torch.float32)
    everything = AttentionVariant(4096, 50.0, torch.zeros(8))
    launch_attention(8, 2, 96, 16, torch.bfloat16, AttentionVariant(window=4096))
    launch_attention(8, 2, 256, 16, torch.bfloat16, everything)
    launch_attention(32, 8, 128, 16, torch.bfloat16, stored=torch.float8_e4m3fn)
    launch_attention(8, 2, 256, 32, torch.bfloat16, everything, torch.float8_e4m3fn)
    launch_attention(8, 2, 64, 16, torch.float16, everything, torch.int8)
    launch_attention(8, 2, 128, 16, torch.float32, everything, torch.int8)
    x, weight = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    peers = Peers(1, [x, x], [torch.zeros(2 * NUM_SIGNALS, dtype=torch.int32)] * 2)
    all_reduce_norm.all_reduce_add_rms_norm(x, x, weight, 1e-5, peers)
    activation.silu_and_mul(x)
    activation.gelu_tanh_and_mul(x)
    ids = torch.zeros(3, dtype=torch.int64)
    paged_cache.copy_blocks(torch.zeros(2, 4, 2, 2, 16, 64), ids, ids)
    tables = torch.zeros(3, 64, dtype=torch.int32)
    block_tables.update_block_tables(tables, torch.zeros(5, 3, dtype=torch.int32))


def launch_sampler() -> None:
    """Launch the sampling kernels for all rows, and for some rows with logits processors."""
    logits, ones, ids = torch.zeros(3, 32000), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    keys = torch.zeros(3, 2, dtype=torch.int32)
    counts, words = torch.zeros(3, 32000, dtype=torch.int16), torch.zeros(3, 1000, dtype=torch.int32)
    biases = Biases(torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), torch.ones(5))
    penalties = Penalties(ids, counts, words, torch.ones(3, 3))
    gumbel.random_keys(ids, ids)
    for rows, logits_processors in (
        (None, None),
        (ids, LogitsProcessors(32000, biases, penalties, Masks(ids, words))),
    ):
        sample_full.sample_greedy(logits, 0, rows, logits_processors)
        sample_full.sample_full(logits, ones, keys, 0, rows, logits_processors)
        sample_top_k_top_p.sample_top_k_top_p(
            logits, ones, ids, ones.double(), ones, keys, rows, logits_processors
        )
        topk_tokens.topk_tokens(logits, 128, ones, rows, logits_processors)
        topk_tokens.topk_tokens(logits, 20, None, rows, logits_processors)


def launch_quantized_linear(capability: int) -> None:
    """Launch few, some and many tokens with weights of 8 and 4 bits, and float8 if the GPU converts it."""
    for num_tokens in (3, 40, 300):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, bias = torch.zeros(num_tokens, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
            groups, zeros = torch.zeros(32, 4096).half(), torch.zeros(32, 4096, dtype=torch.int16)
            index = torch.zeros(4096, dtype=torch.int32)
            int8 = torch.zeros(4096, 4096, dtype=torch.int8)
            int4 = torch.zeros(4096, 2048, dtype=torch.uint8)
            weights = [
                QuantizedWeight(int8, torch.zeros(1, 4096)),
                QuantizedWeight(int8, groups),
                QuantizedWeight(int4, groups, zeros),
                QuantizedWeight(int4, groups, zeros, index),
            ]
            if capability >= 89:
                weights.append(QuantizedWeight(int8.to(torch.float8_e4m3fn), groups))
            for weight in weights:
                quantized_linear.quantized_linear(x, weight, bias)
    if capability >= 89:
        tokens = torch.zeros(3, 4096, dtype=torch.bfloat16)
        quantize_tokens.quantize_tokens(tokens)
        norm.add_rms_norm_float8(tokens, tokens, tokens[0], 1e-5)


def launch_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    variant: AttentionVariant = PLAIN,
    stored: torch.dtype | None = None,
) -> None:
    num_seqs, num_tokens = 16, 2048
    heads = torch.zeros(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    cache = torch.zeros(32, 2, num_kv_heads, block_size, head_dim, dtype=stored or dtype)
    scales = None if stored is None else torch.zeros(cache.shape[:-1])
    angles, weight = torch.zeros(num_tokens, head_dim, dtype=dtype), torch.zeros(head_dim, dtype=dtype)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    q = fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        heads, cache, slots, angles, angles, kv_scales=scales
    )
    half = angles[:, : head_dim // 2]
    norm_weights = weight, weight, 1e-6
    fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        heads, cache, slots, half, half, *norm_weights, kv_scales=scales
    )
    fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        heads, cache, slots, None, None, *norm_weights, kv_scales=scales
    )
    tables = torch.zeros(num_seqs, 32, dtype=torch.int32)
    lens = torch.full((num_seqs,), 32, dtype=torch.int32)
    splits = split_decodes(lens, 512)
    paged_decode.paged_decode_attention(q[:num_seqs], cache, tables, lens, 0.1, splits, variant, scales)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    for some in (q, q[: 2 * num_seqs]):
        paged_prefill.paged_prefill_attention(some, cache, tables, starts, lens, 0.1, variant, scales)


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> Any:
    """Compile a recorded launch."""
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {
        name: kwargs.pop(name) for name in names if name in kwargs
    }
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, path: tuple[int, ...], is_constant: bool) -> Any:
        """Return Triton's type of an argument; fill `constants` and `attributes` with its specializations."""
        if isinstance(value, tuple):
            parts = [type_of(part, (*path, place), False) for place, part in enumerate(value)]
            return type(value)(*parts)
        if is_constant or value is None or (type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"

    signature = {
        name: type_of(values[name], (place,), parameter.is_constexpr)
        for place, (name, parameter) in enumerate(zip(names, kernel.params, strict=True))
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kwargs)


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of registers that a thread of a compiled kernel spills to its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def main(capability: int) -> None:
    JITFunction.run = record
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    launch_everything()
    launch_sampler()
    launch_quantized_linear(capability)
    for kernel, args, kwargs in launches:
        compiled = compile_launch(kernel, args, kwargs, capability)
        shared, stack = int(compiled.metadata.shared), stack_bytes(compiled.asm["cubin"])
        print(kernel.__name__, shared, stack)
        assert shared <= SHARED_BYTES[capability], f"{kernel.__name__} needs {shared} bytes"
        is_half = kernel.__name__.startswith("_attend") and args[0].dtype in (torch.bfloat16, torch.float16)
        assert not is_half or stack <= MAX_STACK_BYTES, f"{kernel.__name__} spills {stack} bytes"


if __name__ == "__main__":
    main(int(sys.argv[1]))
