"""One step's integers on the device: packed into one pinned array, sent as one copy, seen through views."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from pagedcli.attention.cuda_launch import prefill_tiles
from pagedcli.attention.interface import BatchLayout


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Neighbouring sequences of one row each: the decode kernels' share of a step."""

    first_seq: int
    first_row: int
    count: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Step:
    """Device views: slots int64 [rows]; context_len int32 [sequences]; starts [sequences + 1]; positions [sequences];
    tables [sequences, width]; tiles by (group, rows per tile): ([n, 2], n). prompts: (first, end) rows of each
    sequence when all of them begin here, so that no key is in the cache yet; else empty.
    """

    num_tokens: int
    prompt_tokens: int
    decode: DecodeRun
    width: int
    slots: torch.Tensor
    context_len: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    tiles: dict[tuple[int, int], tuple[torch.Tensor, int]]
    prompts: tuple[tuple[int, int], ...] = ()


class StepBuffer:
    """A device array of int32 that keeps its address while it is large enough, fed from a ring of pinned arrays.

    A pinned array is written again only when its last copy has run, which an event tells.
    """

    RING = 4

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._device_array = torch.empty(0, dtype=torch.int32, device=device)
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._turn = 0

    @property
    def array(self) -> torch.Tensor:
        """The device array that `send` fills."""
        return self._device_array

    def send(self, data: NDArray[np.int32]) -> torch.Tensor:
        """The data on the device, valid until the next call for work queued on the current stream."""
        if self._device_array.numel() < data.size:
            room = 1 << max(10, (data.size - 1).bit_length())
            self._device_array = torch.empty(room, dtype=torch.int32, device=self.device)
            self._staging, self._turn = [], 0
        room = self._device_array.numel()
        on_gpu = self.device.type == "cuda"
        if len(self._staging) < self.RING:
            pinned = torch.empty(room, dtype=torch.int32, pin_memory=on_gpu)
            self._staging.append((pinned, torch.cuda.Event() if on_gpu else None))
            self._turn = len(self._staging) - 1
        else:
            self._turn = (self._turn + 1) % self.RING
        pinned, event = self._staging[self._turn]
        if event is not None:
            event.synchronize()
        pinned[: data.size].numpy()[:] = data
        self._device_array[: data.size].copy_(pinned[: data.size], non_blocking=True)
        if event is not None:
            event.record()
        return self._device_array


def longest_single_run(query_lens: NDArray[np.int32]) -> tuple[int, int]:
    """(first, count) of the longest run of ones; (0, 0) when there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (query_lens == 1).astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    firsts, ends = edges[::2], edges[1::2]
    best = int(np.argmax(ends - firsts))
    return int(firsts[best]), int(ends[best] - firsts[best])


def pack_step(batch: BatchLayout, buffer: StepBuffer, rows: int, width: int, max_context: int,
              work: list[tuple[int, int]], decode: bool, fixed: bool) -> Step:
    """Sends a batch to the device.

    rows, width: rows of slots and entries of a table, at least the batch's. work: the (group, rows per tile) that a
    work list is needed for. decode: give single rows to the decode kernels. fixed: treat the batch as `rows` decode
    rows of up to `max_context` tokens whatever it holds, so that views and grids do not change; missing rows have no
    tokens.
    """
    seqs, query_lens = batch.num_seqs, np.diff(batch.query_start).astype(np.int32)
    alone = decode and batch.decode_only
    held = rows if alone else seqs   # decode rows alone: a padding row is a sequence without tokens
    slots = np.full(rows, -1, np.int64)
    slots[: len(batch.slots)] = batch.slots[:rows]
    context = np.zeros(held, np.int32)
    context[:seqs] = batch.context_len
    starts = np.zeros(held + 1, np.int32)
    starts[: seqs + 1] = batch.query_start
    starts[seqs + 1:] = batch.query_start[-1]
    positions = np.zeros(held, np.int32)
    positions[:seqs] = batch.context_len - query_lens
    tables = np.full((held, width), -1, np.int32)
    tables[:seqs, : batch.tables.shape[1]] = batch.tables
    first, count = longest_single_run(query_lens) if decode else (0, 0)
    if alone:
        run = DecodeRun(0, 0, rows, max_context)
    else:
        longest = int(batch.context_len[first:first + count].max(initial=1))
        run = DecodeRun(first, int(batch.query_start[first]) if count else 0, count, longest)
    prompts = query_lens.copy()
    prompts[run.first_seq:run.first_seq + run.count] = 0
    lists = {} if alone else {key: prefill_tiles(prompts.tolist(), *key) for key in work}
    parts = [slots.view(np.int32), context, starts, positions, tables.reshape(-1),
             *(tiles.reshape(-1) for tiles in lists.values())]
    ends = np.cumsum([part.size for part in parts])
    array = buffer.send(np.concatenate(parts))
    views = [array[end - part.size:end] for part, end in zip(parts, ends, strict=True)]
    prompt_tokens = 0 if alone else int(prompts.sum())
    assert not fixed or alone, "a fixed step holds decode rows alone"
    return Step(batch.num_tokens, prompt_tokens, run, width, views[0].view(torch.int64), views[1], views[2], views[3],
                views[4].view(held, width), {
                    key: (view.view(-1, 2), len(tiles))
                    for (key, tiles), view in zip(lists.items(), views[5:], strict=True)},
                tuple(pairwise(batch.query_start.tolist())) if not alone and (positions == 0).all() else ())
