"""EAGLE-3 draft head in plain PyTorch (Li et al., EAGLE-3, 2025), for training and as a reference of tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a head; `hidden` is also that of the target model's embedding."""

    hidden: int
    target_hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-5
    rope_theta: float = 10000.0


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, length: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(length))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class HeadLayer(nn.Module):
    """Decoder layer whose attention reads the embedding beside the hidden state."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        q_len, kv_len = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.sizes = sizes
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * sizes.hidden, q_len, bias=False),
                "k_proj": nn.Linear(2 * sizes.hidden, kv_len, bias=False),
                "v_proj": nn.Linear(2 * sizes.hidden, kv_len, bias=False),
                "o_proj": nn.Linear(q_len, sizes.hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(sizes.hidden, sizes.intermediate, bias=False),
                "up_proj": nn.Linear(sizes.hidden, sizes.intermediate, bias=False),
                "down_proj": nn.Linear(sizes.intermediate, sizes.hidden, bias=False),
            }
        )
        self.hidden_norm = Norm(sizes.hidden, sizes.eps)
        self.input_layernorm = Norm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.eps)

    def project(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, Hq, P, D] and keys and values [B, Hq, P, D] of pairs 0 to P - 1."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        group = self.sizes.num_heads // self.sizes.num_kv_heads
        q, k, v = (
            self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        q, k = self._rotate(q), self._rotate(k)
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's output, of attended values [B, Hq, P, D]."""
        hidden = hidden + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(hidden)
        gated = F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return hidden + self.mlp["down_proj"](gated)

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.sizes.head_dim // 2
        frequencies = self.sizes.rope_theta ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x.float() * cos + torch.cat((-x[..., half:], x[..., :half]), -1).float() * sin


class Eagle3Reference(nn.Module):
    """Head of one layer. Pair p is the embedding of token p + 1 and the hidden states of token p."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * sizes.target_hidden, sizes.hidden, bias=False)
        self.midlayer = HeadLayer(sizes)
        self.norm = Norm(sizes.hidden, sizes.eps)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return the input of the output layer."""
        return self.norm(hidden)

    def unroll(self, embedded: Tensor, features: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield the hidden states of each drafted token, [B, P - k, E] for the k-th after pairs k to P - 1.

        Step k drafts from k hidden states of its own: a pair attends to pairs up to p - k of the first step, and to
        one pair of each later step.

        Args:
            embedded: [B, P, E], of tokens 1 to P.
            features: [B, P, 3 E'], of tokens 0 to P - 1.
        """
        hidden = self.fc(features)
        num_pairs, scale = hidden.shape[1], self.midlayer.sizes.head_dim**-0.5
        index = torch.arange(num_pairs)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(num_steps):
            q, k, v = self.midlayer.project(embedded, hidden)
            keys.append(k)
            values.append(v)
            is_hidden = index[None] > (index - step)[:, None]
            scores = [(q @ keys[0].transpose(-1, -2)).float().masked_fill(is_hidden, -torch.inf) * scale]
            # Pair p attends to pair p - (step - j) of step j.
            own = [_shift(past, step - later) for later, past in enumerate(keys) if later]
            scores += [(q * key).sum(-1, keepdim=True).float() * scale for key in own]
            weights = torch.cat(scores, -1).softmax(-1).nan_to_num(0.0)
            attended = weights[..., :num_pairs].to(v.dtype) @ values[0]
            for place, later in enumerate(range(1, step + 1)):
                weight = weights[..., num_pairs + place, None].to(v.dtype)
                attended = attended + weight * _shift(values[later], step - later)
            hidden = self.midlayer.finish(attended, hidden)
            yield hidden[:, step:]
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]  # pair p reads the hidden state of pair p - 1


def _shift(x: Tensor, count: int) -> Tensor:
    """Move [B, H, P, D] to later pairs."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x
