"""One decode attention call over scattered blocks, and the same over one contiguous block a sequence (Figure 18a)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedcli.attention.interface import KVLayout, LayerSpec, build_layout
from pagedcli.core.plan import Slice, StepPlan

SPEC = LayerSpec(heads=9, kv_heads=3, key_dim=64, value_dim=64, scale=64 ** -0.5)


def decode_pair(batch: int, context: int, block_size: int = 16) -> tuple[Callable[[], None], Callable[[], None]]:
    """Calls that attend for `batch` sequences of `context` tokens: over blocks of `block_size` in random order, and
    over one block of `context` tokens each."""
    return _call(batch, context, block_size), _call(batch, context, context)


def _call(batch: int, context: int, block_size: int) -> Callable[[], None]:
    import torch

    from pagedcli.attention.backends import make_backend

    each = -(-context // block_size)
    order = np.random.default_rng(0).permutation(batch * each).tolist()
    plan = StepPlan([Slice(seq, (0,), context - 1, order[seq * each:(seq + 1) * each]) for seq in range(batch)])
    layout = KVLayout((SPEC,), block_size)
    maker = torch.Generator().manual_seed(0)
    pool = torch.randn(batch * each, layout.block_elements, generator=maker)
    backend = make_backend("cpu")
    backend.bind(layout, pool)
    backend.warm_up((SPEC,), torch.float32)
    backend.prepare(build_layout(plan, block_size))
    query = torch.randn(batch, SPEC.heads, SPEC.key_dim, generator=maker)
    key = torch.randn(batch, SPEC.kv_heads, SPEC.key_dim, generator=maker)
    value = torch.randn(batch, SPEC.kv_heads, SPEC.value_dim, generator=maker)

    def call() -> None:
        backend.attend(0, query, key, value, SPEC)

    return call
