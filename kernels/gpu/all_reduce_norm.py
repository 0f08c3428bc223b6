"""All-reduce, residual addition and RMSNorm in one launch, over memory that all GPUs can access."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..all_reduce_norm import BUFFER_ALIGNMENT, MAX_PROGRAMS, Peers

ALIGNMENT = tl.constexpr(BUFFER_ALIGNMENT)


@triton.jit
def _barrier(signal_addresses_ptr, signal, rank, SIZE: tl.constexpr):
    """Wait until this program has reached the signal on every rank, then reset the signals to 0.

    Writes that a rank made before the barrier are visible to all ranks after it.
    """
    tl.debug_barrier()
    offset = signal * SIZE
    for peer in tl.static_range(SIZE):
        remote = tl.load(signal_addresses_ptr + peer).to(tl.pointer_type(tl.int32)) + offset + rank
        while tl.atomic_cas(remote, 0, 1, sem="release", scope="sys") != 0:
            pass
    own = tl.load(signal_addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + offset
    for peer in tl.static_range(SIZE):
        while tl.atomic_cas(own + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit
def _find_buffer(buffer_addresses_ptr, rank, buffer_type):
    """Return a rank's buffer. The compiler cannot know how it is aligned, and would load 2 bytes at a time."""
    return tl.multiple_of(tl.load(buffer_addresses_ptr + rank).to(buffer_type), ALIGNMENT)


@triton.jit
def _load_sum(buffer_addresses_ptr, buffer_type, offsets, mask, SIZE: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the sum of a row of all ranks' inputs, [BLOCK_E] float32."""
    total = tl.zeros([BLOCK_E], tl.float32)
    for peer in tl.static_range(SIZE):
        buffer = _find_buffer(buffer_addresses_ptr, peer, buffer_type)
        total += tl.load(buffer + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _find_owner(row, program, num_programs, SIZE: tl.constexpr):
    """Return the rank that sums a row in the first of two shots; each rank has some rows of each program."""
    return (program + row // num_programs) % SIZE


# One variant for all ranks: two of them on one GPU would otherwise wait for each other, one in its kernel and one for
# the compiler.
@triton.jit(do_not_specialize=["num_rows", "rank"])
def _all_reduce_add_rms_norm(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    buffer_addresses_ptr,  # [SIZE]
    signal_addresses_ptr,  # [SIZE]
    rank,
    eps,
    num_rows,
    num_buffered,
    stride_x,
    stride_residual,
    SIZE: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # grid: (programs,)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_e = tl.arange(0, BLOCK_E)
    mask = offs_e < NUM_COLUMNS
    buffer_type = tl.pointer_type(x_ptr.dtype.element_ty)
    own_buffer = _find_buffer(buffer_addresses_ptr, rank, buffer_type)
    for row in range(program, num_rows, num_programs):
        x = tl.load(x_ptr + row * stride_x + offs_e, mask=mask, other=0.0)
        tl.store(own_buffer + row * NUM_COLUMNS + offs_e, x, mask=mask)
    _barrier(signal_addresses_ptr, 3 * program, rank, SIZE)
    offs_sums = num_buffered * NUM_COLUMNS + offs_e
    if TWO_SHOTS:
        for row in range(program, num_rows, num_programs):
            if _find_owner(row, program, num_programs, SIZE) == rank:
                offsets = row * NUM_COLUMNS + offs_e
                total = _load_sum(buffer_addresses_ptr, buffer_type, offsets, mask, SIZE, BLOCK_E)
                tl.store(own_buffer + row * NUM_COLUMNS + offs_sums, total, mask=mask)
        _barrier(signal_addresses_ptr, 3 * program + 1, rank, SIZE)
    weight = tl.load(weight_ptr + offs_e, mask=mask, other=0.0).to(tl.float32)
    for row in range(program, num_rows, num_programs):
        if TWO_SHOTS:
            owner = _find_owner(row, program, num_programs, SIZE)
            buffer = _find_buffer(buffer_addresses_ptr, owner, buffer_type)
            total = tl.load(buffer + row * NUM_COLUMNS + offs_sums, mask=mask, other=0.0).to(tl.float32)
        else:
            offsets = row * NUM_COLUMNS + offs_e
            total = _load_sum(buffer_addresses_ptr, buffer_type, offsets, mask, SIZE, BLOCK_E)
        residual_ptrs = residual_ptr + row * stride_residual + offs_e
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptrs, total, mask=mask)
        factor = 1.0 / tl.sqrt(tl.sum(total * total, 0) / NUM_COLUMNS + eps)
        tl.store(out_ptr + row * NUM_COLUMNS + offs_e, total * factor * weight, mask=mask)
    # The next op overwrites the buffers.
    _barrier(signal_addresses_ptr, 3 * program + 2, rank, SIZE)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """See kernels.all_reduce_norm. In one shot the first rounding is that of the sum with the residual."""
    num_rows, num_columns = x.shape
    own_buffer = peers.buffers[peers.rank]
    assert x.stride(1) == residual.stride(1) == 1
    assert num_rows <= peers.max_tokens
    assert own_buffer.is_contiguous()
    assert own_buffer.shape[2] == num_columns
    assert own_buffer.dtype == x.dtype
    block = triton.next_power_of_2(num_columns)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    _all_reduce_add_rms_norm[(min(num_rows, MAX_PROGRAMS),)](
        x, residual, weight, out, peers.buffer_addresses, peers.signal_addresses, peers.rank, eps, num_rows,
        own_buffer.shape[1], x.stride(0), residual.stride(0), SIZE=peers.size,
        TWO_SHOTS=num_rows >= peers.two_shots_from, NUM_COLUMNS=num_columns,
        BLOCK_E=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
