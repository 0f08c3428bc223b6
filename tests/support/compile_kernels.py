"""Compiles every Triton kernel for a GPU that need not be there: ``python compile_kernels.py 80``.

The wrappers are called on CPU tensors while launches are recorded instead of made; then each recorded kernel is
compiled for the compute capability with the types, the tile and the options that it would have been launched with.
Prints one line a kernel: name, bytes of shared memory. Fails where one needs more than the GPU has.
"""

from __future__ import annotations

import sys
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
    draw_from_all,
    draw_from_kept,
    logits,
    norm,
    paged_cache,
    paged_decode,
    paged_prefill,
    quantize_tokens,
    quantized_linear,
    rotate_and_store,
)
from quire.kernels.quantized_linear import QuantizedWeight

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
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
    block_tables.put_entries(tables, torch.zeros(5, 3, dtype=torch.int32))
    block_tables.map_slots(tables, ids, ids, 16)
    scores, ones = torch.zeros(3, 32000), torch.ones(3)
    keys = torch.zeros(3, 2, dtype=torch.int32)
    draw_from_all.draw_from_all(scores, ones, keys)
    draw_from_kept.draw_from_kept(scores, ones, ids, ones.double(), ones, keys)
    counts, words = torch.zeros(3, 32000, dtype=torch.int16), torch.zeros(3, 1000, dtype=torch.int32)
    logits.apply_penalties(scores, counts, words, ids, ones, ones, ones)
    logits.apply_bias(scores, ids, ids, ones)
    logits.apply_bitmask(scores, words, ids)


def launch_quantized_linear(capability: int) -> None:
    """Few, some and many tokens by weights of 8 and 4 bits; float8 where the GPU converts it."""
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
    q = rotate_and_store.rotate_and_store(heads, cache, slots, angles, angles, kv_scales=scales)
    half = angles[:, : head_dim // 2]
    norm_weights = weight, weight, 1e-6
    rotate_and_store.rotate_and_store(heads, cache, slots, half, half, *norm_weights, kv_scales=scales)
    rotate_and_store.rotate_and_store(heads, cache, slots, None, None, *norm_weights, kv_scales=scales)
    tables = torch.zeros(num_seqs, 32, dtype=torch.int32)
    lens = torch.full((num_seqs,), 32, dtype=torch.int32)
    splits = split_decodes(lens, 512)
    paged_decode.paged_decode_attention(q[:num_seqs], cache, tables, lens, 0.1, splits, variant, scales)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    for some in (q, q[: 2 * num_seqs]):
        paged_prefill.paged_prefill_attention(some, cache, tables, starts, lens, 0.1, variant, scales)


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> int:
    """Bytes of shared memory."""
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {
        name: kwargs.pop(name) for name in names if name in kwargs
    }
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, (name, parameter) in enumerate(zip(names, kernel.params, strict=True)):
        value = values[name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kwargs)
    return int(compiled.metadata.shared)


def main(capability: int) -> None:
    JITFunction.run = record
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)  # type: ignore[assignment]
    launch_everything()
    launch_quantized_linear(capability)
    for kernel, args, kwargs in launches:
        num_bytes = compile_launch(kernel, args, kwargs, capability)
        print(kernel.__name__, num_bytes)
        assert num_bytes <= SHARED_BYTES[capability], f"{kernel.__name__} needs {num_bytes} bytes"


if __name__ == "__main__":
    main(int(sys.argv[1]))
