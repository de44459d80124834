"""Tensor parallel: one scheduler and one block table on rank 0, every rank computing its heads of every step.

Rank 0 sends each plan to all; the same block ids mean the same tokens on every rank, and a rank's block holds only its
own heads. Ranks add up their parts inside each layer, and rank 0 gets the logits (paper section 4.6).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pagedcli.attention.host_arrays import as_tensor, host_floats
from pagedcli.attention.interface import KVLayout
from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.devices import Device
from pagedcli.core.dtypes import dtype_name
from pagedcli.core.errors import CannotRunError, PagedError, UsageError
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.wording import counted
from pagedcli.execution.hf_model import HFDecoder
from pagedcli.execution.interface import Executor, ExecutorInfo
from pagedcli.execution.kv_store import PoolSize, Room, size_pool
from pagedcli.execution.loading import load_executor
from pagedcli.execution.model_hub import ModelSource, resolve_model
from pagedcli.execution.placement import pick_device, torch_device
from pagedcli.execution.plan_codec import PlanDecoder, PlanEncoder
from pagedcli.execution.probe import TOLERANCE, disagreement
from pagedcli.execution.rank_processes import RankProcesses
from pagedcli.execution.ranks import START_SECONDS, Place, Ranks, meeting_store
from pagedcli.execution.shapes import shape_from_config
from pagedcli.execution.sharding import check_heads, check_layers, split_model
from pagedcli.execution.torch_executor import TorchExecutor

JUDGED_TOKENS = 16
"""Tokens whose logits are compared before and after the split."""

_ORDERS, _NOTHING = "orders", b"nothing"


class Split:
    """This rank's part of a model, for `load_executor`. The group of ranks forms once the weights are read."""

    def __init__(self, place: Place, store: dist.Store, model: ModelConfig) -> None:
        self.place = place
        self._store = store
        self._same_bits = model.same_bits
        self._ranks: Ranks | None = None
        self.error = 0.0

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None, "ranks meet when the model is split"
        return self._ranks

    def device(self, device: Device) -> torch.device:
        """The one device of this rank. CannotRunError when the machine has too few."""
        if device.type != "cuda":
            return torch_device(device)
        have = torch.cuda.device_count()
        if self.place.local >= have:
            raise CannotRunError(f"--tensor-parallel-size {self.place.size} needs a GPU a rank, and this machine has "
                                 f"{have}", "no_device")
        torch.cuda.set_device(self.place.local)
        return torch.device("cuda", self.place.local)

    def apply(self, decoder: HFDecoder, device: torch.device, name: str) -> HFDecoder:
        """`decoder` (whole, on the CPU) cut to this rank's part, on its device.

        What it computes with the other ranks is compared with what it computed whole. CannotRunError when they differ.
        """
        check_layers(decoder.specs, self.place.size, name)
        ids = np.random.Generator(np.random.PCG64(1)).integers(decoder.vocab_size, size=(1, JUDGED_TOKENS))
        whole = decoder.eager(ids)
        self.whole_specs = decoder.specs
        self._ranks = Ranks(self.place, self._store, device, self._same_bits)
        head = split_model(decoder.module, self._ranks)
        torch.nn.Module.to(decoder.module, device)
        part = HFDecoder(decoder.module)
        theirs = host_floats(head.seen(as_tensor(whole))[0])
        self.error = disagreement(part.eager(ids)[0], theirs, exact=part.dtype == torch.float32)
        limit = TOLERANCE[dtype_name(part.dtype)]
        if self.error > limit:
            raise CannotRunError(f"{name}: split among {self.place.size} ranks its logits differ from the whole "
                                 f"model's by {self.error:.2g} (relative, limit {limit:g}), so "
                                 "its layers cannot be split this way", "no_split")
        return part

    def size_pool(self, layout: KVLayout, dtype: Any, cache: CacheConfig, device: Device,
                  max_positions: int, room: Room | None = None) -> PoolSize:
        """Blocks that every rank can hold. Sizes that a user gives are of all ranks together."""
        whole = KVLayout(self.whole_specs, layout.block_size)
        own_memory = device.type == "cuda" and cache.num_blocks is None and cache.memory is None
        size = size_pool(layout if own_memory else whole, dtype, cache, device, max_positions, room)
        hosts = size_pool(whole, dtype, replace(cache, num_blocks=size.num_blocks), device, max_positions).host_blocks
        num_blocks, host_blocks = self.ranks.least(size.num_blocks, hosts)
        return PoolSize(num_blocks, host_blocks, layout.block_elements * dtype.itemsize, size.note)


