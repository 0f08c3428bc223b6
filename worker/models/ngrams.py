"""NgramEmbedding: hashed n-grams that a layer adds to each stream of its residual; see proto.model.ngrams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.activation import sigmoid, silu
from ...kernels.norm import rms_norm
from ...kernels.shared_attention import token_windows
from ...kernels.state_runs import StateRuns
from ...proto.errors import ModelLoadError
from ...proto.model.ngrams import ID_BASE, ID_DIGITS, NgramSpec
from ...proto.model.spec import DecoderSpec
from ..weights.weight_slice import WeightSlice
from .load_context import LoadContext
from .mixers.state_mixer import read_conv

# Least size of a gate before its root.
_MIN_GATE = 1e-6
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class NgramTable:
    """The rows of all hashes; each rank holds some columns of every row.

    Published checkpoints have the table in parts of its rows. Numbers in float8 stay as they are stored.
    """

    def __init__(self, load: LoadContext, own: NgramSpec, name: str) -> None:
        self._comm, self._dtype = load.comm, load.dtype
        self._columns = load.shard(own.head_dim)
        stored = f"{name}.ngram_embedding"
        self._scale: float | None = None
        if load.checkpoint.has(f"{stored}.weight_scale"):
            scale = torch.empty(load.checkpoint.shape_of(f"{stored}.weight_scale"), dtype=torch.float32)
            load.checkpoint.read_into(scale, f"{stored}.weight_scale", tuple(scale.shape))
            self._scale = float(scale)
        self._rows = load.keep(f"{stored} of columns {self._columns}", lambda: self._read(load, own, stored))

    def _read(self, load: LoadContext, own: NgramSpec, stored: str) -> Tensor:
        """Read this rank's columns of all parts."""
        checkpoint = load.checkpoint
        names = [f"{stored}.weight"]
        if not checkpoint.has(names[0]):
            names = [f"{stored}.shard_{index}.weight" for index in range(own.num_rows)]
        found, start = None, 0
        for part in names:
            if start >= own.num_rows:
                break
            num_rows, dtype = checkpoint.shape_of(part)[0], checkpoint.dtype_of(part)
            if found is None:
                kept = dtype if dtype in _FLOAT8 else load.dtype
                found = torch.empty(own.num_rows, len(self._columns), dtype=kept, device=load.device)
            if start + num_rows > own.num_rows:
                raise ModelLoadError(f"{part!r} ends at row {start + num_rows}, expected {own.num_rows}")
            rows = found[start : start + num_rows]
            checkpoint.read_into(rows, part, (num_rows, own.head_dim), 1, self._columns.start)
            start += num_rows
        assert found is not None
        return found

    def look_up(self, rows: Tensor) -> Tensor:
        """Return the numbers of rows, [T, H] -> [T, H * head_dim], the same on every rank."""
        stored = self._rows
        codes = stored.view(torch.uint8) if stored.dtype in _FLOAT8 else stored
        own = codes.index_select(0, rows.flatten()).view(stored.dtype).to(self._dtype)
        if self._scale is not None:
            own *= self._scale
        columns = self._columns
        if len(columns) < columns.full_len:
            parts = self._comm.all_gather(F.pad(own, (0, columns.padded_len - len(columns))))
            own = parts.transpose(0, 1).flatten(1)[:, : columns.full_len]
        return own.reshape(len(rows), -1)


