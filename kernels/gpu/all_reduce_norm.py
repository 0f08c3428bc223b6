"""All-reduce, residual addition and RMSNorm in one launch, over memory that GPUs share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..all_reduce_norm import MAX_PROGRAMS, Peers


@triton.jit
def _meet(signal_addresses_ptr, signal, rank, SIZE: tl.constexpr):
    """Returns when the program has come to this signal on every rank; all are 0 again then.

    What ranks wrote before they came is seen by all afterwards.
    """
    tl.debug_barrier()
    place = signal * SIZE
    for peer in tl.static_range(SIZE):
        theirs = tl.load(signal_addresses_ptr + peer).to(tl.pointer_type(tl.int32)) + place + rank
        while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
            pass
    own = tl.load(signal_addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + place
    for peer in tl.static_range(SIZE):
        while tl.atomic_cas(own + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit
def _all_reduce_add_rms_norm(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    part_addresses_ptr,  # [SIZE]
    signal_addresses_ptr,  # [SIZE]
    rank,
    eps,
    num_rows,
    stride_x,
    stride_residual,
    SIZE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # grid: (programs,)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_e = tl.arange(0, BLOCK_E)
    mask = offs_e < NUM_COLUMNS
    part_type = tl.pointer_type(x_ptr.dtype.element_ty)
    own_part = tl.load(part_addresses_ptr + rank).to(part_type)
    for row in range(program, num_rows, num_programs):
        x = tl.load(x_ptr + row * stride_x + offs_e, mask=mask, other=0.0)
        tl.store(own_part + row * NUM_COLUMNS + offs_e, x, mask=mask)
    _meet(signal_addresses_ptr, 2 * program, rank, SIZE)
    weight = tl.load(weight_ptr + offs_e, mask=mask, other=0.0).to(tl.float32)
    for row in range(program, num_rows, num_programs):
        total = tl.zeros([BLOCK_E], tl.float32)
        for peer in tl.static_range(SIZE):
            part = tl.load(part_addresses_ptr + peer).to(part_type)
            total += tl.load(part + row * NUM_COLUMNS + offs_e, mask=mask, other=0.0).to(tl.float32)
        residual_ptrs = residual_ptr + row * stride_residual + offs_e
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptrs, total, mask=mask)
        factor = 1.0 / tl.sqrt(tl.sum(total * total, 0) / NUM_COLUMNS + eps)
        tl.store(out_ptr + row * NUM_COLUMNS + offs_e, total * factor * weight, mask=mask)
    # Parts are overwritten by whatever comes next.
    _meet(signal_addresses_ptr, 2 * program + 1, rank, SIZE)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """See kernels.all_reduce_norm; nothing is rounded before the sum with the residual is."""
    num_rows, num_columns = x.shape
    own_part = peers.buffers[peers.rank]
    assert x.stride(1) == residual.stride(1) == 1
    assert num_rows <= peers.max_tokens
    assert own_part.is_contiguous()
    assert own_part.shape[1] == num_columns
    assert own_part.dtype == x.dtype
    block = triton.next_power_of_2(num_columns)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    _all_reduce_add_rms_norm[(min(num_rows, MAX_PROGRAMS),)](
        x, residual, weight, out, peers.buffer_addresses, peers.signal_addresses, peers.rank, eps, num_rows,
        x.stride(0), residual.stride(0), SIZE=peers.size, NUM_COLUMNS=num_columns,
        BLOCK_E=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
