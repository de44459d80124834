"""A plan's slices as one flattened batch of rows, padded so that no row's bits depend on how many others there are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.interface import AttentionBackend, BatchLayout, build_layout
from pagedcli.core.plan import StepPlan
from pagedcli.execution.decoder import Decoder

ROW_TILE = 8
"""Row counts are padded to a multiple of this. CPU matrix products take other paths for the rows left over after the
last full tile, so the same row could get other bits in another batch; tests/execution/test_same_bits.py checks it."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """ids, positions: int64 [T padded]; rows: int64 [R padded], the rows that want logits; `wanted` is R unpadded."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    wanted: int
    layout: BatchLayout


def flatten(plan: StepPlan, block_size: int, row_tile: int = ROW_TILE) -> FlatBatch:
    """Arrays for one forward. Row counts are padded to multiples of `row_tile` (the
    decoder's). Padding rows have id 0, position 0 and slot -1, so nothing is written for them."""
    layout = build_layout(plan, block_size, row_tile)
    ids = np.zeros(len(layout.slots), np.int64)
    ids[:layout.num_tokens] = np.fromiter(chain.from_iterable(s.tokens for s in plan.slices), np.int64,
                                          layout.num_tokens)
    wanted = np.fromiter((s.logit_rows for s in plan.slices), np.int64, len(plan.slices))
    rows = _last_rows(layout.query_start[1:].astype(np.int64), wanted)
    padded = np.zeros(-(-len(rows) // row_tile) * row_tile, np.int64)
    padded[:len(rows)] = rows
    return FlatBatch(ids, layout.positions, padded, len(rows), layout)


def _last_rows(ends: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last wanted[s] rows before ends[s], for each s in order."""
    if (wanted == 1).all():
        return ends - 1
    first = np.cumsum(wanted) - wanted
    return np.arange(wanted.sum()) + np.repeat(ends - wanted - first, wanted)


def forward(decoder: Decoder, backend: AttentionBackend, batch: FlatBatch) -> Any:
    """Logits [R, vocabulary] of the wanted rows. The decoder is attached to `backend`, and `backend` bound."""
    backend.prepare(batch.layout)
    return decoder.forward(batch.ids, batch.positions, batch.rows)[:batch.wanted]
