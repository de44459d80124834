"""Swaps and copies of the GPU's store, interleaved with writes to the blocks they free, as a busy engine does."""

from __future__ import annotations

import random
from typing import Any

import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.interface import KVLayout, LayerSpec
from pagedcli.execution.cuda_store import CudaKVStore, GpuSideStream, SideStream
from pagedcli.execution.kv_store import PoolSize

BLOCKS, HOST = 96, 128


def random_moves(steps: int, device: str = "cuda", side: SideStream | None = None,
                 backend: CudaBackend | None = None, spec: LayerSpec | None = None) -> dict[str, Any]:
    """`steps` random swap-outs, swap-ins and copies; freed blocks are overwritten at once. What every block must hold
    is kept as one number a block, so nothing is synchronised before the end. {"steps", "different"}."""
    layout = KVLayout((spec or LayerSpec(8, 8, 128, 128, 0.1),) * 8, 16)
    place = torch.device(device)
    backend = backend or CudaBackend()
    size = PoolSize(BLOCKS, HOST, layout.block_elements * 4, "")
    store = CudaKVStore(layout, torch.float32, size, place, side or GpuSideStream(place), backend.copy_blocks,
                        stage_bytes=5 * size.block_bytes)
    backend.bind(layout, store.pool)
    dice = random.Random(0)
    holds, host = [0.0] * BLOCKS, dict[int, float]()
    checks: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        count = dice.randrange(1, 13)
        here, there = dice.sample(range(BLOCKS), count), dice.sample(range(HOST), count)
        act = dice.randrange(3)
        if act == 0:
            store.swap_out(list(zip(here, there, strict=True)))
            host.update({b: holds[a] for a, b in zip(here, there, strict=True)})
            for number, block in enumerate(here):   # the next step writes where they were
                holds[block] = float(step * 16 + number)
                store.pool[block].fill_(holds[block])
        elif act == 1:
            back = [(b, a) for a, b in zip(here, there, strict=True) if b in host]
            store.swap_in(back)
            for b, a in back:
                holds[a] = host[b]
        else:
            sources = [dice.randrange(BLOCKS) for _ in here]
            store.copy(list(zip(sources, here, strict=True)))
            moved = [holds[source] for source in sources]
            for block, value in zip(here, moved, strict=True):
                holds[block] = value
        expected = torch.tensor(holds, device=place)[:, None]
        checks.append((store.pool != expected).any(1).sum())
    different = int(torch.stack(checks).sum())
    store.close()
    return {"steps": steps, "different": different}
