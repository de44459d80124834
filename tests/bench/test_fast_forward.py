"""The event-driven simulation against the plain engine: the same decisions, blocks and times at every step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pagedcli.bench.serve import replay
from pagedcli.bench.simulate import plain_engine, simulate
from pagedcli.core.config import CacheConfig, RunConfig, SchedulerConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.beam_script import BeamScript, RecordedBeams, ReplacingBeams
from pagedcli.engine.fast_forward import EventEngine
from pagedcli.execution.hardware import find_hardware
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment, SimulatedExecutor

POLICIES = ("paged", "orca-oracle", "orca-pow2", "orca-max", "fastertransformer", "tgi")


def _case(seed: int, policy: str) -> tuple[RunConfig, Deployment, list[Request], BeamScript]:
    rng = random.Random(seed)
    chunked = policy == "paged" and rng.random() < 0.4
    blocks = rng.choice([12, 20, 40, 120])
    config = RunConfig(
        policy=policy,
        cache=CacheConfig(prefix_cache=rng.random() < 0.4, watermark=rng.choice([0.0, 0.01, 0.2])),
        scheduler=SchedulerConfig(
            max_num_seqs=rng.choice([8, 12, 64]), chunked_prefill=chunked, static_batch=rng.choice([None, 8]),
            max_num_batched_tokens=rng.choice([13, 40]) if chunked else rng.choice([64, 200, None]),
            preemption=rng.choice(["auto", "recompute", "swap"])))
    deployment = Deployment(find_hardware("a100-40gb"), SHAPES["opt-125m"], block_size=rng.choice([1, 4, 16]),
                            num_blocks=blocks, host_blocks=rng.choice([0, 8, blocks]), max_positions=64)
    shared = [rng.randrange(50) for _ in range(20)]
    requests, now = [], 0.0
    widths = rng.choice([(1,), (1, 2, 5), (3,)])
    for index in range(rng.randint(5, 40)):
        now += rng.choice([0.0, rng.expovariate(1.0), rng.expovariate(30.0)])
        width = rng.choice(widths)
        beam = width > 1 and rng.random() < 0.5
        params = SamplingParams(max_tokens=None, ignore_eos=True, n=1 if beam else width, use_beam_search=beam,
                                beam_width=width if beam else None)
        prompt = shared[: rng.randrange(20)] + [rng.randrange(50) for _ in range(rng.randint(1, 24))]
        requests.append(Request(index, str(index), tuple(prompt), params, now, rng.randint(1, 30)))
    beams: BeamScript = ReplacingBeams(rng.choice([0.0, 0.1, 0.6, 1.0]), seed)
    if widths == (3,) and rng.random() < 0.5:  # one width, as recordings have
        beams = RecordedBeams([[[rng.randrange(3) for _ in range(3)] if rng.random() < 0.4 else [0, 1, 2]
                                for _ in range(rng.randint(1, 9))] for _ in range(4)], 3)
    return config, deployment, requests, beams


def _observe_plain(engine: Any, steps: list[Any]) -> None:
    def look(plan: Any, result: Any, usage: Any) -> None:
        tables = {item.seq: (item.start + len(item.tokens), item.logit_rows, list(item.blocks))
                  for item in plan.slices}
        tokens = {item.seq: list(engine.lifecycle.sequences[item.seq].tokens) for item in plan.slices}
        steps.append((tables, tokens, plan.copies[:], plan.swap_in[:], plan.swap_out[:], result.seconds))
    engine.on_step = look


def _observe_events(engine: EventEngine, steps: list[Any]) -> None:
    flows = engine.flows

    def look(plan: Any, result: Any, usage: Any) -> None:
        sequences = engine.lifecycle.sequences
        tables, tokens = {}, {}
        for flow in flows._flows.values():
            length = flow.length + flows.step - flow.base
            for place, seq in enumerate(flow.group.live):
                tables[seq.id] = (length, 1, list(engine.memory.table(seq)))
                sample = place if flow.group.beam is not None and len(seq.tokens) < length else seq.sample
                tokens[seq.id] = seq.tokens + engine.sampler.tokens(seq, sample, length - len(seq.tokens))
        for item in plan.slices:
            tables[item.seq] = (item.start + len(item.tokens), item.logit_rows, list(item.blocks))
            tokens[item.seq] = list(sequences[item.seq].tokens)
        steps.append((tables, tokens, plan.copies[:], plan.swap_in[:], plan.swap_out[:], engine.cost.seconds(
            engine.events.load)))
    engine.on_step = look


def _drive(engine: Any, requests: list[Request]) -> list[Any]:
    """Both kinds of engine by one loop without shortcuts; returns what finished when."""
    finished, place = [], 0
    while place < len(requests) or engine.has_work():
        while place < len(requests) and requests[place].arrival <= engine.clock.now():
            try:
                engine.add(requests[place])
            except Exception as fault:
                finished.append((requests[place].index, type(fault).__name__))
            place += 1
        if engine.has_work():
            done = engine.step()
            engine.memory.check()
            finished += [(group.request.index, group.finished_at, group.first_token_at, group.preemptions,
                          [seq.output_ids for seq in group.done]) for group in done]
        elif place < len(requests):
            engine.clock.sleep_until(requests[place].arrival)
    return finished


@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_is_the_same(policy: str) -> None:
    met = {"recompute": 0, "swap": 0, "copies": 0, "beams": 0}
    for seed in range(60):
        config, deployment, requests, beams = _case(seed, policy)
        plain, fast = plain_engine(config, deployment, beams), EventEngine(
            config, SimulatedExecutor(Deployment(**{**{name: getattr(deployment, name) for name in
                                                       Deployment.__slots__}, "policy": policy})), beams)
        slow_steps: list[Any] = []
        fast_steps: list[Any] = []
        _observe_plain(plain, slow_steps)
        _observe_events(fast, fast_steps)
        expected, got = _drive(plain, requests), _drive(fast, requests)
        for number, (one, other) in enumerate(zip(slow_steps, fast_steps, strict=False)):
            assert one == other, f"seed {seed}, step {number}"
        assert len(slow_steps) == len(fast_steps), f"seed {seed}"
        assert got == expected, f"seed {seed}"
        counters = plain.counters
        assert (counters.preempt_recompute, counters.preempt_swap, counters.cached_tokens) == (
            fast.counters.preempt_recompute, fast.counters.preempt_swap, fast.counters.cached_tokens)
        met["recompute"] += counters.preempt_recompute
        met["swap"] += counters.preempt_swap
        met["copies"] += counters.block_copies
        met["beams"] += sum(request.params.use_beam_search for request in requests)
    assert met["beams"] > 20
    if policy == "paged":
        assert all(amount > 20 for amount in met.values()), met


@pytest.mark.parametrize("policy", POLICIES)
def test_records_are_those_of_replay(policy: str) -> None:
    """With the shortcuts on: records, token times and the step table equal those of `serve.replay`."""
    for seed in range(100, 140):
        config, deployment, requests, beams = _case(seed, policy)
        slow = replay(plain_engine(config, deployment, beams), requests, [r.arrival for r in requests], policy=policy,
                      simulated=True)
        fast = simulate(config, deployment, requests, beams=beams)
        for one, other in zip(slow.requests, fast.requests, strict=True):
            assert one == other, f"seed {seed}"
            assert np.array_equal(one.token_times, other.token_times), f"seed {seed}, request {one.key}"
        assert list(slow.steps) == list(fast.steps), f"seed {seed}"
        assert slow.duration == fast.duration
