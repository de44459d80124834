"""Measures a workload's length distribution and writes the fit that pagedcli ships (`samples/*.json`).

    python -m pagedcli.workloads.fit pairs sharegpt LENGTHS.csv --max-total 2047 --describe "..."
    python -m pagedcli.workloads.fit chat chat TURNS.csv --describe "..."

Only quantiles, correlations and summary statistics are written: no text and no row of the source. A tool for the
people who maintain the fits; nothing else imports it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.workloads.chat_model import ChatModel, simulate_turns
from pagedcli.workloads.lengths import (
    KNOTS,
    Floats,
    LengthModel,
    Lengths,
    LengthStats,
    Marginal,
    normal_knots,
    rank_correlation,
)
from pagedcli.workloads.readers import read_table
from pagedcli.workloads.traces import conversations_from_lengths

_DRAWS = 200_000


def quantiles(values: Lengths) -> Floats:
    """Quantiles of whole numbers at KNOTS, each number spread evenly over +-0.5.

    Spreading makes the round trip exact: a draw that falls within half of a number rounds back to it.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    spread = ordered.copy()
    starts = np.flatnonzero(np.diff(ordered, prepend=np.nan) != 0)
    for start, stop in zip(starts, [*starts[1:], len(ordered)], strict=True):
        count = stop - start
        spread[start:stop] += (np.arange(count) + 0.5) / count - 0.5
    middle = (np.arange(len(ordered)) + 0.5) / len(ordered)
    found = np.interp(KNOTS, middle, spread)
    # The middle knot stands at the median itself: a value half-way between two numbers would let the drawn median
    # fall on either.
    half = KNOTS.index(0.5)
    median = float(np.median(ordered))
    found[half] = median
    found[:half] = np.minimum(found[:half], median)
    found[half + 1:] = np.maximum(found[half + 1:], median)
    return found


def remap(normal_kept: Floats, target: Floats) -> Marginal:
    """The quantile function that sends these normal draws to the target quantiles."""
    knots = normal_knots(len(KNOTS))
    at = np.quantile(normal_kept, KNOTS)
    values = np.interp(knots, at, target)
    return Marginal(tuple(round(float(v), 2) for v in np.maximum.accumulate(values)))


def solve(measure: Callable[[float], float], target: float, start: float) -> float:
    """The argument, within +-0.97, at which an increasing measure meets the target (secant steps)."""
    x0, y0 = start, measure(start)
    x1 = float(np.clip(start + (target - y0), -0.97, 0.97))
    for _ in range(6):
        y1 = measure(x1)
        if abs(y1 - target) < 1e-3 or x1 == x0 or y1 == y0:
            break
        x0, y0, x1 = x1, y1, float(np.clip(x1 + (target - y1) * (x1 - x0) / (y1 - y0), -0.97, 0.97))
    return x1


def fit_pairs(prompt: Lengths, output: Lengths, max_total: int | None) -> LengthModel:
    """Measured quantiles, and the copula's correlation that gives draws the measured rank correlation."""
    margins = [Marginal(tuple(round(float(v), 2) for v in quantiles(values))) for values in (prompt, output)]

    def model(rho: float) -> LengthModel:
        return LengthModel(margins[0], margins[1], rho, max_total)

    def measure(rho: float) -> float:
        pairs = model(rho).sample(_DRAWS, np.random.default_rng(1))
        return rank_correlation(pairs[:, 0], pairs[:, 1])

    target = rank_correlation(prompt, output)
    return model(solve(measure, target, 2 * np.sin(np.pi * target / 6)))


def stats_json(prompt: Lengths, output: Lengths) -> dict[str, Any]:
    """Summary of both lengths and their rank correlation, rounded for the file."""
    def rounded(values: Lengths) -> dict[str, float]:
        return {k: round(v, 3) for k, v in asdict(LengthStats.of(values)).items()}

    return {"rows": len(prompt), "prompt": rounded(prompt), "output": rounded(output),
            "rank_correlation": round(rank_correlation(prompt, output), 4)}


