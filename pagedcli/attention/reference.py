"""Attention in plain torch: gathers every block a sequence can see. Slow, short, and the judge of the others."""

from __future__ import annotations

import torch

from pagedcli.attention.interface import AttentionBackend, BatchLayout, KVLayout, LayerSpec

FLOAT8_LIMITS: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite value of each 8-bit cache type; writes saturate there, as CUDA's __NV_SATFINITE does."""


def to_cache(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to the cache type (to nearest even); 8-bit types saturate instead of overflowing."""
    limit = FLOAT8_LIMITS.get(dtype)
    return values.to(dtype) if limit is None else values.float().clamp(-limit, limit).to(dtype)


class ReferenceBackend(AttentionBackend):
    """One sequence at a time, one dense matrix of scores. Tiles are [slot, dim] for keys and for values."""

    name = "reference"

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        self.compute = compute
        self._layout: KVLayout | None = None
        self._pool: torch.Tensor | None = None
        self._batch: BatchLayout | None = None
        self._rows: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None

    def supports(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        del spec, block_size
        return None if dtype.is_floating_point else f"the cache type {dtype} is not a floating-point type"

    def bind(self, layout: KVLayout, pool: torch.Tensor) -> None:
        self._layout, self._pool = layout, pool

    def prepare(self, batch: BatchLayout) -> None:
        self._batch = batch
        slots = torch.from_numpy(batch.slots)
        self._rows = torch.nonzero(slots >= 0).flatten()
        self._slots = slots[self._rows]

    def tiles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the pool: keys [blocks, kv_heads, block_size, key_dim] and values [.., value_dim]."""
        assert self._layout is not None and self._pool is not None, "bind() comes before use"
        spec, size = self._layout.layers[layer], self._layout.block_size
        cut = self._layout.value_offset(layer)
        end = self._layout.key_offset(layer) + spec.elements(size)
        keys = self._pool[:, self._layout.key_offset(layer):cut].unflatten(1, (spec.kv_heads, size, -1))
        values = self._pool[:, cut:end].unflatten(1, (spec.kv_heads, size, -1))
        return keys, values

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               spec: LayerSpec, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert self._batch is not None and self._layout is not None, "prepare() comes before attend()"
        batch, size = self._batch, self._layout.block_size
        keys, values = self.tiles(layer)
        self._write(keys, k, size)
        self._write(values, v, size)
        out = q.new_zeros(q.shape[0], spec.heads, spec.value_dim)
        for row in range(batch.num_seqs):
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            if first == last:
                continue
            context = int(batch.context_len[row])
            start = context - (last - first)
            # Blocks wholly behind the window may be gone from the table, so they are never gathered.
            low = 0 if spec.window is None else max(0, start - spec.window + 1) // size
            table = torch.from_numpy(batch.tables[row, low:-(-context // size)]).long()
            seen = slice(low * size, context)
            out[first:last] = self._one(
                q[first:last], self._gather(keys, table, context - low * size),
                self._gather(values, table, context - low * size),
                torch.arange(start, context), torch.arange(seen.start, seen.stop), spec, sinks)
        return out

    def _write(self, tiles: torch.Tensor, rows: torch.Tensor, size: int) -> None:
        assert self._slots is not None and self._rows is not None
        bits = torch.uint8 if tiles.itemsize == 1 else tiles.dtype
        data = to_cache(rows[self._rows], tiles.dtype).view(bits)
        tiles.view(bits)[self._slots // size, :, self._slots % size] = data

    def _gather(self, tiles: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        """[length, kv_heads, dim] in the computing type, block order undone."""
        bits = torch.uint8 if tiles.itemsize == 1 else tiles.dtype
        blocks = tiles.view(bits)[table].view(tiles.dtype).to(self.compute)
        return blocks.transpose(1, 2).flatten(0, 1)[:length]

    def _one(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, queries_at: torch.Tensor,
             keys_at: torch.Tensor, spec: LayerSpec, sinks: torch.Tensor | None) -> torch.Tensor:
        """q [n, heads, key_dim] over keys [m, kv_heads, ..]: [n, heads, value_dim]."""
        rows = q.to(self.compute).unflatten(1, (spec.kv_heads, spec.group))
        scores = torch.einsum("nhgd,mhd->hgnm", rows, keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        hidden = keys_at[None, :] > queries_at[:, None]
        if spec.window is not None:
            hidden |= keys_at[None, :] <= queries_at[:, None] - spec.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if spec.sinks:
            assert sinks is not None, "this layer's spec asks for sinks"
            extra = sinks.to(self.compute).view(spec.kv_heads, spec.group, 1, 1).expand(-1, -1, len(q), 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hgnm,mhd->nhgd", weights, values).flatten(1, 2).to(q.dtype)
