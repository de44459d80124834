"""The pool of key/value blocks on the device, the swap pool in host memory, and moves between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedcli.attention.host_arrays import HOST_DTYPES, lazy_zeros, words_of
from pagedcli.attention.interface import KVLayout
from pagedcli.core.config import CacheConfig
from pagedcli.core.devices import HOST, Device
from pagedcli.core.errors import CannotRunError
from pagedcli.core.wording import counted
from pagedcli.execution.host_memory import check_room, free_memory, holding
from pagedcli.execution.placement import torch_dtype

CPU_MEMORY_SHARE = 0.4
"""Share of the memory free now that a pool on the CPU takes when no size is given."""
MAX_DEFAULT_TOKENS = 1 << 20
"""A device pool whose size nobody gave, and any swap pool, holds at most this many: small models would else get
millions of blocks, and each block costs its keeper a few bytes and microseconds."""

POOL_WAY_OUT = "Lower --num-kv-blocks or --kv-cache-memory"

Moves = Sequence[tuple[int, int]]
Zeros = Callable[[tuple[int, int], Any], Any]
"""Makes zeros of a shape and a dtype."""


def kv_dtype(wanted: str, model_dtype: Any) -> Any:
    """The cache's dtype, numpy's or torch's as the model's is; `auto` is the model's own."""
    if wanted == "auto":
        return model_dtype
    name = "fp8_e4m3" if wanted == "fp8" else wanted
    return HOST_DTYPES[name] if isinstance(model_dtype, np.dtype) else torch_dtype(name)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks on the device and in host memory; `note` says where their numbers came from."""

    num_blocks: int
    host_blocks: int
    block_bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a device has for a pool, how they were found, and the option that would raise them."""

    bytes: int
    note: str
    way_out: str


def size_pool(layout: KVLayout, dtype: Any, cache: CacheConfig, device: Device,
              max_positions: int, room: Room | None = None) -> PoolSize:
    """How many blocks to hold: as given, by bytes, all of the `room` that was measured, or a share of free memory.

    CannotRunError when not even one block fits (it prints the bytes one request needs and the bytes given), or when a
    CPU has no room for the pool or, beside it, for the swap space that was asked for.
    """
    block_bytes = layout.block_elements * dtype.itemsize
    num_blocks, note = _device_blocks(layout, block_bytes, cache, device, max_positions, room)
    pool = num_blocks * block_bytes if device.type == "cpu" else 0
    check_room(_named(num_blocks, block_bytes), pool, device, POOL_WAY_OUT)
    host_blocks, host_note = _host_blocks(cache.swap_space, block_bytes, layout.block_size, pool)
    return PoolSize(num_blocks, host_blocks, block_bytes, note + host_note)


def _named(blocks: int, block_bytes: int) -> str:
    """What messages call a pool."""
    return f"{counted(blocks, 'KV block')} of {block_bytes:,} bytes"


