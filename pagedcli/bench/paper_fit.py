"""One set of cost coefficients for the six panels of Figure 12.

Each round runs every system at its lowest rate and at the rate where its own curve passes the compared latency, keeps
the load of every step, and fits the coefficients to those loads: at low rates the latency, at the knee the rate (the
time that the same steps take under other coefficients moves the knee in proportion). A few rounds settle it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.bench.least_squares import fit_positive
from pagedcli.bench.paper_lengths import LengthSource
from pagedcli.bench.paper_setup import PLACES, Run, mean_latency
from pagedcli.bench.paper_targets import Target
from pagedcli.bench.records import Floats
from pagedcli.execution.cost_model import CostModel, StepLoad
from pagedcli.execution.hardware import Coefficients

STATIC = "fastertransformer"
Loads = Floats
"""[steps, 5]: decodes, context, prompts, prompt tokens, prompt pairs."""


class Recorder(CostModel):
    """A cost model that keeps the load of every step it is asked about."""

    def __init__(self, inner: CostModel) -> None:
        self.__dict__.update(inner.__dict__)
        self.loads: list[tuple[int, int, int, int, int]] = []

    def seconds(self, load: StepLoad) -> float:
        self.loads.append((load.decodes, load.context, load.prompts, load.prompt_tokens, load.prompt_pairs))
        return super().seconds(load)


@dataclass(frozen=True)
class Trial:
    """One run with its loads. `starts`, `stops`: first and last step of every request, `outputs` its output tokens,
    `waited`: seconds from its arrival to its first step's begin."""

    run: Run
    latency: float
    loads: Loads
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    outputs: Floats


def trial(run: Run) -> Trial:
    """Run and record."""
    import pagedcli.bench.paper_setup as setup
    from pagedcli.engine.fast_forward import EventEngine
    from pagedcli.execution.simulated import SimulatedExecutor

    config = setup.config_for(run.policy, run.model, run.workload)
    deployment = PLACES[run.model].deployment(run.policy, run.block_size, run.coefficients)
    engine = EventEngine(config, SimulatedExecutor(deployment))
    recorder = engine.cost = Recorder(engine.cost)
    log = engine.run(run.requests(), run.limit)
    ends = np.array(log.ends)
    arrivals = np.array([item.group.request.arrival for item in log.ended])
    finishes = np.array([item.group.finished_at for item in log.ended])
    starts = np.searchsorted(ends, arrivals, side="right")
    stops = np.searchsorted(ends, finishes, side="left") + 1
    outputs = np.array([item.group.request.output_len or 1 for item in log.ended], dtype=np.float64)
    return Trial(run, mean_latency(log), np.array(recorder.loads, dtype=np.float64), starts, stops, outputs)


def step_seconds(model: CostModel, loads: Loads) -> Floats:
    """`CostModel.seconds` of many loads at once."""
    decodes, context, prompts, prompt_tokens, pairs = loads.T
    tokens = decodes + prompt_tokens
    seconds: Floats = (model.step + np.maximum(model.linear * tokens, model.weights) + model.key * context
                       + model.sequence * (decodes + prompts) + model.token * tokens + model.pair * pairs
                       + model.prompt * prompts)
    return seconds


def recost(item: Trial, coefficients: Mapping[str, Coefficients]) -> Floats:
    """Step times of a recorded run under other coefficients."""
    run = item.run
    deployment = PLACES[run.model].deployment(run.policy, run.block_size, coefficients)
    return step_seconds(deployment.cost_model, item.loads)


def latency_of(item: Trial, seconds: Floats) -> float:
    """Normalized latency of a recorded run with these step times, the schedule of steps left as it was."""
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    return float(np.mean((total[item.stops] - total[item.starts]) / item.outputs))


FREE: Mapping[str, tuple[float, float]] = {
    "weight_efficiency": (0.5, 0.9), "flop_efficiency": (0.3, 0.8), "kv_efficiency": (0.2, 0.9),
    "layer_seconds": (1e-6, 1e-3), "step_seconds": (1e-4, 2e-2), "sequence_seconds": (1e-7, 1e-3),
    "token_seconds": (1e-9, 1e-4), "allreduce_seconds": (1e-6, 3e-4), "prompt_seconds": (1e-6, 1e-2),
    "ft_step_seconds": (1e-4, 2e-2), "ft_layer_seconds": (1e-6, 1e-3), "ft_allreduce_seconds": (1e-7, 3e-4),
    "ft_sequence_seconds": (1e-6, 3e-3),
}
"""Fitted coefficients and the range that makes physical sense. `ft_`: FasterTransformer's software."""


def split(values: Mapping[str, float], base: Coefficients) -> dict[str, Coefficients]:
    """Coefficients by policy from fitted values ("" for the Python systems)."""
    own: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith("ft_")}
    main = replace(base, **own)
    theirs: dict[str, float] = {"sequence_seconds": 0.0, "prompt_seconds": 0.0}
    theirs |= {name[3:]: value for name, value in values.items() if name.startswith("ft_")}
    return {"": main, STATIC: replace(main, **theirs)}


def fit_round(trials: Mapping[tuple[str, str], tuple[Trial, Trial, float]], targets: Iterable[Target],
              start: Mapping[str, float], base: Coefficients) -> dict[str, float]:
    """Fit to recorded runs. `trials`: for each target its low-rate run, its run at the knee, and our rate there."""
    wanted = list(targets)
    before = split(start, base)
    spent = {target.key: float(recost(trials[target.key][1], before).sum()) for target in wanted}

    def residuals(values: Mapping[str, float]) -> Floats:
        coefficients = split(values, base)
        errors: list[float] = []
        for target in wanted:
            low, knee, rate = trials[target.key]
            latency = latency_of(low, recost(low, coefficients))
            errors.append(math.log(latency / target.low_latency))
            moved = rate * spent[target.key] / float(recost(knee, coefficients).sum())
            errors.append(math.log(moved / target.rate))
        return np.array(errors)

    return fit_positive(residuals, start, FREE, prior=2e-4)


def source_of(file: Any = None) -> LengthSource:
    """The default length source of a fit."""
    return LengthSource(file)
