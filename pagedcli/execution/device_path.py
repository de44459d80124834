"""What differs between devices when an executor is made: its backend, its pool's room, its store, how steps run.

The executor itself asks no device's name. `HostPath` is here; a GPU's is in cuda_path.py, imported when there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pagedcli.attention.backends import make_backend
from pagedcli.attention.interface import AttentionBackend, KVLayout
from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.devices import Device
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.flat_batch import FlatBatch, forward
from pagedcli.execution.interface import ExecutorLimits
from pagedcli.execution.kv_store import KVStore, PoolSize, Room
from pagedcli.execution.placement import torch_device


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The most that one step holds: rows (tokens), rows that want logits, tokens of one sequence."""

    rows: int
    logit_rows: int
    positions: int


class Steps(Protocol):
    """How a step's forward runs. `notes` say what a user should know of it; they may grow."""

    notes: tuple[str, ...]

    def run(self, batch: FlatBatch) -> Any:
        """Logits [wanted, vocabulary] of the model's dtype or float32, where they were computed, valid until the next
        run; None when no row wants any."""

    def parts(self, seconds: float) -> dict[str, float]:
        """The last run's seconds by part."""


class DevicePath(Protocol):
    """Makes an executor's parts for one device."""

    def backend(self, name: str) -> AttentionBackend: ...

    def room(self, decoder: Decoder, backend: AttentionBackend, layout: KVLayout, dtype: Any,
             cache: CacheConfig, step: LargestStep) -> Room | None:
        """Bytes for the KV pool, found by running the largest step; None where memory is shared with the host."""

    def store(self, layout: KVLayout, dtype: Any, size: PoolSize, backend: AttentionBackend) -> KVStore: ...

    def steps(self, decoder: Decoder, backend: AttentionBackend, limits: ExecutorLimits) -> Steps: ...


class HostSteps:
    """Steps of a CPU: the forward has run when the call returns."""

    notes: tuple[str, ...] = ()

    def __init__(self, decoder: Decoder, backend: AttentionBackend) -> None:
        self._decoder, self._backend = decoder, backend

    def run(self, batch: FlatBatch) -> Any:
        logits = forward(self._decoder, self._backend, batch)
        return logits if batch.wanted else None

    def parts(self, seconds: float) -> dict[str, float]:
        attention = self._decoder.attention_seconds
        return {"attention": attention, "linear": seconds - attention}


class HostPath:
    """A CPU."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def backend(self, name: str) -> AttentionBackend:
        return make_backend(name)

    def room(self, decoder: Decoder, backend: AttentionBackend, layout: KVLayout, dtype: Any,
             cache: CacheConfig, step: LargestStep) -> Room | None:
        del decoder, backend, layout, dtype, cache, step
        return None

    def store(self, layout: KVLayout, dtype: Any, size: PoolSize, backend: AttentionBackend) -> KVStore:
        del backend
        return KVStore(layout, dtype, size, self._device)

    def steps(self, decoder: Decoder, backend: AttentionBackend, limits: ExecutorLimits) -> Steps:
        del limits
        return HostSteps(decoder, backend)


def device_path(device: Device, model: ModelConfig, *, graphs: bool) -> DevicePath:
    """The path of a device. `graphs`: whether decode steps may be captured (a GPU's only)."""
    if device.type != "cuda":
        return HostPath(device)
    from pagedcli.execution.cuda_path import CudaPath

    return CudaPath(torch_device(device), same_bits=model.same_bits, graphs=graphs)
