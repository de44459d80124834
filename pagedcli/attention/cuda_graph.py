"""Decode steps as CUDA graphs: captured once per padded row count, replayed with new integers in the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.interface import BatchLayout
from pagedcli.core.errors import CannotRunError

ROW_COUNTS: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8))
"""Row counts that graphs are captured for: close enough that padding wastes little, few enough to capture."""

Forward = Callable[[int], torch.Tensor]


def padded_rows(rows: int, counts: Sequence[int] = ROW_COUNTS) -> int | None:
    """The smallest captured count that holds `rows`; None when there is none."""
    return next((count for count in counts if count >= rows), None)


class DecodeGraphs:
    """Runs `forward(rows)` of decode-only steps from graphs.

    forward reads its own inputs from tensors that keep their addresses (the caller writes ids and positions there
    before `run`) and calls the backend's `attend` for every layer; it must not synchronise. max_blocks: entries of the
    widest block table, which also bounds the split of the context.
    """

    def __init__(self, backend: CudaBackend, forward: Forward, max_blocks: int,
                 counts: Sequence[int] = ROW_COUNTS) -> None:
        self._backend, self._forward = backend, forward
        self._max_blocks, self._counts = max_blocks, tuple(sorted(counts))
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None   # torch's handle of the memory pool that all graphs share

    def run(self, batch: BatchLayout) -> torch.Tensor | None:
        """forward's result with the padded rows behind the real ones, valid until the next run; None when no graph
        holds this batch (prompt rows, too many rows, tables too wide): run it without one. CannotRunError with code
        graph_capture: forward cannot be captured (it synchronises, or memory ran out).
        """
        rows = padded_rows(batch.num_seqs, self._counts)
        if rows is None or not batch.decode_only or batch.tables.shape[1] > self._max_blocks:
            return None
        self._backend.prepare_graph(batch, rows, self._max_blocks)
        if rows not in self._graphs:
            try:
                self._graphs[rows] = self._capture(rows)
            except RuntimeError as fault:
                reason = str(fault).strip().split("\n")[0][:200]
                raise CannotRunError(f"a step of {rows} rows could not be captured as a CUDA graph: {reason}",
                                     "graph_capture") from fault
        graph, out = self._graphs[rows]
        graph.replay()
        return out

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # Kernels are loaded and workspaces sized outside the capture, on a stream of their own as torch asks for.
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward(rows)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = self._forward(rows)
        self._pool = graph.pool()
        return graph, out
