"""An executor's parts on a GPU: fused kernels, a pool sized after a profile run, a pinned swap pool, decode graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pagedcli.attention.backends import make_backend
from pagedcli.attention.cuda import CudaBackend, TorchLauncher
from pagedcli.attention.interface import AttentionBackend, KVLayout
from pagedcli.core.config import CacheConfig
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.cuda_steps import CudaSteps
from pagedcli.execution.cuda_store import CudaKVStore, GpuSideStream
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.device_path import LargestStep, Steps
from pagedcli.execution.flat_batch import flatten, forward
from pagedcli.execution.interface import ExecutorLimits
from pagedcli.execution.kv_store import KVStore, PoolSize, Room


class DeviceMemory(Protocol):
    """A device's memory as its allocator tells it, bytes."""

    def settle(self) -> None:
        """Wait for the device, give cached memory back, forget the peak."""

    def allocated(self) -> int: ...

    def peak(self) -> int: ...

    def free_and_total(self) -> tuple[int, int]: ...


class GpuMemory:
    """`DeviceMemory` of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)


def room_beside(memory: DeviceMemory, utilization: float, run: Callable[[], None]) -> Room:
    """Bytes of a device that are left for the KV pool: its share of all, less what is held now (weights, and whatever
    other processes hold) and less what `run`, the largest step, takes for a while."""
    memory.settle()
    before = memory.allocated()
    run()
    spike = max(0, memory.peak() - before)
    memory.settle()
    free, total = memory.free_and_total()
    held = total - free
    return Room(int(total * utilization) - held - spike,
                f"{utilization:.0%} of the GPU's {total:,} bytes, less {held:,} in use and {spike:,} that a full step "
                "takes", f"--gpu-memory-utilization (now {utilization:g})")


def profile_plan(step: LargestStep, block_size: int) -> tuple[StepPlan, int]:
    """The largest step, and the blocks it needs: whole prompts that all lie in the same blocks, since only their
    memory matters."""
    longest = min(step.rows, step.positions)
    blocks = list(range(-(-longest // block_size)))
    lengths = [longest] * (step.rows // longest) + [step.rows % longest] * bool(step.rows % longest)
    logits = [min(step.logit_rows, step.rows) if place == 0 else 0 for place in range(len(lengths))]
    return StepPlan([Slice(seq, [0] * length, 0, blocks, min(length, rows))
                     for seq, (length, rows) in enumerate(zip(lengths, logits, strict=True))]), len(blocks)


class CudaPath:
    """A GPU. `same_bits` keeps prompts on the paged kernels, whose arithmetic for a row ignores its neighbours."""

    def __init__(self, device: torch.device, *, same_bits: bool, graphs: bool) -> None:
        self._device = device
        self._same_bits, self._graphs = same_bits, graphs

    def backend(self, name: str) -> AttentionBackend:
        return make_backend(name, launcher=TorchLauncher(self._device.index or 0), flash_prompts=not self._same_bits)

    def room(self, decoder: Decoder, backend: AttentionBackend, layout: KVLayout, dtype: torch.dtype,
             cache: CacheConfig, step: LargestStep) -> Room | None:
        plan, blocks = profile_plan(step, layout.block_size)
        pool = torch.zeros((blocks, layout.block_elements), dtype=dtype, device=self._device)
        backend.bind(layout, pool)

        def run() -> None:
            forward(decoder, backend, flatten(plan, layout.block_size)).float()  # float: samplers may widen them

        found = room_beside(GpuMemory(self._device), cache.gpu_memory_utilization, run)
        backend.bind(layout, pool[:1].clone())  # lets go of the trial's pool before the real one is made
        return Room(found.bytes + pool.nbytes, found.note, found.way_out)

    def store(self, layout: KVLayout, dtype: torch.dtype, size: PoolSize, backend: AttentionBackend) -> KVStore:
        assert isinstance(backend, CudaBackend), "pick_device lets no other backend run on a GPU"
        return CudaKVStore(layout, dtype, size, self._device, GpuSideStream(self._device), backend.copy_blocks)

    def steps(self, decoder: Decoder, backend: AttentionBackend, limits: ExecutorLimits) -> Steps:
        assert isinstance(backend, CudaBackend), "pick_device lets no other backend run on a GPU"
        made = CudaSteps(decoder, backend, limits, graphs=self._graphs)
        made.try_graphs()
        return made
