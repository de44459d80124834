"""The paper's set-ups as simulations: models on their devices, workloads, systems, rates (section 6.1, Table 1)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np

from pagedcli.bench.paper_lengths import PAPER_SEED, LengthSource, chat_lengths
from pagedcli.bench.simulate import light_requests, run_events
from pagedcli.core.config import CacheConfig, RunConfig, SchedulerConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.beam_script import BeamScript
from pagedcli.engine.fast_forward import EventEngine, Log
from pagedcli.execution.hardware import Coefficients, Hardware, find_hardware
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment
from pagedcli.workloads import Poisson
from pagedcli.workloads.wmt16 import prefix_tokens

SYSTEMS: Mapping[str, str] = {
    "fastertransformer": "FasterTransformer", "orca-max": "Orca (Max)", "orca-pow2": "Orca (Pow2)",
    "orca-oracle": "Orca (Oracle)", "paged": "vLLM",
}
"""Policies by their names in the paper, worst first as its figures list them."""

STATIC = "fastertransformer"
STATIC_DURATION = 3600.0
"""The artefact ran FasterTransformer for an hour on every model, the other systems 900 s on OPT-175B."""

TRANSLATION = "translation"
"""The builds of section 6.4 are others than those of Figure 12 (LLaMA, greedy, pinned prefixes): coefficients of their
own, and 256 sequences at most in both systems, as in the artefact."""


@cache
def paper_figures() -> Mapping[str, Any]:
    """What the paper printed (paper_figures.json)."""
    data: Mapping[str, Any] = json.loads((files("pagedcli.bench") / "paper_figures.json").read_text("utf-8"))
    return data


@dataclass(frozen=True, slots=True)
class Place:
    """One row of Table 1, or of section 6.4: a model on its devices, and how long its runs last, s. `software`: whose
    coefficients its systems have, where it is not the policy that decides; `max_sequences`: cap of vLLM's batch."""

    model: str
    hardware: str
    devices: int
    duration: float
    software: str | None = None
    max_sequences: int = 2048

    def deployment(self, policy: str, block_size: int = 16, coefficients: Mapping[str, Coefficients] | None = None,
                   max_len: int | None = None) -> Deployment:
        """The simulated devices. `coefficients` (by policy, "" for all others) replace the hardware file's."""
        hardware: Hardware = find_hardware(self.hardware)
        if coefficients is not None:
            others = {name: value for name, value in coefficients.items() if name}
            hardware = replace(hardware, coefficients=coefficients[""], engines=others)
        return Deployment(hardware, SHAPES[self.model], self.devices, policy=policy, software=self.software,
                          block_size=block_size, max_positions=max_len)


PLACES: Mapping[str, Place] = {place.model: place for place in (
    Place("opt-13b", "a100-40gb", 1, 3600.0),
    Place("opt-66b", "a100-40gb", 4, 3600.0),
    Place("opt-175b", "a100-80gb", 8, 900.0),
    Place("llama-13b", "a100-40gb", 1, 1200.0, TRANSLATION, 256),
)}

STATIC_BATCH: Mapping[tuple[str, str], int] = {
    ("opt-13b", "sharegpt"): 5, ("opt-13b", "alpaca-paper"): 14, ("opt-66b", "sharegpt"): 2,
    ("opt-66b", "alpaca-paper"): 8, ("opt-175b", "sharegpt"): 24, ("opt-175b", "alpaca-paper"): 80,
}
"""FasterTransformer's batch sizes, set by hand in the paper's artefact ("as large as fits")."""


def config_for(policy: str, model: str = "opt-13b", workload: str = "sharegpt", *,
               preemption: str = "auto") -> RunConfig:
    """A system as the paper ran it: whole prompts under the 2,560-token cap, no prefix cache, watermark 1 %."""
    most = PLACES[model].max_sequences if policy == "paged" and model in PLACES else 256
    return RunConfig(
        policy=policy, cache=CacheConfig(prefix_cache=False, watermark=0.01),
        scheduler=SchedulerConfig(max_num_seqs=most, chunked_prefill=False,
                                  preemption=preemption,  # type: ignore[arg-type]  # checked by the caller's choices
                                  static_batch=STATIC_BATCH.get((model, workload), 5)))


def sampling(width: int = 1, beam: bool = False) -> SamplingParams:
    """Sampling of the paper's runs: n random samples, or a beam search, all of forced length."""
    if beam:
        return SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, n=width, use_beam_search=True,
                              beam_width=width)
    return SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True, n=width)