class TensorParallelExecutor(Executor):
    """Rank 0: sends each plan to the other ranks and runs its own part of it.

    `execute` raises CannotRunError once a rank has died. Block bytes in `limits` are of all ranks together.
    """

    def __init__(self, inner: TorchExecutor, ranks: Ranks, processes: RankProcesses | None, error: float) -> None:
        self.inner = inner
        self.ranks = ranks
        self._processes = processes
        self._encoder = PlanEncoder()
        self._closed = False
        self._broken = False
        self.limits = replace(inner.limits, bytes_per_block=ranks.size * inner.limits.bytes_per_block)
        own = inner.store.pool.nbytes
        self._info = replace(inner.info, notes=(
            *inner.info.notes,
            f"tensor parallel: {ranks.size} ranks, split logits within {error:.2g} of the whole model's, KV pool "
            f"{own:,} bytes a rank"))

    @property
    def info(self) -> ExecutorInfo:
        """Grows a note about the plans as they are sent."""
        if not self.ranks.messages:
            return self._info
        return replace(self._info, notes=(
            *self._info.notes, f"plans: {counted(self.ranks.messages, 'step')}, {self.plan_bytes_per_step:,.0f} bytes "
            "a step to each other rank (integers only)"))

    @info.setter
    def info(self, value: ExecutorInfo) -> None:
        self._info = value

    @property
    def plan_bytes_per_step(self) -> float:
        """Bytes of an encoded plan, on average."""
        return self.ranks.plan_bytes / max(self.ranks.messages, 1)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._processes is not None:
            self._processes.check()
        began = time.perf_counter()
        try:
            self.ranks.send_plan(self._encoder.encode(plan))
            sent = time.perf_counter() - began
            result = self.inner.execute(plan)
        except RuntimeError as fault:
            self._broken = True
            raise lost_rank(self._processes, self.ranks.size, fault) from fault
        return StepResult(result.logits, result.seconds + sent, {**result.parts, "plan": sent})

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self._broken and (self._processes is None or self._processes.fault() is None):
                self.ranks.send_stop()
        except RuntimeError:
            pass  # a rank is gone already; the rest end with their standard input
        finally:
            if self._processes is not None:
                self._processes.close()
            self.ranks.close()
            self.inner.close()


def lost_rank(processes: RankProcesses | None, size: int, fault: RuntimeError) -> PagedError:
    """What to tell of a collective that failed: which rank died, when that is known."""
    if isinstance(fault, torch.OutOfMemoryError):
        return CannotRunError(f"rank 0 ran out of memory: {fault}", "out_of_memory")
    found = None if processes is None else processes.fault(wait=2.0)
    if found is not None:
        return found
    reason = str(fault).strip().split("\n")[0][:200]
    return CannotRunError(f"one of the {size} ranks ended or cannot be reached ({reason}). Rows finished before it are "
                          "kept: run the same command again to go on", "rank_died")


