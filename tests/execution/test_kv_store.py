"""The block pool: sizes, batched moves between places, and what is said when memory does not suffice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from pagedcli.attention.host_arrays import words_of
from pagedcli.attention.interface import KVLayout, LayerSpec
from pagedcli.core.config import CacheConfig
from pagedcli.core.dtypes import dtype_name
from pagedcli.core.errors import CannotRunError
from pagedcli.execution import host_memory, kv_store
from pagedcli.execution.kv_store import KVStore, PoolSize, kv_dtype, size_pool

CPU = torch.device("cpu")
LAYOUT = KVLayout((LayerSpec(4, 2, 8, 8, 1.0), LayerSpec(4, 2, 16, 8, 1.0)), 4)
BLOCK = 2 * 4 * (8 + 8) + 2 * 4 * (16 + 8)  # elements: heads x slots x (key + value), by layer


def test_a_block_holds_all_layers() -> None:
    assert LAYOUT.block_elements == BLOCK
    size = size_pool(LAYOUT, torch.bfloat16, CacheConfig(num_blocks=7, swap_space=5 * BLOCK * 2 + 1), CPU, 64)
    assert (size.num_blocks, size.host_blocks, size.block_bytes) == (7, 5, BLOCK * 2)


def test_bytes_are_turned_into_whole_blocks() -> None:
    size = size_pool(LAYOUT, torch.float32, CacheConfig(memory=3 * BLOCK * 4 + 11), CPU, 64)
    assert size.num_blocks == 3
    assert f"{3 * BLOCK * 4 + 11:,} bytes, as given" in size.note


def test_available_memory_is_what_psutil_says() -> None:
    import psutil

    assert host_memory._available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_without_a_size_a_share_of_free_memory_is_taken_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "free_memory", lambda device: 1_000_000)
    size = size_pool(LAYOUT, torch.float32, CacheConfig(), CPU, 64)
    assert size.num_blocks == 400_000 // (BLOCK * 4)
    assert "40% of 1,000,000 bytes free on cpu" in size.note
    monkeypatch.setattr(kv_store, "free_memory", lambda device: 1 << 45)
    assert size_pool(LAYOUT, torch.float32, CacheConfig(), CPU, 64).num_blocks * 4 == kv_store.MAX_DEFAULT_TOKENS


def test_too_little_memory_names_what_one_request_needs_and_what_was_given() -> None:
    with pytest.raises(CannotRunError) as fault:
        size_pool(LAYOUT, torch.float32, CacheConfig(memory=1000), CPU, 60)
    assert "1,000 bytes" in fault.value.message
    assert f"4 tokens = {BLOCK * 4:,} bytes" in fault.value.message
    assert f"{15 * BLOCK * 4:,} for one of 60 tokens" in fault.value.message


def filled(dtype: torch.dtype = torch.float32, blocks: int = 9, host: int = 6) -> KVStore:
    store = KVStore(LAYOUT, dtype, PoolSize(blocks, host, BLOCK * dtype.itemsize, ""), CPU)
    store.pool.copy_(torch.randn(store.pool.shape).to(dtype))
    return store


@pytest.mark.parametrize("like", [torch.float32, np.dtype(np.float32)], ids=["torch", "numpy"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_moves_carry_whole_blocks_bit_by_bit(name: str, like: Any) -> None:
    dtype = kv_dtype(name, like)
    assert isinstance(dtype, np.dtype) == isinstance(like, np.dtype)
    store = KVStore(LAYOUT, dtype, PoolSize(9, 6, BLOCK * dtype.itemsize, ""), CPU)
    pool = words_of(store.pool)
    pool[:] = np.random.default_rng(0).integers(100, size=pool.shape)
    before = pool.copy()
    store.copy([(1, 8), (1, 2), (3, 0)])
    store.swap_out([(4, 5), (5, 0), (8, 3)])
    pool[4:6] = 0
    store.swap_in([(5, 6), (0, 4), (3, 5)])
    assert [next(j for j in range(9) if (pool[i] == before[j]).all()) for i in range(9)] == \
        [3, 1, 1, 3, 5, 1, 4, 7, 1]


def test_a_chain_of_copies_reads_every_source_first() -> None:
    store = filled()
    before = store.pool.clone()
    store.copy([(0, 1), (1, 2), (2, 0)])
    assert torch.equal(store.pool[:3], before[[2, 0, 1]])


def test_random_swaps_against_a_dictionary() -> None:
    dice = random.Random(0)
    store = filled()
    device = {i: store.pool[i].clone() for i in range(9)}
    host: dict[int, torch.Tensor] = {}
    for _ in range(60):
        pairs = list(zip(dice.sample(range(9), 3), dice.sample(range(6), 3), strict=True))
        if dice.random() < 0.5 or not host:
            store.swap_out(pairs)
            host.update({there: device[here] for here, there in pairs})
        else:
            back = [(there, here) for here, there in pairs if there in host]
            store.swap_in(back)
            device.update({here: host[there] for there, here in back})
        assert all(torch.equal(store.pool[i], device[i]) for i in device)


def test_memory_is_lazy_and_aligned() -> None:
    """4 GiB of zeros: only touched pages may cost anything."""
    before = psutil.Process().memory_info().rss
    pool = kv_store.lazy_zeros((1 << 16, 1 << 15), torch.bfloat16)
    assert pool.data_ptr() % 4096 == 0
    pool[12345, :8] = 1
    assert float(pool[12345, :16].sum()) == 8 and float(pool[-1, -8:].sum()) == 0
    assert psutil.Process().memory_info().rss - before < 100e6


def test_a_pool_beyond_the_machine_is_one_clear_error() -> None:
    with pytest.raises(CannotRunError, match=r"^1,125,899,906,842,624 KV blocks of 1,280 bytes: "
                       r"1,441,151,880,758,558,720 bytes, and cpu memory has [\d,]+ free. Lower --num-kv-blocks or"):
        KVStore(LAYOUT, torch.float32, PoolSize(1 << 50, 0, BLOCK * 4, ""), CPU)


def test_a_pool_that_the_system_would_only_promise_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda device: 9 * BLOCK * 4 - 1)
    with pytest.raises(CannotRunError, match=r"^9 KV blocks of 1,280 bytes: 11,520 bytes, and cpu memory has 11,519"):
        KVStore(LAYOUT, torch.float32, PoolSize(9, 0, BLOCK * 4, ""), CPU)


def test_swap_space_that_was_asked_for_must_fit_and_the_usual_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "free_memory", lambda device: 10 * BLOCK * 4 + 5)
    assert size_pool(LAYOUT, torch.float32, CacheConfig(num_blocks=1), CPU, 64).host_blocks == 9
    with pytest.raises(CannotRunError, match="--swap-space = 14,080 bytes: host memory has 11,525 free beside"):
        size_pool(LAYOUT, torch.float32, CacheConfig(num_blocks=1, swap_space=11 * BLOCK * 4), CPU, 64)


def test_a_swap_space_that_was_cut_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "free_memory", lambda device: 10 * BLOCK * 4 + 5)
    note = size_pool(LAYOUT, torch.float32, CacheConfig(num_blocks=1), CPU, 64).note
    assert note == "1 block, as given; swap space cut to the 11,525 bytes that host memory has free"
    few = CacheConfig(num_blocks=1, swap_space=9 * BLOCK * 4)
    assert size_pool(LAYOUT, torch.float32, few, CPU, 64).note == "1 block, as given"


def test_a_pool_too_large_is_not_blamed_on_the_swap_space(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (kv_store, host_memory):
        monkeypatch.setattr(place, "free_memory", lambda device: 9 * BLOCK * 4 - 1)
    with pytest.raises(CannotRunError, match=r"^9 KV blocks of 1,280 bytes: 11,520 bytes, and cpu memory has 11,519 "
                       r"free\. Lower --num-kv-blocks"):
        size_pool(LAYOUT, torch.float32, CacheConfig(num_blocks=9, swap_space=BLOCK * 4), CPU, 64)


def test_the_first_swap_works_though_memory_has_shrunk_since_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual swap space takes all that is free at load; the pool's pages are touched before the first swap."""
    free = 20 * BLOCK * 4
    for place in (kv_store, host_memory):
        monkeypatch.setattr(place, "free_memory", lambda device: free)
    size = size_pool(LAYOUT, torch.float32, CacheConfig(num_blocks=4), CPU, 64)
    assert size.host_blocks == 16
    store = KVStore(LAYOUT, torch.float32, size, CPU)
    store.pool.copy_(torch.randn(store.pool.shape))
    before = store.pool.clone()
    free = 1
    store.swap_out([(1, 15), (2, 0)])
    store.swap_in([(0, 1), (15, 2)])
    assert torch.equal(store.pool, before[[0, 2, 1, 3]])


def test_a_swap_pool_that_the_system_refuses_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled()

    def refuse(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kv_store, "lazy_zeros", refuse)
    with pytest.raises(CannotRunError, match=r"^6 KV blocks of 1,280 bytes: does not fit in cpu memory, which has "
                       r"[\d,]+ bytes free\. Lower --swap-space"):
        store.swap_out([(0, 0)])


def test_a_closed_store_gives_its_memory_back() -> None:
    store = filled()
    store.swap_out([(0, 0)])
    store.close()
    store.close()
    assert store.pool.numel() == 0


@pytest.mark.parametrize("like", [torch.float32, np.dtype(np.float32)], ids=["torch", "numpy"])
def test_dtype_names_go_both_ways(like: Any) -> None:
    for name in ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        assert dtype_name(kv_dtype(name, like)) == name == dtype_name(name)
    assert kv_dtype("auto", like) is like
    assert kv_dtype("fp8", like) == kv_dtype("fp8_e4m3", like)
    with pytest.raises(ValueError, match="int64 is none of"):
        dtype_name(torch.int64)
