"""One set of cost coefficients for the six panels of Figure 12 and vLLM's batch in Figure 13.

Each round runs every system at its lowest rate and at the rate where its own curve passes the compared latency, keeps
the load of every step, and fits the coefficients to those loads: at low rates the latency, at the knee the rate (the
time that the same steps take under other coefficients moves the knee in proportion). Figure 13 joins in the same form:
the rate at which vLLM's batch of Alpaca requests is the printed one is to be that figure's rate. A few rounds do it.
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
from pagedcli.bench.paper_setup import PLACES, SYSTEMS, Run, mean_latency, paper_figures
from pagedcli.bench.paper_targets import PANELS, Target, find_rate, target_of
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
    "token_seconds": (1e-9, 1e-4), "allreduce_seconds": (1e-6, 3e-4), "prompt_seconds": (1e-6, 2e-2),
    "link_efficiency": (0.1, 1.0),
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


@dataclass(frozen=True)
class Knee:
    """A run at the edge of what its system bears: at `rate` requests/s, ours, where the paper has `wanted`."""

    trial: Trial
    rate: float
    wanted: float


@dataclass(frozen=True)
class Recorded:
    """What a fit needs of one target: its run at the lowest printed rate (None: no latency is judged) and its knee."""

    knee: Knee
    low: Trial | None = None
    low_latency: float = math.nan


def record(target: Target, source: LengthSource, coefficients: Mapping[str, Coefficients]) -> Recorded:
    """Run one curve of Figure 12 at its lowest rate and at its knee."""
    from pagedcli.bench.experiments_rates import TraceJob, length_of

    model, workload = PANELS[target.figure]
    run = Run(target.policy, model, workload, target.low_rate, source, limit=None, coefficients=coefficients)
    run = replace(run, duration=length_of(run))
    printed = paper_figures()["curves"][target.figure][target.policy]
    found = TraceJob(replace(run, limit=1.1), tuple(rate for rate, _ in printed), target.level, target.rate)()
    return Recorded(Knee(trial(replace(run, rate=found.rate)), found.rate, target.rate), trial(run), target.low_latency)


def record_batch(source: LengthSource, coefficients: Mapping[str, Coefficients], rate: float = 30.0,
                 duration: float = 1200.0) -> Recorded:
    """The rate at which vLLM's mean batch of Alpaca requests is Figure 13's, which is to be that figure's `rate`."""
    from pagedcli.bench.simulate import step_table

    run = Run("paged", "opt-13b", "alpaca-paper", rate, source, duration=duration, limit=None, horizon=duration,
              coefficients=coefficients)

    def batch(at: float) -> float:
        steps = step_table(replace(run, rate=at).events()[1]).between(duration / 6, duration)
        return float(steps.column("running").mean())

    found = find_rate(batch, paper_figures()["fig13"]["alpaca"]["paged"], rate, 0.005)
    return Recorded(Knee(trial(replace(run, rate=found)), found, rate))


def record_all(source: LengthSource, coefficients: Mapping[str, Coefficients]) -> list[Recorded]:
    """All curves of the Python systems, and Figure 13's batch last. Minutes; nothing keeps a caller from recording them
    in several processes instead."""
    targets = [target_of(figure, policy) for figure in PANELS for policy in SYSTEMS if policy != STATIC]
    return [*(record(target, source, coefficients) for target in targets), record_batch(source, coefficients)]


STEEP = 0.08
"""Errors beyond this count with the cube of their size, so that none of the 15 % is spent on a single cell."""

BATCH_WEIGHT = 40.0
"""Near the knee a batch is some ten times as sensitive as the rate: Figure 13's rate must fit to a few thousandths."""


def fit_round(recorded: Iterable[Recorded], start: Mapping[str, float], base: Coefficients,
              fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """Fit to recorded runs of the coefficients `start` and `base`; `fixed` holds some at other values."""
    items = list(recorded)
    before = split(start, base)
    spent = [float(recost(item.knee.trial, before).sum()) for item in items]

    def residuals(values: Mapping[str, float]) -> Floats:
        coefficients = split({**values, **(fixed or {})}, base)
        errors: list[float] = []
        for item, was in zip(items, spent, strict=True):
            moved = item.knee.rate * was / float(recost(item.knee.trial, coefficients).sum())
            error = math.log(moved / item.knee.wanted)
            if item.low is None:
                errors.append(BATCH_WEIGHT * error)
                continue
            late = math.log(latency_of(item.low, recost(item.low, coefficients)) / item.low_latency)
            errors += [each * math.sqrt(1 + (each / STEEP) ** 4) for each in (error, late)]
        return np.array(errors)

    return fit_positive(residuals, start, FREE, prior=2e-4)