def requests_at(lengths: Sequence[tuple[int, int]], rate: float, duration: float, params: SamplingParams | None = None,
                seed: int = PAPER_SEED) -> list[Request]:
    """Requests over `duration` s at Poisson `rate`/s. One set of draws for all rates and systems, only scaled."""
    arrivals = Poisson(rate).within(duration, seed)
    repeated = [lengths[number % len(lengths)] for number in range(len(arrivals))]
    return light_requests(repeated, [float(when) for when in arrivals], params)


def papers_requests(rows: Sequence[tuple[int, int]], rate: float, duration: float,
                    params: SamplingParams | None = None, seed: int = PAPER_SEED) -> list[Request]:
    """The requests that the paper's artefact makes of these rows: Poisson counts in quanta of 10 ms, the first rows as
    many as arrive (repeated where there are fewer), shuffled."""
    counts = np.random.RandomState(seed).poisson(rate * (10 / 1000), int(duration * 100.0))
    arrivals = np.repeat(np.arange(len(counts)) * (10 / 1000), counts)
    taken = [rows[number % len(rows)] for number in range(len(arrivals))]
    random.Random(seed).shuffle(taken)
    return light_requests(taken, arrivals.tolist(), params)


@dataclass(frozen=True, slots=True)
class Point:
    """One run: rate (requests/s) and normalized latency (s/token; inf when cut short as certain to be over)."""

    rate: float
    latency: float
    steps: int = 0
    requests: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Run:
    """One run of one system, as a value that can be sent to another process. `limit`: see EventEngine.run; `horizon`:
    cut the run there, s."""

    policy: str
    model: str
    workload: str
    rate: float
    source: LengthSource
    width: int = 1
    beam: bool = False
    duration: float | None = None
    limit: float | None = 1.1
    horizon: float = math.inf
    seed: int = PAPER_SEED
    block_size: int = 16
    preemption: str = "auto"
    shots: int = 0
    beams: BeamScript | None = None
    coefficients: Mapping[str, Coefficients] | None = None

    @property
    def exact(self) -> bool:
        """Whether these are the paper's very requests."""
        return self.source.exact(self.workload)

    @property
    def span(self) -> float:
        """Seconds in which requests arrive."""
        return self.duration or (STATIC_DURATION if self.policy == STATIC else PLACES[self.model].duration)

    def requests(self) -> list[Request]:
        params = sampling(self.width, self.beam)
        if self.exact:
            return papers_requests(self.source.draw(self.workload), self.rate, self.span, params, self.seed)
        if self.workload == "chat":
            arrivals = Poisson(self.rate).within(self.span, self.seed)
            lengths = chat_lengths(len(arrivals), self.source.seed + self.seed)
        else:
            lengths = self.source.draw(self.workload, self.seed)
        if self.shots:
            lengths = [(prompt + prefix_tokens(self.shots), output) for prompt, output in lengths]
        return requests_at(lengths, self.rate, self.span, params, self.seed)

    def events(self) -> tuple[EventEngine, Log]:
        """Run it."""
        config = config_for(self.policy, self.model, self.workload, preemption=self.preemption)
        deployment = PLACES[self.model].deployment(self.policy, self.block_size, self.coefficients)
        prefix = (0,) * prefix_tokens(self.shots) if self.shots and self.policy == "paged" else ()
        return run_events(config, deployment, self.requests(), beams=self.beams, limit=self.limit, prefix=prefix,
                          horizon=self.horizon)

    def point(self) -> Point:
        """Run it and keep the headline."""
        engine, log = self.events()
        return Point(self.rate, mean_latency(log), len(log.ends), len(log.ended),
                     engine.counters.preempt_recompute + engine.counters.preempt_swap)


def mean_latency(log: Log) -> float:
    """Normalized latency of a finished run, s/token (paper section 6.1); inf when it was cut short."""
    if log.stopped is not None:
        return math.inf
    values = [((item.group.finished_at or 0.0) - item.group.request.arrival) / (item.group.request.output_len or 1)
              for item in log.ended]
    return float(np.mean(values)) if values else math.nan


def crossing(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Rate at which a rising curve of (rate, latency) points passes `limit`, between two points on a logarithmic
    latency axis; None when it does not."""
    ordered = sorted(points)
    for (low, below), (high, above) in pairwise(ordered):
        if below <= limit < above:
            if math.isinf(above):
                return low
            share = (math.log(limit) - math.log(below)) / (math.log(above) - math.log(below))
            return low + share * (high - low)
    return None
