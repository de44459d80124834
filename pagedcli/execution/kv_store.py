"""The pool of key/value blocks on the device, the swap pool in host memory, and moves between them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from pagedcli.attention.interface import KVLayout
from pagedcli.core.config import CacheConfig
from pagedcli.core.errors import CannotRunError
from pagedcli.core.wording import counted
from pagedcli.execution.host_memory import check_room, free_memory, holding

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}
CPU_MEMORY_SHARE = 0.4
"""Share of the memory free now that a pool on the CPU takes when no size is given."""
MAX_DEFAULT_TOKENS = 1 << 20
"""A device pool whose size nobody gave, and any swap pool, holds at most this many: small models would else get
millions of blocks, and each block costs its keeper a few bytes and microseconds."""

POOL_WAY_OUT = "Lower --num-kv-blocks or --kv-cache-memory"

Moves = Sequence[tuple[int, int]]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name (`bf16`) of a torch dtype."""
    return next(name for name, value in TORCH_DTYPES.items() if value is dtype and name != "fp8")


def kv_dtype(wanted: str, model_dtype: torch.dtype) -> torch.dtype:
    """The cache's dtype; `auto` is the model's own."""
    return model_dtype if wanted == "auto" else TORCH_DTYPES[wanted]


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


def size_pool(layout: KVLayout, dtype: torch.dtype, cache: CacheConfig, device: torch.device,
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


def _device_blocks(layout: KVLayout, block_bytes: int, cache: CacheConfig, device: torch.device, max_positions: int,
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
    free = max(0, free_memory(torch.device("cpu")) - pool)
    if blocks * block_bytes > free:
        if swap_space != CacheConfig().swap_space:
            raise CannotRunError(f"--swap-space = {swap_space:,} bytes: host memory has {free:,} free beside the KV "
                                 "pool. Lower it; 0 swaps nothing", "out_of_memory")
        return free // block_bytes, f"; swap space cut to the {counted(free, 'byte')} that host memory has free"
    return blocks, ""


class KVStore:
    """`pool`: [num_blocks, block_elements] on the device, zeroed. The host pool exists from the first swap on.

    A block is one contiguous run over all layers, so each move below is of whole rows, whatever the block size (the
    paper's artefact makes one small copy per layer and block). Swaps here are between two pools in host memory; a
    GPU's are in cuda_store.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype, size: PoolSize, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.size = size
        self._host: torch.Tensor | None = None
        self.pool = self._allocate(size.num_blocks, device, pinned=False, checked=False, way_out=POOL_WAY_OUT)

    def copy(self, moves: Moves) -> None:
        """Copy whole blocks within the pool; all sources are read before any destination is written."""
        if moves:
            source, target = self._indices(moves, self.pool.device)
            raw = _bits(self.pool)
            raw.index_copy_(0, target, raw.index_select(0, source))

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
        self.pool = self.pool.new_empty(0)
        self._host = None

    def _host_pool(self) -> torch.Tensor:
        if self._host is None:
            pinned = self.pool.is_cuda
            # Unpinned pages cost nothing until blocks are swapped to them, and size_pool found room for them before
            # the pool's own pages were touched: what is free by now says nothing against it.
            self._host = self._allocate(self.size.host_blocks, torch.device("cpu"), pinned=pinned, checked=not pinned,
                                        way_out="Lower --swap-space")
        return self._host

    def _allocate(self, blocks: int, device: torch.device, *, pinned: bool, checked: bool,
                  way_out: str) -> torch.Tensor:
        shape = (blocks, self.layout.block_elements)
        size = 0 if checked else blocks * self.size.block_bytes
        with holding(_named(blocks, self.size.block_bytes), device, way_out, size):
            try:
                if device.type == "cpu" and not pinned:
                    return lazy_zeros(shape, self.dtype)
                return torch.zeros(shape, dtype=self.dtype, device=device, pin_memory=pinned)
            except (OSError, OverflowError) as fault:  # the system's refusal of a mapping
                raise MemoryError from fault

    @staticmethod
    def _indices(moves: Moves, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = torch.tensor(moves, dtype=torch.int64)
        return pairs[:, 0].to(device), pairs[:, 1].to(device)


def lazy_zeros(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on a page boundary of the host, whose pages the system makes when they are first touched.

    torch.zeros writes its zeros at once, which takes seconds for a pool of some gigabytes, most of it never used.
    """
    count = shape[0] * shape[1]
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not every kernel has huge pages; they only save time
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _copy_rows(target: torch.Tensor, source: torch.Tensor, moves: Moves) -> None:
    """target[b] = source[a] for each (a, b), both in host memory: one pass, where a gather and a scatter are two."""
    there, here = _bits(target).numpy(), _bits(source).numpy()
    for a, b in moves:
        there[b] = here[a]


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """The pool as integers of its element size: gathers and scatters are not defined for every float type."""
    return pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.element_size()])
