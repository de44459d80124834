"""The GPU's block pool without a GPU: order of copies, and a side stream that runs as late as it may."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedcli.attention.interface import KVLayout, LayerSpec
from pagedcli.execution.cuda_store import CudaKVStore, in_order, runs
from pagedcli.execution.kv_store import KVStore, Moves, PoolSize

LAYOUT = KVLayout((LayerSpec(4, 2, 8, 8, 1.0),), 4)
BLOCKS, HOST = 12, 20
SIZE = PoolSize(BLOCKS, HOST, LAYOUT.block_elements * 4, "")
CPU = torch.device("cpu")


class LateStream:
    """A side stream at its slowest: nothing queued here happens before main waits for it. Whoever forgets to wait reads
    or overwrites blocks too early, and the data show it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.behind_main = False
        self.waits = 0

    def after_main(self) -> None:
        self.behind_main = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.behind_main, "a copy that may overtake main"
        self.queue.append(lambda: target.copy_(source))

    def mark(self) -> int:
        self.behind_main = False
        return len(self.queue)

    def main_waits(self, mark: int) -> None:
        self.waits += 1
        for act in self.queue[self.done:mark]:
            act()
        self.done = max(self.done, mark)


def one_by_one(pool: torch.Tensor, moves: Moves) -> None:
    for source, target in moves:
        pool[target] = pool[source].clone()


def store(stage_blocks: int = 3) -> tuple[CudaKVStore, LateStream, list[Moves]]:
    side, copied = LateStream(), []

    def copier(moves: Moves) -> None:
        copied.append(moves)
        one_by_one(made.pool, moves)

    made = CudaKVStore(LAYOUT, torch.float32, SIZE, CPU, side, copier, stage_blocks * SIZE.block_bytes)
    made.pool.copy_(torch.randn(made.pool.shape))
    return made, side, copied


@st.composite
def copies(draw: st.DrawFn) -> list[tuple[int, int]]:
    targets = draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS))
    return [(draw(st.integers(0, BLOCKS - 1)), target) for target in targets]


@given(copies())
def test_copies_read_every_source_first(moves: list[tuple[int, int]]) -> None:
    made, _, copied = store()
    plain = KVStore(LAYOUT, torch.float32, SIZE, CPU)
    plain.pool.copy_(made.pool)
    made.copy(moves)
    plain.copy(moves)
    assert torch.equal(made.pool, plain.pool)
    if in_order(moves):
        assert len(copied) == 1 and len(copied[0]) == sum(source != target for source, target in moves)


def test_order_of_chains_and_circles() -> None:
    assert in_order([(0, 1), (1, 2), (2, 3)]) == [(2, 3), (1, 2), (0, 1)]
    assert in_order([(5, 6), (6, 7), (5, 8)]) is not None
    assert in_order([(0, 1), (1, 0)]) is None
    assert in_order([(4, 4)]) == []


def test_neighbours_are_moved_together() -> None:
    assert list(runs([(3, 7), (4, 8), (5, 9), (6, 2), (7, 3), (9, 4)])) == [(3, 7, 3), (6, 2, 2), (9, 4, 1)]
    assert list(runs([])) == []


@pytest.mark.parametrize("stage_blocks", [1, 3, 50])
def test_random_swaps_on_the_slowest_stream(stage_blocks: int) -> None:
    """Blocks are overwritten right after a swap-out, as the next step does, while the copy to the host still waits."""
    dice = random.Random(0)
    made, _, _ = store(stage_blocks)
    device = {block: made.pool[block].clone() for block in range(BLOCKS)}
    host: dict[int, torch.Tensor] = {}
    for _ in range(150):
        count = dice.randrange(1, 8)
        here, there = dice.sample(range(BLOCKS), count), dice.sample(range(HOST), count)
        if dice.random() < 0.5:
            made.swap_out(list(zip(here, there, strict=True)))
            host.update({b: device[a] for a, b in zip(here, there, strict=True)})
            for block in here:
                device[block] = torch.randn(LAYOUT.block_elements)
                made.pool[block] = device[block]
        else:
            back = [(b, a) for a, b in zip(here, there, strict=True) if b in host]
            made.swap_in(back)
            device.update({a: host[b] for b, a in back})
        assert all(torch.equal(made.pool[block], device[block]) for block in range(BLOCKS))


def test_a_swap_out_within_the_buffers_is_not_waited_for() -> None:
    made, side, _ = store(stage_blocks=3)
    before = made.pool.clone()
    made.swap_out([(0, 3), (1, 4), (2, 5), (7, 9)])
    assert side.waits == 0 and side.done == 0
    made.pool.zero_()
    made.swap_in([(3, 0), (9, 7), (5, 2)])
    assert side.waits == 1
    assert torch.equal(made.pool[[0, 7, 2]], before[[0, 7, 2]]) and not made.pool[1].any()
    made.swap_out([(0, 1), (7, 2)])
    made.close()
    made.close()
    assert side.done == len(side.queue) and made.pool.numel() == 0
