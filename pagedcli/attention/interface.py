"""The contract of attention backends, and the batch layout they share. Imports no torch at run time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedcli.core.plan import StepPlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and rule of one attention layer.

    heads, kv_heads: query and key/value heads (heads a multiple of kv_heads). key_dim, value_dim: per head.
    scale: multiplies q.k. window: a query at position p sees keys p-window+1 .. p (None: all).
    softcap: scores become softcap * tanh(score / softcap). sinks: whether each head has one extra
    logit that joins the softmax denominator (its values are passed to `attend`).
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def elements(self, block_size: int) -> int:
        """Elements of one block in this layer, keys and values together."""
        return self.kv_heads * block_size * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where each layer lies inside a block: `[block][layer][K then V][kv_head][tile]`, one contiguous run a block.

    The order inside a (kv_head) tile is the backend's: [slot, dim] or [dim, slot]. Offsets are in elements.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int

    @property
    def block_elements(self) -> int:
        return sum(layer.elements(self.block_size) for layer in self.layers)

    def key_offset(self, layer: int) -> int:
        return sum(spec.elements(self.block_size) for spec in self.layers[:layer])

    def value_offset(self, layer: int) -> int:
        spec = self.layers[layer]
        return self.key_offset(layer) + spec.kv_heads * self.block_size * spec.key_dim


@dataclass(slots=True)
class BatchLayout:
    """One step's batch as arrays, built once a step and used by every layer.

    T tokens flattened (padded rows at the end have slot -1 and position 0), S sequences.
    slots: int64 [T], block * block_size + offset of each token's write, -1 for padding.
    positions: int64 [T], 0-based within the sequence.
    query_start: int32 [S + 1], rows of sequence s are query_start[s] .. query_start[s + 1] - 1.
    context_len: int32 [S], keys visible to the last row of s (this step's tokens included).
    tables: int32 [S, widest], block ids; entries past a sequence's last block are -1.
    `device` holds whatever a backend derives from these (device copies, work lists).
    """

    num_tokens: int
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    query_start: NDArray[np.int32]
    context_len: NDArray[np.int32]
    tables: NDArray[np.int32]
    device: object = None

    @property
    def num_seqs(self) -> int:
        return len(self.context_len)

    @property
    def decode_only(self) -> bool:
        """Whether each sequence has exactly one row."""
        return self.num_tokens == self.num_seqs


def build_layout(plan: StepPlan, block_size: int, pad_to: int = 1) -> BatchLayout:
    """Arrays for a plan's slices; the row count is padded up to a multiple of `pad_to`."""
    counts = np.fromiter((len(s.tokens) for s in plan.slices), np.int64, len(plan.slices))
    starts = np.fromiter((s.start for s in plan.slices), np.int64, len(plan.slices))
    total = int(counts.sum())
    rows = -(-max(total, 1) // pad_to) * pad_to
    query_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context = (starts + counts).astype(np.int32)
    needed = -(-context // block_size)
    tables = np.full((len(counts), max(int(needed.max(initial=0)), 1)), -1, np.int32)
    for row, (item, width) in enumerate(zip(plan.slices, needed, strict=True)):
        tables[row, :width] = item.blocks[:width]
    positions = np.zeros(rows, np.int64)
    slots = np.full(rows, -1, np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    positions[:total] = np.arange(total) - query_start[:-1].astype(np.int64)[owner] + starts[owner]
    here = positions[:total]
    slots[:total] = tables[owner, here // block_size].astype(np.int64) * block_size + here % block_size
    return BatchLayout(total, slots, positions, query_start, context, tables)


class AttentionBackend(ABC):
    """Writes keys and values into blocks and attends over them.

    One backend serves one model: `bind` gives it the layout and the pool before any step. It is called again to change
    to another pool of the same layout (the load-time probe has a small one of its own).
    """

    name: str

    @abstractmethod
    def supports(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        """None when the layer can run here with this cache dtype, else the reason it cannot, by name."""

    @abstractmethod
    def bind(self, layout: KVLayout, pool: torch.Tensor) -> None:
        """`pool`: [num_blocks, layout.block_elements] of the cache dtype, contiguous, on the backend's device."""

    @abstractmethod
    def prepare(self, batch: BatchLayout) -> None:
        """Called once a step before the layers run; keep what the layers need (the backend's current batch)."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               spec: LayerSpec, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Write k, v [T, kv_heads, dim] at the batch's slots, then attend for q [T, heads, key_dim].

        Rows beyond `num_tokens` are padding: never written, returned as zeros. Inputs may be strided views of any
        float dtype. Returns [T, heads, value_dim] in q's dtype. `sinks`: [heads] when spec.sinks.
        """

    def warm_up(self, specs: Sequence[LayerSpec], dtype: torch.dtype) -> float:
        """Compile whatever the layers need now; returns the seconds it took."""
        del specs, dtype
        return 0.0
