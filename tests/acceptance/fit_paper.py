"""How the simulator's shipped numbers were fitted to the paper's printed ones, and how far a new fit lies from them.

    python -m tests.acceptance.fit_paper tilt     # Alpaca: TILT from four printed numbers (bench/paper_alpaca)
    python -m tests.acceptance.fit_paper costs    # a round of the A100 coefficients (bench/paper_fit)

`make fit-paper` runs both: a quarter of an hour on two cores. With the real ShareGPT lengths at hand (`../shared`, or
`--lengths`) the requests are the paper's own. A fit that has come to rest gives back what is shipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pagedcli.bench import paper_alpaca
from pagedcli.bench.paper_fit import STATIC, Recorded, fit_round, record, record_batch, split
from pagedcli.bench.paper_lengths import LengthSource
from pagedcli.bench.paper_setup import SYSTEMS, Run, paper_figures
from pagedcli.bench.paper_targets import PANELS, target_of
from pagedcli.bench.records import Floats
from pagedcli.bench.simulate import step_table
from pagedcli.execution.hardware import find_hardware
from pagedcli.workloads import find_spec

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "paper" / "sharegpt_lengths.csv"
FITTED = ("layer_seconds", "prompt_seconds", "allreduce_seconds", "link_efficiency")
"""Free in a round. Figure 12 cannot tell a sequence's cost from a prompt's, so `sequence_seconds` stays as shipped: it
was chosen by Figure 14's parallel sampling."""
WINDOW = 600.0, 3600.0
"""Seconds that Figure 13 averages over, of an hour of arrivals at 30 requests/s."""


def batch(policy: str, tilt: tuple[float, ...]) -> float:
    """Mean batch of Figure 13, Alpaca, with the lengths tilted so."""
    paper_alpaca.TILT = tilt  # of this worker alone; its draws are made anew
    run = Run(policy, "opt-13b", "alpaca-paper", 30.0, LengthSource(), duration=WINDOW[1], limit=None,
              horizon=WINDOW[1])
    return float(step_table(run.events()[1]).between(*WINDOW).column("running").mean())


def batches(tilt: Floats) -> Mapping[str, float]:
    """Both of Orca's, each in a process of its own that ends with it: lengths are kept once drawn."""
    found = {}
    for policy in ("orca-oracle", "orca-pow2"):
        with ProcessPoolExecutor(1) as worker:
            found[policy] = worker.submit(batch, policy, tuple(tilt.tolist())).result()
    print(f"  tilt {[float(f'{value:.4g}') for value in tilt]}: "
          + ", ".join(f"{policy} {value:.2f}" for policy, value in found.items()), flush=True)
    return found


def fit_lengths() -> None:
    printed = {name: find_spec("alpaca-paper").paper[f"{name}_mean"] for name in ("prompt", "output")}
    tilt = paper_alpaca.fit_tilt({**printed, **paper_figures()["fig13"]["alpaca"]}, batches)
    for name, found, shipped in zip(("prompt", "output", "output x Oracle's blocks", "output x Pow2's blocks"),
                                    tilt.tolist(), paper_alpaca.TILT, strict=True):
        print(f"{name}: {found:.4g} fitted, {shipped:.4g} shipped")


def recorded(figure: str, policy: str, lengths: Path | None) -> Recorded:
    """One target's runs under the shipped coefficients."""
    coefficients = split({}, find_hardware("a100-40gb").coefficients)
    source = LengthSource(lengths)
    return record_batch(source, coefficients) if figure == "fig13" else record(target_of(figure, policy), source,
                                                                              coefficients)


def fit_costs(lengths: Path | None) -> None:
    jobs = [(figure, policy, lengths) for figure in PANELS for policy in SYSTEMS if policy != STATIC]
    with ProcessPoolExecutor(2) as workers:
        items = list(workers.map(recorded, *zip(*jobs, ("fig13", "paged", lengths), strict=True)))
    base = find_hardware("a100-40gb").coefficients
    shipped = {name: asdict(base)[name] for name in FITTED}
    fitted = fit_round(items, shipped, base)
    errors = np.array([item.knee.rate / item.knee.wanted - 1 for item in items])
    print(f"rates under the shipped coefficients: {len(items)} targets, at most {np.abs(errors[:-1]).max():.1%} off in "
          f"Figure 12, {errors[-1]:+.2%} in Figure 13")
    for name in FITTED:
        print(f"{name}: {fitted[name]:.4g} after a round, {shipped[name]:.4g} shipped")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("tilt", "costs", "all"), nargs="?", default="all")
    parser.add_argument("--lengths", type=Path, default=REAL if REAL.is_file() else None,
                        help="the artefact's ShareGPT lengths; without them a fitted set's")
    given = parser.parse_args()
    if given.what in ("tilt", "all"):
        fit_lengths()
    if given.what in ("costs", "all"):
        fit_costs(given.lengths)


if __name__ == "__main__":
    main()
