"""Steps on a GPU: decode steps replayed from CUDA graphs, others launched, inputs through pinned memory.

Nothing here waits for the device: logits stay where they are, and who chooses tokens from them waits for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.cuda_graph import ROW_COUNTS, DecodeGraphs, Forward
from pagedcli.attention.cuda_step import StepBuffer
from pagedcli.attention.interface import BatchLayout
from pagedcli.core.errors import CannotRunError
from pagedcli.core.plan import StepPlan
from pagedcli.core.wording import counted
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.flat_batch import FlatBatch, flatten
from pagedcli.execution.interface import ExecutorLimits

FIRST_WIDTH = 1024
"""Tokens of the narrowest block table that graphs are captured for; each further one is four times as wide."""


class Graphs(Protocol):
    """Decode steps with tables up to one width (cuda_graph.DecodeGraphs)."""

    def run(self, batch: BatchLayout) -> torch.Tensor | None: ...


GraphMaker = Callable[[CudaBackend, Forward, int], Graphs]
"""(backend, forward, entries of the widest table) -> graphs."""


def table_widths(max_positions: int, block_size: int) -> tuple[int, ...]:
    """Entries of block tables to capture for: a table is sent whole every step, and short contexts are the rule."""
    widths, tokens = [], FIRST_WIDTH
    while tokens < max_positions:
        widths.append(-(-tokens // block_size))
        tokens *= 4
    return (*widths, -(-max_positions // block_size))


class CudaSteps:
    """See device_path.Steps. `decoder` is attached to `backend`, and `backend` bound to the pool."""

    def __init__(self, decoder: Decoder, backend: CudaBackend, limits: ExecutorLimits, *, graphs: bool,
                 make_graphs: GraphMaker = DecodeGraphs) -> None:
        self._decoder, self._backend = decoder, backend
        self._block_size = limits.block_size
        self._widths = table_widths(limits.max_positions, limits.block_size) if graphs else ()
        self._make_graphs = make_graphs
        self._graphs: dict[int, Graphs] = {}
        self._inputs = StepBuffer(backend.device)
        self._fixed = StepBuffer(backend.device)
        self._most = max(ROW_COUNTS)
        self.notes: tuple[str, ...] = () if graphs else ("decode steps: launched kernel by kernel (no CUDA graphs "
                                                         "across ranks)",)

    def try_graphs(self) -> None:
        """Capture a first graph, so that a model that cannot be captured is known before any row runs."""
        if not self._widths:
            return
        if self._from_graph(flatten(StepPlan(), self._block_size)) is not None:
            self.notes = (f"decode steps: CUDA graphs for up to {counted(self._most, 'sequence')}",)

    def run(self, batch: FlatBatch) -> torch.Tensor | None:
        logits = self._from_graph(batch)
        if logits is None:
            self._backend.prepare(batch.layout)
            ids, positions, rows = self._send(self._inputs, batch.ids, batch.positions, batch.rows)
            logits = self._decoder.forward(ids, positions, rows)
        return logits[:batch.wanted] if batch.wanted else None

    def parts(self, seconds: float) -> dict[str, float]:
        return {"forward": seconds}

    def _from_graph(self, batch: FlatBatch) -> torch.Tensor | None:
        """Logits of a decode step in which every sequence wants its row's; None for other steps."""
        layout = batch.layout
        if not layout.decode_only or batch.wanted != layout.num_seqs or layout.num_seqs > self._most:
            return None
        width = next((width for width in self._widths if width >= layout.tables.shape[1]), None)
        if width is None:
            return None
        self._send(self._fixed, self._whole(batch.ids, layout.num_seqs), self._whole(batch.positions, layout.num_seqs),
                   np.arange(self._most))
        if width not in self._graphs:
            self._graphs[width] = self._make_graphs(self._backend, self._fixed_forward, width)
        try:
            return self._graphs[width].run(layout)
        except CannotRunError as fault:
            if fault.code != "graph_capture":
                raise
            self._widths, self._graphs = (), {}
            self.notes = (f"decode steps: launched kernel by kernel ({fault.message})",)
            return None

    def _fixed_forward(self, rows: int) -> torch.Tensor:
        """The forward over the first `rows` of the fixed inputs, whose addresses never change."""
        ids, positions, places = self._views(self._fixed.array, [self._most] * 3)
        return self._decoder.forward(ids[:rows], positions[:rows], places[:rows])

    def _whole(self, values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """The first `count` values, filled up with zeros to a fixed number."""
        held = np.zeros(self._most, np.int64)
        held[:count] = values[:count]
        return held

    def _send(self, buffer: StepBuffer, *arrays: NDArray[np.int64]) -> list[torch.Tensor]:
        """The arrays on the device, by one copy from pinned memory."""
        sent = buffer.send(np.concatenate(arrays).astype(np.int64, copy=False).view(np.int32))
        return self._views(sent, [len(array) for array in arrays])

    @staticmethod
    def _views(array: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        return list(array[:2 * sum(lengths)].view(torch.int64).split(lengths))
