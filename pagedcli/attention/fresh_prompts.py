"""Prompts that nothing is cached of, by torch's scaled_dot_product_attention: flash attention on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedcli.attention.interface import LayerSpec

Rows = Sequence[tuple[int, int]]
"""(first, end) rows of each sequence."""


def plain_causal(spec: LayerSpec, prompts: Rows) -> bool:
    """Whether the layer's rule over these prompts is nothing but causal softmax, which is all that torch's fused
    kernels know: no soft cap, no sinks, no window that a prompt reaches beyond."""
    longest = max(end - first for first, end in prompts)
    return spec.softcap is None and not spec.sinks and (spec.window is None or spec.window >= longest)


def attend_prompts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompts: Rows, spec: LayerSpec) -> torch.Tensor:
    """q [T, heads, key_dim], k, v [T, kv_heads, ..] of whole prompts -> [T, heads, value_dim] in q's dtype; rows of no
    prompt are zeros. One call a prompt, since the fused kernels take no mask."""
    out = torch.empty(len(q), spec.heads, spec.value_dim, dtype=q.dtype, device=q.device)
    done = 0
    for first, end in prompts:
        rows, keys, values = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            rows, keys.to(q.dtype), values.to(q.dtype), is_causal=True, scale=spec.scale, enable_gqa=spec.group > 1)
        out[first:end] = mixed[0].transpose(0, 1)
        done = end
    out[done:] = 0
    return out
