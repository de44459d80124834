"""The paper's set-ups as simulations: models on their devices, workloads, systems, rates (section 6.1, Table 1).

Lengths are drawn from the fitted sets (no dataset is shipped); `Lengths` says which, and takes a file of real ones.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.bench.simulate import light_requests, run_events
from pagedcli.core.config import CacheConfig, RunConfig, SchedulerConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.beam_script import BeamScript
from pagedcli.engine.fast_forward import EventEngine, Log
from pagedcli.execution.hardware import Coefficients, Hardware, find_hardware
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment
from pagedcli.workloads import Poisson, WorkloadOptions, find_spec
from pagedcli.workloads.chat import Conversation, schedule
from pagedcli.workloads.readers import read_table
from pagedcli.workloads.spec import PAPER_MAX_TOTAL
from pagedcli.workloads.synthetic import conversations, draw_pairs, model_of
from pagedcli.workloads.wmt16 import prefix_tokens

SYSTEMS: Mapping[str, str] = {
    "fastertransformer": "FasterTransformer", "orca-max": "Orca (Max)", "orca-pow2": "Orca (Pow2)",
    "orca-oracle": "Orca (Oracle)", "paged": "vLLM",
}
"""Policies by their names in the paper, worst first as its figures list them."""

PAPER_SEED = 0
SET_SIZE: Mapping[str, int] = {"sharegpt": 40_000, "alpaca-paper": 52_002, "wmt16": 3_000}
"""Rows drawn of each fitted set; longer runs repeat them, as the paper's did its data."""

STATIC = "fastertransformer"
STATIC_DURATION = 3600.0
"""The artefact ran FasterTransformer for an hour on every model, the other systems 900 s on OPT-175B."""

NEW_CONVERSATION = 0.1
"""Share of chat arrivals that open a conversation. The artefact has 0.5 for vLLM and 0.1 for the Orcas, but as many
turns as arrivals, so that each turn of its conversations is served once either way; with 0.1 so are ours."""


@cache
def paper_figures() -> Mapping[str, Any]:
    """What the paper printed (paper_figures.json)."""
    data: Mapping[str, Any] = json.loads((files("pagedcli.bench") / "paper_figures.json").read_text("utf-8"))
    return data


@dataclass(frozen=True, slots=True)
class Place:
    """One row of Table 1, or of section 6.4: a model on its devices, and how long its runs last, s."""

    model: str
    hardware: str
    devices: int
    duration: float

    def deployment(self, policy: str, block_size: int = 16, coefficients: Mapping[str, Coefficients] | None = None,
                   max_len: int | None = None) -> Deployment:
        """The simulated devices. `coefficients` (by policy, "" for all others) replace the hardware file's."""
        hardware: Hardware = find_hardware(self.hardware)
        if coefficients is not None:
            others = {name: value for name, value in coefficients.items() if name}
            hardware = replace(hardware, coefficients=coefficients[""], engines=others)
        return Deployment(hardware, SHAPES[self.model], self.devices, policy=policy, block_size=block_size,
                          max_positions=max_len)


PLACES: Mapping[str, Place] = {place.model: place for place in (
    Place("opt-13b", "a100-40gb", 1, 3600.0),
    Place("opt-66b", "a100-40gb", 4, 3600.0),
    Place("opt-175b", "a100-80gb", 8, 900.0),
    Place("llama-13b", "a100-40gb", 1, 1200.0),
)}

STATIC_BATCH: Mapping[tuple[str, str], int] = {
    ("opt-13b", "sharegpt"): 5, ("opt-13b", "alpaca-paper"): 14, ("opt-66b", "sharegpt"): 2,
    ("opt-66b", "alpaca-paper"): 8, ("opt-175b", "sharegpt"): 24, ("opt-175b", "alpaca-paper"): 80,
}
"""FasterTransformer's batch sizes, set by hand in the paper's artefact ("as large as fits")."""


def config_for(policy: str, model: str = "opt-13b", workload: str = "sharegpt", *,
               preemption: str = "auto") -> RunConfig:
    """A system as the paper ran it: whole prompts under the 2,560-token cap, no prefix cache, watermark 1 %."""
    paged = policy == "paged"
    return RunConfig(
        policy=policy, cache=CacheConfig(prefix_cache=False, watermark=0.01),
        scheduler=SchedulerConfig(max_num_seqs=2048 if paged else 256, chunked_prefill=False,
                                  preemption=preemption,  # type: ignore[arg-type]  # checked by the caller's choices
                                  static_batch=STATIC_BATCH.get((model, workload), 5)))