def load_tensor_parallel(source: ModelSource, model: ModelConfig, cache: CacheConfig) -> TensorParallelExecutor:
    """Rank 0's executor, and the other ranks' processes unless torchrun has started them.

    UsageError for heads that do not divide; CannotRunError says what failed on which rank.
    """
    size = model.tensor_parallel_size
    shape = shape_from_config(source.read_config(), source.name)
    check_heads(shape.heads, shape.kv_heads, size, source.name)
    if pick_device(model.device, model.attention_backend).type == "cpu" and model.threads is None:
        model = replace(model, threads=max(1, len(os.sched_getaffinity(0)) // size))
    orders = {"model": asdict(model), "cache": asdict(cache)}
    place = Place.from_torchrun(os.environ, size)
    if place is not None:
        store = meeting_store(place)
        store.set(_ORDERS, json.dumps(orders))
        return _lead(place, store, None, source, model, cache)
    store = dist.TCPStore("127.0.0.1", 0, size, True, timedelta(seconds=START_SECONDS), wait_for_workers=False)
    place = Place(0, size, "127.0.0.1", store.port)
    processes = RankProcesses(
        size, lambda rank: {**orders, "place": asdict(replace(place, rank=rank, local=rank))}, model.threads or 1)
    try:
        return _lead(place, store, processes, source, model, cache)
    except BaseException:
        processes.close()
        raise


def _lead(place: Place, store: dist.Store, processes: RankProcesses | None, source: ModelSource, model: ModelConfig,
          cache: CacheConfig) -> TensorParallelExecutor:
    split = Split(place, store, model)
    try:
        inner = load_executor(source, model, cache, split)
        split.ranks.least(0)  # all have loaded
    except RuntimeError as fault:
        told = _told_fault(store, place.size)
        raise told or lost_rank(processes, place.size, fault) from fault
    if processes is not None and split.ranks.device.type == "cuda":
        processes.on_death = _abort_collectives
    return TensorParallelExecutor(inner, split.ranks, processes, split.error)


def _abort_collectives() -> None:
    """Let a main thread that waits for a GPU collective go on (to its error)."""
    dist.distributed_c10d._abort_process_group()


def _told_fault(store: dist.Store, size: int) -> PagedError | None:
    """The fault that another rank wrote down before it ended."""
    time.sleep(0.5)  # its connection closes a moment before or after the words arrive
    for rank in range(1, size):
        if store.check([f"fault/{rank}"]):
            return CannotRunError(f"rank {rank} of {size}: {store.get(f'fault/{rank}').decode()}", "rank_failed")
    return None


def follow_orders(orders: Mapping[str, Any]) -> None:
    """Be the rank that `orders` say, until rank 0 says stop or is gone."""
    place = Place(**orders["place"])
    _follow(place, meeting_store(place), orders)


def _follow(place: Place, store: dist.Store, orders: Mapping[str, Any]) -> None:
    model, cache = ModelConfig(**orders["model"]), CacheConfig(**orders["cache"])
    split = Split(place, store, model)
    try:
        executor = load_executor(resolve_model(model), model, cache, split)
        split.ranks.least(0)
    except PagedError as fault:
        store.set(f"fault/{place.rank}", fault.message)
        raise
    decoder = PlanDecoder()
    try:
        while (data := split.ranks.receive()) is not None:
            executor.execute(decoder.decode(data))
    except RuntimeError:
        return  # rank 0 or another is gone, and rank 0 tells the user
    finally:
        executor.close()
        split.ranks.close()


def follow_if_follower(size: int, variables: Mapping[str, str]) -> bool:
    """Under torchrun, be a rank above 0 to the end and return True; False for rank 0, and without torchrun.

    UsageError when torchrun's number of processes is not `size`.
    """
    place = Place.from_torchrun(variables, size)
    if place is None or place.rank == 0:
        return False
    store = meeting_store(place)
    end = time.monotonic() + START_SECONDS
    while not store.check([_ORDERS]):
        if time.monotonic() > end:
            raise CannotRunError(f"rank {place.rank}: rank 0 did not start within {START_SECONDS} s", "no_ranks")
        time.sleep(0.1)
    found = store.get(_ORDERS)
    if found != _NOTHING:
        _follow(place, store, json.loads(found))
    return True


def release_followers(size: int, variables: Mapping[str, str]) -> None:
    """Under torchrun, let the other ranks end when rank 0 had nothing to run. Harmless otherwise."""
    try:
        place = Place.from_torchrun(variables, size)
        if place is None or place.rank > 0:
            return
        store = meeting_store(place)
        if not store.check([_ORDERS]):
            store.set(_ORDERS, _NOTHING.decode())
            time.sleep(0.5)  # the store may end with this process; the others look every tenth of a second
    except (UsageError, RuntimeError):
        return