def _device_blocks(layout: KVLayout, block_bytes: int, cache: CacheConfig, device: Device, max_positions: int,
                   room: Room | None) -> tuple[int, str]:
    """Blocks of the pool, and where their number came from."""
    if cache.num_blocks is not None:
        return cache.num_blocks, f"{counted(cache.num_blocks, 'block')}, as given"
    way_out = "--kv-cache-memory"
    if cache.memory is not None:
        given, note = cache.memory, f"{counted(cache.memory, 'byte')}, as given"
    elif room is not None:
        given, note, way_out = max(0, room.bytes), room.note, room.way_out
    else:
        free = free_memory(device)
        share = cache.gpu_memory_utilization if device.type == "cuda" else CPU_MEMORY_SHARE
        given = int(free * share)
        note = f"{share:.0%} of {free:,} bytes free on {device.type}"
    num_blocks = given // block_bytes
    if cache.memory is None and num_blocks * layout.block_size > MAX_DEFAULT_TOKENS:
        num_blocks = MAX_DEFAULT_TOKENS // layout.block_size
        note += f", capped at {MAX_DEFAULT_TOKENS:,} tokens"
    if num_blocks < 1:
        longest = -(-max_positions // layout.block_size) * block_bytes
        raise CannotRunError(
            f"the KV cache has {counted(given, 'byte')} ({note}), but one request needs at least one block of "
            f"{counted(layout.block_size, 'token')} = {block_bytes:,} bytes ({longest:,} for one of "
            f"{counted(max_positions, 'token')}). "
            f"Raise {way_out}, or lower --block-size or --max-model-len", "kv_cache_too_small")
    return num_blocks, note


def _host_blocks(swap_space: int, block_bytes: int, block_size: int, pool: int) -> tuple[int, str]:
    """Blocks of the swap pool, and a note where they are fewer than usual. Nobody asked for the usual size, so it
    shrinks to what the host has free beside the `pool` bytes of a CPU's pool; any other that does not fit is a
    CannotRunError."""
    blocks = min(swap_space // block_bytes, MAX_DEFAULT_TOKENS // block_size)
    free = max(0, free_memory(HOST) - pool)
    if blocks * block_bytes > free:
        if swap_space != CacheConfig().swap_space:
            raise CannotRunError(f"--swap-space = {swap_space:,} bytes: host memory has {free:,} free beside the KV "
                                 "pool. Lower it; 0 swaps nothing", "out_of_memory")
        return free // block_bytes, f"; swap space cut to the {counted(free, 'byte')} that host memory has free"
    return blocks, ""


class KVStore:
    """`pool`: [num_blocks, block_elements] on the device, zeroed: an array for a numpy dtype, else a tensor. The host
    pool exists from the first swap on.

    A block is one contiguous run over all layers, so each move below is of whole rows, whatever the block size (the
    paper's artefact makes one small copy per layer and block). Swaps here are between two pools in host memory; a
    GPU's are in cuda_store.
    """

    def __init__(self, layout: KVLayout, dtype: Any, size: PoolSize, device: Device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.size = size
        self._host: Any = None
        self.pool = self._allocate(size.num_blocks, device, self._zeros_on(device), size.block_bytes, POOL_WAY_OUT)

    def copy(self, moves: Moves) -> None:
        """Copy whole blocks within the pool; all sources are read before any destination is written."""
        if moves:
            pairs, raw = np.array(moves, np.int64), words_of(self.pool)
            raw[pairs[:, 1]] = raw[pairs[:, 0]]

    def swap_out(self, moves: Moves) -> None:
        """Copy (device block, host block) pairs to host memory."""
        if moves:
            _copy_rows(self._host_pool(), self.pool, moves)

    def swap_in(self, moves: Moves) -> None:
        """Copy (host block, device block) pairs back."""
        if moves:
            _copy_rows(self.pool, self._host_pool(), moves)

    def close(self) -> None:
        """Give both pools back."""
        self.pool = lazy_zeros((0, 0), self.dtype)
        self._host = None

    def _host_pool(self) -> Any:
        if self._host is None:
            # Its pages cost nothing until blocks are swapped to them, and size_pool found room for them before
            # the pool's own pages were touched: what is free by now says nothing against it.
            self._host = self._allocate(self.size.host_blocks, HOST, lazy_zeros, 0, "Lower --swap-space")
        return self._host

    def _zeros_on(self, device: Device) -> Zeros:
        """What makes a pool there."""
        assert device.type == "cpu", "a GPU's pool is made by cuda_store"
        return lazy_zeros

    def _allocate(self, blocks: int, device: Device, make: Zeros, checked_bytes: int, way_out: str) -> Any:
        """A pool of so many blocks, of which each is checked to have so many bytes free before it is made."""
        shape = (blocks, self.layout.block_elements)
        with holding(_named(blocks, self.size.block_bytes), device, way_out, blocks * checked_bytes):
            try:
                return make(shape, self.dtype)
            except (OSError, OverflowError) as fault:  # the system's refusal of a mapping
                raise MemoryError from fault


def _copy_rows(target: Any, source: Any, moves: Moves) -> None:
    """target[b] = source[a] for each (a, b), both in host memory: one pass, where a gather and a scatter are two."""
    there, here = words_of(target), words_of(source)
    for a, b in moves:
        there[b] = here[a]