@dataclass(frozen=True)
class LengthSource:
    """Where request lengths come from. `file`: real ShareGPT lengths (`input,output` rows), else the fitted set."""

    file: Path | None = None
    seed: int = PAPER_SEED

    def exact(self, workload: str) -> bool:
        """Whether the rows are the paper's own, in its order: then its very requests can be served."""
        return workload == "sharegpt" and self.file is not None

    def draw(self, workload: str, draw: int = 0) -> list[tuple[int, int]]:
        """(prompt, output) tokens: a file's rows in their order, else draw number `draw` of the fitted set."""
        if self.exact(workload):
            assert self.file is not None
            return _file_lengths(self.file)
        return _lengths(workload, self.seed + draw)

    def describe(self, workload: str) -> str:
        """One line for reports."""
        if self.exact(workload):
            assert self.file is not None
            return (f"ShareGPT lengths from {self.file.name} (real), requests drawn from them as the paper's artefact "
                    "does: the first rows, as many as arrive, shuffled with seed 0")
        return f"{workload}: synthetic lengths, drawn from the shipped fit"


@cache
def _file_lengths(file: Path) -> list[tuple[int, int]]:
    """Rows that pass the paper's filter (sum below 2,048)."""
    rows = [(row.prompt_len, row.output_len) for row in read_table(file).rows()]
    return [(prompt, output) for prompt, output in rows
            if prompt and output and prompt + output <= PAPER_MAX_TOTAL]


ALPACA_RHO = -0.20
"""Correlation of the Alpaca copula. The fit's own, -0.30, has the set's rank correlation; memory sees how many full
blocks prompts have while their outputs last (mean over requests weighted by output length): 0.529 in the measured set,
0.475 with -0.30, 0.530 with -0.20."""

WMT_FACTORS = (1.126, 0.751)
"""LLaMA's tokens per token of the WMT fit (SmolLM2's tokenizer, which splits German finely), for English prompts and
German outputs: measured on 300 sentence pairs with both tokenizers."""


# OPT's tokenizer puts one </s> before every text, and the artefact's lengths count it: the shortest ShareGPT texts have
# 2 tokens. The Alpaca fit was measured with another tokenizer, so one token is added and the means are the paper's.
@cache
def _lengths(workload: str, seed: int) -> list[tuple[int, int]]:
    spec = find_spec(workload)
    if workload == "wmt16":
        model = model_of(spec, False)
        model = replace(model, prompt_factor=WMT_FACTORS[0], output_factor=WMT_FACTORS[1])
        pairs = model.sample(SET_SIZE[workload], np.random.default_rng(seed))
    elif workload == "alpaca-paper":
        model = model_of(spec, False).scaled_to(spec.paper["prompt_mean"] - 1, spec.paper["output_mean"] - 1)
        model = replace(model, rho=ALPACA_RHO)
        pairs = model.sample(SET_SIZE[workload], np.random.default_rng(seed)) + 1
        pairs = pairs[pairs.sum(axis=1) <= PAPER_MAX_TOTAL]
    else:
        pairs = draw_pairs(spec, SET_SIZE[workload], seed, WorkloadOptions(text=False, synthetic=True),
                           spec.paper_means)
    return [(int(prompt), int(output)) for prompt, output in pairs]


def chat_lengths(count: int, seed: int, new_conversation: float = NEW_CONVERSATION) -> list[tuple[int, int]]:
    """(prompt, output) tokens of `count` chat requests in order of arrival (paper section 6.5): the turns of as many
    conversations as have `count` turns, each served once."""
    options = WorkloadOptions(text=False, synthetic=True, new_conversation=new_conversation)

    def enough() -> Iterator[Conversation]:
        turns = 0
        for conversation in conversations(find_spec("chat"), seed, options):
            if turns >= count:
                return
            turns += len(conversation.turns)
            yield conversation

    found = schedule(enough(), count, options, np.random.default_rng(seed))
    return [(request.prompt_len, request.output_len) for request in found]


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
