"""The block pool of a GPU: swaps on a stream of their own from and to pinned memory, copies by one kernel launch.

Nothing here makes the host wait for the device. A swap-out gathers blocks into a small buffer on the device, after
which their places are free again; the slow part, over the bus, then runs beside the next steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from pagedcli.attention.interface import KVLayout
from pagedcli.core.devices import HOST, Device
from pagedcli.execution.kv_store import KVStore, Moves, PoolSize, Zeros
from pagedcli.execution.placement import torch_device

STAGE_BYTES = 64 << 20
"""Device memory of each of the two buffers that blocks on their way out wait in; at least one block."""

Copier = Callable[[Moves], None]
"""Copies whole blocks, as if one pair after the other."""


class SideStream(Protocol):
    """A queue of copies beside the stream that computes (main)."""

    def after_main(self) -> None:
        """What is queued here from now on runs after what main holds now."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def mark(self) -> Any:
        """A point in this queue."""

    def main_waits(self, mark: Any) -> None:
        """What main queues from now on runs after `mark` is reached."""


class GpuSideStream:
    """A CUDA stream; its marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def main_waits(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def runs(moves: Moves) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of stretches in which both sides count upwards together: each is one copy."""
    begin = 0
    for place in range(1, len(moves) + 1):
        if place < len(moves) and moves[place][0] == moves[place - 1][0] + 1 and \
                moves[place][1] == moves[place - 1][1] + 1:
            continue
        yield moves[begin][0], moves[begin][1], place - begin
        begin = place


def in_order(moves: Moves) -> list[tuple[int, int]] | None:
    """The moves in an order in which one after the other equals all sources read first; None when they run in a
    circle, so that no order does. Each target stands once."""
    waiting = {target: source for source, target in moves if source != target}
    readers: dict[int, int] = {}
    for source in waiting.values():
        readers[source] = readers.get(source, 0) + 1
    ready = [target for target in waiting if not readers.get(target)]
    ordered = []
    while ready:
        target = ready.pop()
        source = waiting.pop(target)
        ordered.append((source, target))
        readers[source] -= 1
        if not readers[source] and source in waiting:
            ready.append(source)
    return None if waiting else ordered


class CudaKVStore(KVStore):
    """As KVStore, for a pool on a GPU."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, size: PoolSize, device: torch.device, side: SideStream,
                 copier: Copier, stage_bytes: int = STAGE_BYTES) -> None:
        super().__init__(layout, dtype, size, device)
        self._side, self._copier = side, copier
        self._stage_blocks = max(1, stage_bytes // max(1, size.block_bytes))
        self._stages: list[tuple[torch.Tensor, Any]] = []
        """Buffers and the mark after which each may be written again, the longest unused first."""

    def copy(self, moves: Moves) -> None:
        ordered = in_order(moves)
        if ordered is None:  # a circle of copies needs room beside the pool, which a gather makes
            pairs, raw = torch.tensor(moves, dtype=torch.int64).to(self.pool.device), _bits(self.pool)
            raw.index_copy_(0, pairs[:, 1], raw.index_select(0, pairs[:, 0]))
        elif ordered:
            self._copier(ordered)

    def swap_out(self, moves: Moves) -> None:
        host = _bits(self._host_pool()) if moves else None
        for begin in range(0, len(moves), self._stage_blocks):
            assert host is not None
            part = moves[begin:begin + self._stage_blocks]
            stage = self._next_stage()
            raw = _bits(self.pool)
            for source, place, count in runs([(source, place) for place, (source, _) in enumerate(part)]):
                stage[place:place + count].copy_(raw[source:source + count], non_blocking=True)
            self._side.after_main()
            for place, target, count in runs([(place, target) for place, (_, target) in enumerate(part)]):
                self._side.copy(host[target:target + count], stage[place:place + count])
            self._stages.append((stage, self._side.mark()))

    def swap_in(self, moves: Moves) -> None:
        if moves:
            host, raw = _bits(self._host_pool()), _bits(self.pool)
            self._side.after_main()  # earlier steps may still read what lies there
            for source, target, count in runs(moves):
                self._side.copy(raw[target:target + count], host[source:source + count])
            self._side.main_waits(self._side.mark())

    def close(self) -> None:
        if self._stages:
            self._side.main_waits(self._side.mark())
        self._stages = []
        super().close()

    def _zeros_on(self, device: Device) -> Zeros:
        if device.type == "cpu":  # a stand-in for a GPU
            return super()._zeros_on(device)
        return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=torch_device(device))

    def _host_pool(self) -> torch.Tensor:
        if self._host is None:
            if not self.pool.is_cuda:
                return super()._host_pool()
            self._host = self._allocate(
                self.size.host_blocks, HOST, lambda shape, dtype: torch.zeros(shape, dtype=dtype, pin_memory=True),
                self.size.block_bytes, "Lower --swap-space")
        return self._host

    def _next_stage(self) -> torch.Tensor:
        """A buffer that main may write: a new one while there are fewer than two, else the longest unused."""
        if len(self._stages) < 2:
            blocks = min(self._stage_blocks, self.size.num_blocks)
            return torch.empty((blocks, self.layout.block_elements), dtype=_bits(self.pool).dtype,
                               device=self.pool.device)
        stage, mark = self._stages.pop(0)
        self._side.main_waits(mark)
        return stage


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """The pool as integers of its element size: gathers and scatters are not defined for every float type."""
    return pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.element_size()])
