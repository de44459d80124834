"""Choosing from rows of logits where they lie: statistics, filters and draws as torch operations on a GPU.

The rules are those of `draw_kernels` (inverse of the cumulative distribution over rising ids; entries that tie with
the last kept one are kept), the last bits are the device's own. Rows go through in pieces of `PIECE`, always as many,
so that each operation has one shape and a row's bits cannot depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE = 32
"""Rows of every operation."""
_BLOCK = 256
_LOWEST = -87.0
"""Below this exponent a weight counts as zero, as in `row_kernels`."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Of each row of a piece, float64 [PIECE]: temperature, top_k, top_p, min_p, a uniform number in [0, 1), and
    whether the row is greedy (1) or not (0). `filtered`: some row has a filter."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    greedy: Tensor
    filtered: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Of rows [PIECE, vocabulary] float32: the first place of the maximum (int64), the maximum, the logarithm of the
    sum of exponentials (float64), and whether a row holds NaN or +inf, or has no finite entry."""

    best: Tensor
    peak: Tensor
    log_sum: Tensor
    not_a_number: Tensor
    no_mass: Tensor


def weigh(rows: Tensor, peak: Tensor, inverse: Tensor | float) -> Tensor:
    """exp((row - peak) * inverse), float32, zero below exp(-87)."""
    exponents = (rows - peak[:, None]) * inverse
    return torch.where(exponents < _LOWEST, 0.0, exponents.exp())


def block_sums(weights: Tensor) -> Tensor:
    """Sums of 256 neighbours each, [PIECE, blocks] float64."""
    short = -weights.shape[1] % _BLOCK
    return pad(weights, (0, short)).unflatten(1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)


def stats_of(rows: Tensor) -> Stats:
    """Statistics of raw rows."""
    best = rows.argmax(-1)
    peak = rows.gather(1, best[:, None])[:, 0]
    bad = rows.isnan().any(-1) | (peak == torch.inf)
    total = block_sums(weigh(rows, peak, 1.0)).sum(-1)
    return Stats(best, peak, peak.double() + total.log(), bad, peak == -torch.inf)


def last_place(weights: Tensor) -> Tensor:
    """The last place with any weight in each row, int64; 0 where there is none."""
    return ((weights > 0) * torch.arange(weights.shape[1], device=weights.device)).amax(-1)


def kept(rows: Tensor, peak: Tensor, knobs: Knobs, inverse: Tensor) -> Tensor:
    """The value at and above which each row's entries may be drawn, float32 [PIECE]."""
    least = torch.where(knobs.min_p > 0, peak.double() + knobs.min_p.log() / inverse.double(), -torch.inf).float()
    order = rows.sort(-1, descending=True).values
    width = rows.shape[1]
    limited = (knobs.top_k > 0) & (knobs.top_k < width)
    last = order.gather(1, (knobs.top_k.long().clamp(1, width) - 1)[:, None])[:, 0]
    least = torch.maximum(least, torch.where(limited, last, -torch.inf))
    weights = torch.where(order >= least[:, None], weigh(order, peak, inverse[:, None]), 0.0)
    running = weights.double().cumsum(-1)
    enough = (running < (knobs.top_p * running[:, -1])[:, None]).sum(-1).clamp(max=width - 1)
    nucleus = order.gather(1, enough[:, None])[:, 0]
    return torch.maximum(least, torch.where(knobs.top_p < 1, nucleus, -torch.inf))


def draw(rows: Tensor, stats: Stats, knobs: Knobs) -> Tensor:
    """One token a row, int64 [PIECE]: the maximum for greedy rows, else by the row's uniform number."""
    inverse = torch.where(knobs.greedy > 0, 1.0, 1.0 / knobs.temperature).float()
    weights = weigh(rows, stats.peak, inverse[:, None])
    if knobs.filtered:
        weights = torch.where(rows >= kept(rows, stats.peak, knobs, inverse)[:, None], weights, 0.0)
    sums = block_sums(weights)
    running = sums.cumsum(-1)
    target = knobs.uniform * running[:, -1]
    # Rounding may leave the target at the very end: the last block, or entry, with any weight is then meant.
    block = torch.minimum((running <= target[:, None]).sum(-1), last_place(sums))
    before = running.gather(1, block[:, None]) - sums.gather(1, block[:, None])
    places = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=rows.device)
    width = rows.shape[1]
    inside = torch.where(places < width, weights.gather(1, places.clamp(max=width - 1)), 0.0)
    passed = (before + inside.double().cumsum(-1) <= target[:, None]).sum(-1)
    chosen = block * _BLOCK + torch.minimum(passed, last_place(inside))
    return torch.where(knobs.greedy > 0, stats.best, chosen)
