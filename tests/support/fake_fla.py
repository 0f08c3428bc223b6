"""flash-linear-attention with its recorded signatures: checks shapes and types, and computes token by token."""

from __future__ import annotations

from typing import Any

import torch
from recorded_signatures import Signatures
from torch import Tensor

SIGNATURES = Signatures("fla")


class FakeFla:
    """The two functions that are used; each checks what its docstring and its code demand.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = SIGNATURES.bind("chunk_gated_delta_rule", *args, **kwargs)
        assert given["g"].shape == given["beta"].shape
        return self._compute(given, given["g"].unsqueeze(-1))

    def chunk_kda(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = SIGNATURES.bind("chunk_kda", *args, **kwargs)
        assert given["g"].shape == (*given["v"].shape[:3], given["k"].shape[3])
        return self._compute(given, given["g"])

    def _compute(self, given: dict[str, Any], decay: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, beta, starts = (given[name] for name in ("q", "k", "v", "beta", "cu_seqlens"))
        initial = given["initial_state"]
        for name in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"):
            assert given[name] is False
        assert q.shape == k.shape
        assert q.shape[0] == 1
        assert q.shape[3] <= 256
        num_heads = v.shape[2]
        assert num_heads % q.shape[2] == 0
        assert beta.shape == v.shape[:3]
        assert starts.dtype == torch.int64
        assert initial.dtype == torch.float32
        assert initial.shape == (len(starts) - 1, num_heads, k.shape[3], v.shape[3])
        assert given["output_final_state"]
        assert all(each.is_contiguous() for each in (q, k, v, given["g"], beta, initial))
        self.num_calls += 1
        share = num_heads // q.shape[2]
        queries, keys = (each[0].double().repeat_interleave(share, 1) for each in (q, k))
        out, final = torch.empty_like(v), torch.empty_like(initial)
        for index, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            state = initial[index].double()
            for t in range(start, end):
                state = state * decay[0, t].double().exp().unsqueeze(-1)
                update = v[0, t].double() - torch.einsum("hd,hde->he", keys[t], state)
                state = state + keys[t][:, :, None] * (beta[0, t, :, None].double() * update)[:, None]
                out[0, t] = given["scale"] * torch.einsum("hd,hde->he", queries[t], state)
            final[index] = state
        return out, final
