"""Alpaca lengths as the paper's four printed numbers have them: the measured fit, tilted as little as does it.

The paper's Alpaca rows are not to be had; of them it prints the mean prompt and output (Figure 11), and what Orca's
batches hold (Figure 13). There the queue never empties, so that the batches of Orca (Oracle) and (Pow2) depend on one
number of the lengths each: the chunk that a sequence reserves, averaged over time, that is over requests weighted by
their outputs. Among all distributions with these four means, the one of least relative entropy to the fit weighs each
draw by exp(TILT . features); it is drawn by resampling the fit's draws with those weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pagedcli.bench.records import Floats
from pagedcli.workloads import find_spec
from pagedcli.workloads.lengths import Lengths
from pagedcli.workloads.spec import PAPER_MAX_TOTAL
from pagedcli.workloads.synthetic import model_of

ALPACA_RHO = -0.20
"""Correlation of the Alpaca copula. The fit's own, -0.30, has the set's rank correlation; memory sees how many full
blocks prompts have while their outputs last (mean over requests weighted by output length): 0.529 in the measured set,
0.475 with -0.30, 0.530 with -0.20."""

TILT: tuple[float, ...] = (-7.825e-4, -1.637e-3, 2.045e-4, -7.26e-5)
"""Weights of `features` in the exponent, as `fit_tilt` finds them for the paper's four numbers."""

_BLOCK = 16
_CANDIDATES = 4
"""Draws of the fit per row: at its tail a draw stands for many rows, so that some are drawn several times."""


# OPT's tokenizer puts one </s> before every text, and the artefact's lengths count it: the shortest ShareGPT texts have
# 2 tokens. The Alpaca fit was measured with another tokenizer, so one token is added and the means are the paper's.
def fitted_pairs(count: int, rng: np.random.Generator) -> Lengths:
    """(prompt, output) tokens as measured, scaled to the printed means; int64, at most [count, 2]."""
    spec = find_spec("alpaca-paper")
    model = model_of(spec, False).scaled_to(spec.paper["prompt_mean"] - 1, spec.paper["output_mean"] - 1)
    pairs = replace(model, rho=ALPACA_RHO).sample(count, rng) + 1
    kept: Lengths = pairs[pairs.sum(axis=1) <= PAPER_MAX_TOTAL]
    return kept


def _power_of_two(values: Lengths) -> Lengths:
    """The next power of two at or above each value, at least 1."""
    powers: Lengths = 1 << np.ceil(np.log2(np.maximum(values, 1))).astype(np.int64)
    return powers


def chunks(pairs: Lengths, estimates: Lengths) -> Lengths:
    """Blocks that Orca's buddy allocator holds for each pair when the output is taken for `estimates` tokens."""
    slots = np.minimum(pairs[:, 0] + estimates, PAPER_MAX_TOTAL + 1)
    return _power_of_two(-(-slots // _BLOCK))


def features(pairs: Lengths) -> Floats:
    """[pairs, 4]: prompt tokens, output tokens, and output tokens times the blocks held by Oracle and by Pow2."""
    prompt, output = pairs.T
    oracle, pow2 = chunks(pairs, output), chunks(pairs, _power_of_two(output))
    return np.stack([prompt, output, output * oracle, output * pow2], axis=1).astype(np.float64)


def tilted(exponents: Floats) -> Floats:
    """Weights that sum to 1."""
    weights: Floats = np.exp(exponents - exponents.max())
    return weights / weights.sum()


def alpaca_pairs(count: int, seed: int) -> Lengths:
    """`count` (prompt, output) tokens of the tilted fit, int64 [count, 2]."""
    rng = np.random.default_rng(seed)
    pairs = fitted_pairs(_CANDIDATES * count, rng)
    shares = np.cumsum(tilted(features(pairs) @ np.array(TILT)))
    # One row from each 1/count of the weight: less luck than independent draws.
    places = np.searchsorted(shares, (np.arange(count) + rng.random()) / count)
    drawn: Lengths = pairs[rng.permutation(np.minimum(places, len(pairs) - 1))]
    return drawn


def solve_tilt(values: Floats, means: Floats) -> Floats:
    """The exponents' weights [k] under which the columns of `values` [n, k] have these `means`: the least of a convex
    function (the logarithm of the weights' sum), by Newton steps that are halved until they go down."""
    spread = values.std(axis=0)
    scaled = (values - means) / spread
    tilt = np.zeros(len(means))

    def height(at: Floats) -> float:
        exponents = scaled @ at
        top = float(exponents.max())
        return top + float(np.log(np.exp(exponents - top).sum()))

    for _ in range(200):
        weights = tilted(scaled @ tilt)
        slope = weights @ scaled
        if float(np.abs(slope).max()) < 1e-9:
            break
        move = np.linalg.solve((scaled * weights[:, None]).T @ scaled - np.outer(slope, slope), -slope)
        now = height(tilt)
        while height(tilt + move) > now and float(np.abs(move).max()) > 1e-12:
            move = move / 2
        tilt = tilt + move
    return tilt / spread


def fit_tilt(printed: Mapping[str, float], batches: Callable[[Floats], Mapping[str, float]], rounds: int = 4,
             draws: int = 600_000) -> Floats:
    """TILT for the paper's numbers. `printed`: mean `prompt` and `output` tokens, mean batches of `orca-oracle` and
    `orca-pow2`; `batches`: those two as simulated with a tilt. A batch is nearly the pool over the mean chunk, so that
    chunks are corrected by the ratio of the simulated to the printed batch, some rounds."""
    values = features(fitted_pairs(draws, np.random.default_rng(0)))
    wanted = np.array([printed["prompt"], printed["output"], values[:, 2].mean(), values[:, 3].mean()])
    tilt = np.zeros(4)
    for _ in range(rounds):
        found = batches(tilt)
        wanted[2:] *= [found[policy] / printed[policy] for policy in ("orca-oracle", "orca-pow2")]
        tilt = solve_tilt(values, wanted)
    return tilt
