"""Random paged batches and an attention in float64 that knows nothing of blocks, shared by the attention tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from pagedcli.attention.interface import AttentionBackend, KVLayout, LayerSpec, build_layout
from pagedcli.core.plan import Slice, StepPlan


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec,
          sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of one whole sequence in float64: q [n, heads, key_dim] -> [n, heads, value_dim]."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(len(q), spec.heads, spec.value_dim, dtype=torch.float64)
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    seen = (behind >= 0) & (behind < (len(q) if spec.window is None else spec.window))
    for head in range(spec.heads):
        own = head // (spec.heads // spec.kv_heads)
        scores = q[:, head] @ k[:, own].T * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores[~seen] = -torch.inf
        top = scores.amax(1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks[head].double())
        weights = torch.exp(scores - top)
        total = weights.sum(1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[head].double() - top)
        out[:, head] = weights / total @ v[:, own]
    return out


@dataclass
class Sequences:
    """Whole sequences (q, k, v of every position) to be computed by a backend in any cut."""

    spec: LayerSpec
    lengths: list[int]
    source: torch.dtype
    seed: int = 0
    q: list[torch.Tensor] = field(init=False)
    k: list[torch.Tensor] = field(init=False)
    v: list[torch.Tensor] = field(init=False)
    sinks: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(self.seed)
        spec = self.spec

        def rows(length: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=make).to(self.source)

        self.q = [rows(n, spec.heads, spec.key_dim) * 2 for n in self.lengths]
        self.k = [rows(n, spec.kv_heads, spec.key_dim) for n in self.lengths]
        self.v = [rows(n, spec.kv_heads, spec.value_dim) for n in self.lengths]
        self.sinks = torch.randn(spec.heads, generator=make) if spec.sinks else None

    def rounded(self, cache: torch.dtype) -> list[torch.Tensor]:
        """float64 outputs of every sequence with keys and values as the cache holds them."""
        return [dense(q, k.to(cache), v.to(cache), self.spec, self.sinks)
                for q, k, v in zip(self.q, self.k, self.v, strict=True)]


def run(backend: AttentionBackend, seqs: Sequences, block: int, cache: torch.dtype, cuts: list[list[int]],
        order_seed: int = 0, pad: int = 1, only: list[int] | None = None, layers: int = 2) -> list[torch.Tensor]:
    """Outputs of every position, computed step by step over shuffled blocks full of NaN.

    cuts[step][i]: how many more positions of sequence i this step computes. `only`: order of the sequences in a batch
    (all, in order, by default). Blocks no sequence owns must still be NaN at the end.
    """
    spec = seqs.spec
    chosen = list(range(len(seqs.lengths))) if only is None else only
    needed = [-(-n // block) for n in seqs.lengths]
    total = sum(needed) + 3
    order = np.random.default_rng(order_seed).permutation(total).tolist()
    starts = np.cumsum([0, *needed]).tolist()
    tables = [order[a:b] for a, b in pairwise(starts)]
    layout = KVLayout((spec,) * layers, block)
    pool = torch.full((total, layout.block_elements), float("nan"), dtype=torch.float32).to(cache)
    reason = backend.supports(spec, cache, block)
    assert reason is None, reason
    backend.bind(layout, pool)
    done = [0] * len(seqs.lengths)
    out = [torch.full((n, spec.heads, spec.value_dim), float("nan"), dtype=seqs.source) for n in seqs.lengths]
    for cut in cuts:
        now = [i for i in chosen if cut[i]]
        plan = StepPlan([Slice(i, [0] * cut[i], done[i], tables[i]) for i in now])
        batch = build_layout(plan, block, pad)
        rows = len(batch.slots)

        def gather(parts: list[torch.Tensor], now: list[int] = now, cut: list[int] = cut, rows: int = rows,
                   ) -> torch.Tensor:
            real = torch.cat([parts[i][done[i]:done[i] + cut[i]] for i in now])
            spare = torch.full((rows - len(real), *real.shape[1:]), float("nan"), dtype=real.dtype)
            # As models hand them over: [1, heads, T, dim] in memory.
            return torch.cat([real, spare]).transpose(0, 1).contiguous().transpose(0, 1)

        backend.prepare(batch)
        result = backend.attend(layers - 1, gather(seqs.q), gather(seqs.k), gather(seqs.v), spec, seqs.sinks)
        assert result.shape == (rows, spec.heads, spec.value_dim) and result.dtype == seqs.source
        assert not result[batch.num_tokens:].any(), "padding rows must be zeros"
        row = 0
        for i in now:
            out[i][done[i]:done[i] + cut[i]] = result[row:row + cut[i]]
            row += cut[i]
            done[i] += cut[i]
    free = pool[torch.tensor(order[starts[-1]:])].float()
    assert bool(free.isnan().all()), "a block that belongs to nobody was written"
    assert bool(pool[:, :layout.key_offset(layers - 1)].float().isnan().all()), "another layer's part was written"
    return out


def in_one(lengths: list[int]) -> list[list[int]]:
    """Whole prompts in one step."""
    return [list(lengths)]


def one_by_one(lengths: list[int]) -> list[list[int]]:
    """Every position by a step of its own, as decoding does."""
    return [[int(step < n) for n in lengths] for step in range(max(lengths))]


def in_chunks(lengths: list[int], seed: int) -> list[list[int]]:
    """Random chunks, decodes and prompts mixed."""
    draw = np.random.default_rng(seed)
    left, cuts = list(lengths), []
    while any(left):
        cut = [int(min(n, draw.choice([0, 1, 1, draw.integers(1, 100)]))) for n in left]
        left = [n - c for n, c in zip(left, cut, strict=True)]
        if any(cut):
            cuts.append(cut)
    return cuts