class NgramHashes:
    """The rows of the table that the n-grams up to each token have."""

    def __init__(self, load: LoadContext, own: NgramSpec, name: str) -> None:
        self._own = own
        sizes = own.head_rows()
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._factors, self._sizes, self._starts = (
            torch.tensor(values, device=load.device) for values in (own.multipliers(), sizes, starts)
        )
        stored = {
            "layer_multipliers": self._factors,
            "ngram_heads_vocab_sizes": self._sizes,
            "ngram_heads_offsets": self._starts,
        }
        for part, computed in stored.items():
            if not load.checkpoint.has(f"{name}.{part}"):
                continue
            found = torch.empty_like(computed)
            load.checkpoint.read_into(found, f"{name}.{part}", tuple(found.shape))
            if not found.equal(computed):
                raise ModelLoadError(
                    f"{name}.{part} are other hashes of n-grams than those of its configuration"
                )

    def rows(self, token_ids: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
        """[T] -> [T, H] int64.

        Args:
            states: [num_slots, size - 1, ID_DIGITS], of the last ids, plus one; 0 before a sequence begins.
        """
        own = self._own
        powers = ID_BASE ** torch.arange(ID_DIGITS, device=token_ids.device)
        digits = ((token_ids.long() + 1).unsqueeze(1) // powers % ID_BASE).to(states.dtype)
        ends = torch.arange(len(token_ids), device=token_ids.device)
        windows = runs.compute(token_windows, digits, ends, states=states, by_token=False)
        # The current token first, as the factors are.
        ids = (windows.long() * powers).sum(-1).flip(1) - 1
        ids = ids.masked_fill(ids < 0, own.separator)
        is_beyond = (ids[:, 1:] == own.separator).cumsum(1) > 0
        mixed = ids * self._factors
        mixed[:, 1:] = torch.where(is_beyond, own.separator * self._factors[1:], mixed[:, 1:])
        found, hashed = [], mixed[:, 0]
        for place in range(1, own.size):
            hashed = hashed ^ mixed[:, place]
            part = slice((place - 1) * own.num_hashes, place * own.num_hashes)
            found.append(hashed.unsqueeze(1) % self._sizes[part] + self._starts[part])
        return torch.cat(found, dim=1)


class NgramEmbedding:
    """Addend of a layer's residual: gated embeddings of n-grams, and their convolution over time.

    Every rank computes all of it, but for the look-up.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: NgramSpec, name: str) -> None:
        self._own, self._eps = own, spec.norm_eps
        self._hashes = NgramHashes(load, own, f"{name}.ple_embedding")
        self._table = NgramTable(load, own, f"{name}.ple_embedding")
        num_all, shape = own.num_streams * own.hidden_size, (own.num_streams, own.hidden_size)
        self._keys, self._values = (
            load.linear([WeightSlice(f"{name}.{part}_proj", (length, own.embed_dim), 0, 0, length)])
            for part, length in (("key", num_all), ("value", own.hidden_size))
        )
        self._key_norm, self._query_norm, self._conv_norm = (
            load.norm(f"{name}.norm_{part}", num_all, spec.norms.offset).view(shape)
            for part in ("key", "query", "conv")
        )
        self._ones = load.empty(own.hidden_size).fill_(1)
        self._conv, _ = read_conv(load, f"{name}.conv1d", [(0, num_all)], own.width, num_channels=num_all)

    def forward(
        self, streams: Tensor, token_ids: Tensor, states: Sequence[Tensor], runs: StateRuns
    ) -> Tensor:
        """Return what is added to streams, [T, N, E].

        Args:
            states: see NgramSpec.state_tensors.
        """
        embedded = self._table.look_up(self._hashes.rows(token_ids, states[0], runs))
        keys = self._normalize(self._keys.multiply(embedded).view_as(streams), self._key_norm)
        products = keys * self._normalize(streams, self._query_norm)
        gate = products.sum(dim=-1, keepdim=True) / self._own.hidden_size**0.5
        gate = gate.abs().clamp_min(_MIN_GATE).sqrt() * gate.sign()
        gated = sigmoid(gate) * self._values.multiply(embedded).unsqueeze(1)
        return gated + self._convolve(self._normalize(gated, self._conv_norm), states[1], runs)

    def _normalize(self, streams: Tensor, weight: Tensor) -> Tensor:
        """Normalize each stream; `weight` is [N, E]."""
        return rms_norm(streams, self._ones, self._eps) * weight

    def _convolve(self, inputs: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
        flat, ends = inputs.flatten(1), torch.arange(len(inputs), device=inputs.device)
        windows = runs.compute(
            token_windows, flat, ends, states=states, by_token=False, dilation=self._own.size
        )
        mixed = (windows.float() * self._conv.float().T).sum(dim=1)
        return silu(mixed.to(inputs.dtype)).view_as(inputs)