def pairs_json(model: LengthModel) -> dict[str, Any]:
    """The `pairs` object that `lengths.pair_model` reads."""
    return {"rho": round(model.rho, 4), "max_total": model.max_total, "least": model.prompt.least,
            "prompt": list(model.prompt.values), "output": list(model.output.values)}


def fit_chat(turns: list[list[tuple[int, int]]]) -> ChatModel:
    """A model of whole conversations: turn counts, and lengths that stay alike within a conversation."""
    counts = np.array([len(c) for c in turns])
    later = [c for c in turns if len(c) > 1]
    goal = {
        "first_query": quantiles(np.array([c[0][0] for c in turns])),
        "first_output": quantiles(np.array([c[0][1] for c in turns])),
        "later_query": quantiles(np.array([t[0] for c in later for t in c[1:]])),
        "later_output": quantiles(np.array([t[1] for c in later for t in c[1:]])),
    }
    # The share of variance that a conversation fixes: the correlation of its first two turns.
    within_output = rank_correlation([c[0][1] for c in later], [c[1][1] for c in later])
    within_query = rank_correlation([c[0][0] for c in later], [c[1][0] for c in later])
    # How length goes with the number of turns, by the conversation's mean rank-free length.
    turns_output = rank_correlation(counts, [int(np.mean([t[1] for t in c])) for c in turns])
    turns_query = rank_correlation(counts, [int(np.mean([t[0] for t in c])) for c in turns])
    pair = rank_correlation([t[0] for c in later for t in c[1:]], [t[1] for c in later for t in c[1:]])
    turn_marginal = Marginal(tuple(round(float(v), 2) for v in quantiles(counts)))
    model = ChatModel(turn_marginal, within_query=within_query, within_output=within_output,
                      turns_query=turns_query, turns_output=turns_output, pair=pair,
                      **{name: Marginal(tuple(values)) for name, values in goal.items()})
    for _ in range(4):
        drawn = simulate_turns(model, 60_000, np.random.default_rng(2))
        first = drawn.turn == 0
        model = ChatModel(
            turn_marginal, within_query=within_query, within_output=within_output,
            turns_query=turns_query, turns_output=turns_output, pair=pair,
            first_query=remap(drawn.query_normal[first], goal["first_query"]),
            first_output=remap(drawn.output_normal[first], goal["first_output"]),
            later_query=remap(drawn.query_normal[~first], goal["later_query"]),
            later_output=remap(drawn.output_normal[~first], goal["later_output"]))
    return model


def main(argv: list[str] | None = None) -> None:
    """Fits one source and writes its sample next to this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("pairs", "chat"))
    parser.add_argument("name")
    parser.add_argument("source", type=Path)
    parser.add_argument("--max-total", type=int, default=None)
    parser.add_argument("--describe", required=True, help="what was measured, for the file")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object merged into the file")
    args = parser.parse_args(argv)
    rows = read_table(args.source).rows()
    data: dict[str, Any] = {"name": args.name, "measured_from": args.describe, **args.extra}
    if args.kind == "pairs":
        kept = [(r.prompt_len, r.output_len) for r in rows if r.prompt_len > 0 and r.output_len > 0
                and (args.max_total is None or r.prompt_len + r.output_len <= args.max_total)]
        prompt, output = np.array([k[0] for k in kept]), np.array([k[1] for k in kept])
        data["measured"] = stats_json(prompt, output)
        data["pairs"] = pairs_json(fit_pairs(prompt, output, args.max_total))
        times = np.array([r.arrival for r in rows if r.arrival is not None])
        if len(times) > 2:
            gaps = np.diff(np.sort(times))
            data["arrivals"] = {"rate": round(float(1 / gaps.mean()), 4),
                                "burstiness": round(float(gaps.mean() ** 2 / gaps.var()), 4)}
    else:
        turns = conversations_from_lengths([(r.prompt_len, r.output_len) for r in rows])
        flat = [t for c in turns for t in c]
        data["measured"] = {"conversations": len(turns), "turns_mean": round(len(flat) / len(turns), 3),
                            **stats_json(np.array([t[0] for t in flat]), np.array([t[1] for t in flat]))}
        data["chat"] = fit_chat(turns).to_json()
    target = Path(__file__).parent / "samples" / f"{args.name}.json"
    target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
