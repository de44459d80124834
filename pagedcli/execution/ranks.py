"""Ranks of one tensor-parallel run: how they find each other, and what they say to each other.

Two ways to start: this program starts the others on its own machine (`spawned`), or torchrun has started all of them
(`from_torchrun`), perhaps on several machines. Tensors travel by NCCL between GPUs and by gloo between CPUs;
plans always by gloo, since they are made of Python integers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pagedcli.core.errors import UsageError
from pagedcli.core.wording import counted

START_SECONDS = 600
"""How long ranks wait for each other while models load."""

QUIET_SECONDS = 24 * 3600
"""How long a rank waits for the next plan. A bench may have nothing to do for long; a dead rank is noticed by its
closed connection, not by this."""

FRAME = 512
"""Numbers (int32) in the first message of a plan; what does not fit follows in a second."""

_PLAN, _STOP = 1, 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process stands: its rank of `size`, and where the ranks meet. `local` is its number on its machine."""

    rank: int
    size: int
    host: str
    port: int
    local: int = 0
    torchrun: bool = False

    @classmethod
    def from_torchrun(cls, variables: Mapping[str, str], size: int) -> Place | None:
        """The place that torchrun gave this process, or None when it was not started by torchrun.

        UsageError when the number of processes is not `size`.
        """
        if "RANK" not in variables or "WORLD_SIZE" not in variables:
            return None
        world = int(variables["WORLD_SIZE"])
        if world != size:
            raise UsageError(f"torchrun started {counted(world, 'process', 'processes')} and "
                             f"--tensor-parallel-size is {size}: they must be the same", "ranks_differ")
        return cls(int(variables["RANK"]), world, variables.get("MASTER_ADDR", "127.0.0.1"),
                   int(variables.get("MASTER_PORT", "29500")), int(variables.get("LOCAL_RANK", "0")), True)


class Ranks:
    """The group of ranks, seen from one of them. Implements `sharding.Exchange`.

    `same_bits`: sums are taken in the order of ranks, so that a row's sum does not depend on where it lies in the
    batch, as it does in a ring. That sends size - 1 whole parts to each rank instead of 2 (size - 1) / size.
    """

    def __init__(self, place: Place, store: dist.Store, device: torch.device, same_bits: bool) -> None:
        self.rank, self.size = place.rank, place.size
        self.store = dist.PrefixStore("pagedcli", store)
        self.device = device
        self.same_bits = same_bits
        self.plan_bytes = 0
        self.messages = 0
        if not place.torchrun:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo reads it and nothing else; all are on one machine
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=self.rank, world_size=self.size,
                                timeout=timedelta(seconds=QUIET_SECONDS))

    # -- tensors ---------------------------------------------------------------------------------------------------

    def total(self, part: torch.Tensor) -> torch.Tensor:
        if not self.same_bits:
            part = part.contiguous()
            dist.all_reduce(part)
            return part
        parts = self._all(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        if part.numel() == 0:
            return part if self.rank else torch.cat([part] * self.size, -1)
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0)
        return part if parts is None else torch.cat(parts, -1)

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return parts

    def least(self, *numbers: int) -> list[int]:
        """The smallest of each number over all ranks, on every rank."""
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return [int(value) for value in values]

    # -- plans -----------------------------------------------------------------------------------------------------

    def send_plan(self, data: NDArray[np.int32]) -> None:
        """From rank 0 to all. `plan_bytes` and `messages` count what was sent to each of them."""
        self._send(_PLAN, data)

    def send_stop(self) -> None:
        """Tell the other ranks that there are no more plans."""
        self._send(_STOP, np.empty(0, np.int32))

    def _send(self, what: int, data: NDArray[np.int32]) -> None:
        frame = np.zeros(FRAME, np.int32)
        frame[:2] = what, len(data)
        first = data[:FRAME - 2]
        frame[2:2 + len(first)] = first
        dist.broadcast(torch.from_numpy(frame), 0)
        if len(data) > len(first):
            dist.broadcast(torch.from_numpy(np.ascontiguousarray(data[len(first):])), 0)
        self.plan_bytes += data.nbytes
        self.messages += 1

    def receive(self) -> NDArray[np.int32] | None:
        """The next plan from rank 0, or None when there are no more."""
        frame = torch.empty(FRAME, dtype=torch.int32)
        dist.broadcast(frame, 0)
        numbers = frame.numpy()
        what, length = int(numbers[0]), int(numbers[1])
        if what == _STOP:
            return None
        held = min(length, FRAME - 2)
        if length == held:
            return numbers[2:2 + held]
        rest = torch.empty(length - held, dtype=torch.int32)
        dist.broadcast(rest, 0)
        return np.concatenate([numbers[2:], rest.numpy()])

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def meeting_store(place: Place) -> dist.Store:
    """The key-value store that all ranks know; under torchrun its own, else this program's."""
    if place.torchrun:
        hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return dist.TCPStore(place.host, place.port, place.size, hosts, timedelta(seconds=START_SECONDS),
                             wait_for_workers=False)
    return dist.TCPStore(place.host, place.port, place.size, False, timedelta(seconds=START_SECONDS),
                         wait_for_workers=False)
