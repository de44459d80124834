"""From the options of `pagedcli bench` to an experiment and to what serves each policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcli.cli.options import Option, requests_within, run_config, sampling_fields, short
from pagedcli.core.clock import LATEST
from pagedcli.core.config import POLICIES, RunConfig
from pagedcli.core.errors import CannotRunError, RequestError, UsageError
from pagedcli.core.request import SamplingParams
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from pagedcli.bench.session import Experiment, Runner
    from pagedcli.workloads.spec import Workload

WORK, LOAD, OUT = "Workload", "Load", "Results"
DEFAULT_REQUESTS = 32
DEFAULT_RATE = 4.0
DEFAULT_MODEL_LEN = 1024
POOL_OF_LONGEST = 4
"""The default pool holds so many sequences of the longest length: few enough that memory is what runs out."""

_FILTERS = "paper, vllm or none"
BENCH_OPTIONS: tuple[Option, ...] = (
    Option("workload", str, "Named workload (see `pagedcli workloads`).", WORK, "sharegpt"),
    Option("trace", str, "File of conversations, lengths or arrivals to use instead.", WORK, metavar="FILE"),
    Option("prompts", str, "JSON Lines of prompts, in their own order.", WORK, metavar="FILE"),
    Option("num_requests", int, "Requests to serve.", WORK, DEFAULT_REQUESTS),
    Option("filter", str, f"Which rows count: {_FILTERS}. Default: the workload's own.", WORK),
    Option("shots", int, "Examples in the translation workload's shared prefix: 0, 1 or 5.", WORK),
    Option("synthetic", bool, "Use the shipped synthetic lengths without looking for the real data.", WORK),
    Option("offline", bool, "Never touch the network.", WORK),
    Option("policy", str, f"Memory system under test: {', '.join(POLICIES)}.", LOAD, "paged"),
    Option("baseline", str, "Memory system to compare with (repeatable).", LOAD, many=True),
    Option("rate", str, "Requests/s, several with commas; inf: all at once; trace: the trace's own times.", LOAD,
           f"{DEFAULT_RATE:g}"),
    Option("duration", float, "Only requests that arrive within so many seconds.", LOAD,
           above=0, most=LATEST),
    Option("burstiness", float, "1: Poisson arrivals; below: burstier; above: more even.", LOAD, 1, least=1e-3,
           most=1e6),
    Option("repeat", int, "Runs of each policy and rate, in turns.", LOAD, 1, least=1),
    Option("find_capacity", bool, "Find the highest rate under each --latency-limit, starting from --rate.", LOAD),
    Option("latency_limit", str, "Normalized latency limits of the capacity, s/token.", LOAD, "0.5,1"),
    Option("stop_latency", float, "End a run that is certain to exceed this normalized latency (s/token).", LOAD,
           above=0),
    Option("time_limit", float, "End each run so many seconds after requests begin to arrive (loading and warm-up do "
           "not count) and say what was left; its latency is not compared.", LOAD, above=0),
    Option("simulate", str, "Simulate this hardware instead of running the model (a name or a .toml file).", LOAD,
           metavar="HARDWARE"),
    Option("static_batch", int, "Batch of fastertransformer. Default: what fits.", LOAD, least=1),
    Option("goodput", str, "Limit in milliseconds a good request meets: ttft:MS, tpot:MS, e2el:MS (repeatable).", LOAD,
           many=True, metavar="NAME:MS"),
    Option("drop_before", float, "Leave requests that arrive earlier out of the figures (s).", LOAD, least=0),
    Option("steps_between", str, "Average memory figures over iterations in this time only, as FROM:TO (s).", LOAD),
    Option("name", str, "Name of the results. Default: workload, policies and time.", OUT),
    Option("results", str, "Folder for results.", OUT, "results", metavar="DIR"),
    Option("no_plots", bool, "Leave the PNG files out.", OUT),
    Option("quiet", bool, "No live display; results are still printed.", OUT),
)


@dataclass(frozen=True)
class Setup:
    """A bench command as asked for, before anything heavy is loaded."""

    config: RunConfig
    experiment: Experiment
    params: SamplingParams
    settings: Mapping[str, Any]

    @property
    def simulate(self) -> str | None:
        found = self.settings.get("simulate")
        return None if found is None else str(found)

    @property
    def count(self) -> int | None:
        """Requests to load; None for all rows of a trace that is replayed at its own times."""
        own_times = self.experiment.rates == (None,)
        given = self.settings.get("num_requests")
        if given is not None:
            return requests_within(int(given))
        finite = [rate for rate in self.experiment.rates if rate is not None and not math.isinf(rate)]
        if self.experiment.duration is not None and finite:  # all at once is within any duration
            needed = min(max(finite) * self.experiment.duration * 1.3, 1e15)  # beyond what is allowed, and an int
            return requests_within(int(needed) + DEFAULT_REQUESTS, "requests of --rate x --duration")
        return None if own_times else DEFAULT_REQUESTS


def read_setup(settings: Mapping[str, Any]) -> Setup:
    """Check and combine the options. Raises UsageError naming option, value and limit."""
    from pagedcli.bench.capacity import Search
    from pagedcli.bench.metrics import Goodput, Window
    from pagedcli.bench.session import Experiment

    named = [("--policy", settings.get("policy", "paged")),
             *(("--baseline", name) for name in settings.get("baseline", []))]
    for option, policy in named:
        if policy not in POLICIES:
            raise UsageError(f"{option} = {policy!r}: must be one of {', '.join(POLICIES)}")
    policies = [policy for _, policy in named]
    rates = read_rates(settings.get("rate", f"{DEFAULT_RATE:g}"))
    numbers = [rate for rate in rates if rate is not None and math.isfinite(rate)]
    if settings.get("find_capacity") and not numbers:
        raise UsageError("--find-capacity starts from --rate, which must then be a finite number")
    experiment = Experiment(
        policy=policies[0], baselines=tuple(policies[1:]), rates=rates, repeats=settings.get("repeat", 1),
        burstiness=settings.get("burstiness", 1.0), duration=settings.get("duration"), seed=settings.get("seed", 0),
        goodput=Goodput.parse(settings.get("goodput", [])), stop_latency=settings.get("stop_latency"),
        time_limit=settings.get("time_limit"),
        window=Window(settings.get("drop_before", 0.0), *_between(settings.get("steps_between"))),
        limits=_numbers("--latency-limit", settings.get("latency_limit", "0.5,1")),
        search=Search(start=numbers[0]) if numbers else Search())
    config = _pressed(run_config(settings), settings)
    setup = Setup(config, experiment, _params(settings), settings)
    for rate in numbers:
        _check_slowest(rate, 1 if experiment.duration is not None else setup.count or 1)
    return setup


def _check_slowest(rate: float, count: int) -> None:
    """UsageError for a rate at which `count` requests would arrive until later than a clock can tell apart."""
    if count / LATEST > rate:
        raise UsageError(f"--rate = {rate:g}: {counted(count, 'request')} would arrive until later than {LATEST:g} s; "
                         f"must be at least {count / LATEST:g}/s")


def read_rates(text: str) -> tuple[float | None, ...]:
    """From `0.5,1,inf` or `trace` (None)."""
    if text.strip() == "trace":
        return (None,)
    return _numbers("--rate", text, infinite=True)


def _numbers(option: str, text: str, infinite: bool = False) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not value > 0 or (math.isinf(value) and not infinite):
            raise UsageError(f"{option} {short(text)!r}: {short(part.strip())!r} must be a number above 0"
                             + (" or inf (or the whole option: trace)" if infinite else ""))
        found.append(value)
    return tuple(dict.fromkeys(found))


def _between(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, math.inf
    start, _, end = text.partition(":")
    try:
        found = float(start or 0), float(end or math.inf)
    except ValueError:
        found = (1.0, 0.0)
    if not 0 <= found[0] < found[1]:
        raise UsageError(f"--steps-between {text!r}: must be FROM:TO in seconds with FROM below TO, such as 300:900")
    return found


def _params(settings: Mapping[str, Any]) -> SamplingParams:
    """Sampling of every request: greedy unless several samples are asked for. Lengths are forced by the workload."""
    fields = sampling_fields(settings)
    fields.pop("max_tokens", None)
    if "beam_width" in fields:
        fields["use_beam_search"] = True
    several = max(fields.get("n", 1), fields.get("best_of", 1)) > 1 and not fields.get("use_beam_search")
    fields.setdefault("temperature", 1.0 if several else 0.0)
    try:
        return SamplingParams(**fields)
    except RequestError as fault:  # here they are options of the whole command, not of a row
        raise UsageError(fault.message, fault.code) from fault


def _pressed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Without a pool size, a small one: memory must be what runs out, as it does on a full server."""
    model, cache = config.model, config.cache
    scheduler = replace(config.scheduler, static_batch=settings.get("static_batch", config.scheduler.static_batch))
    config = replace(config, scheduler=scheduler)
    if settings.get("simulate") is not None:
        return config
    if model.max_model_len is None:
        model = replace(model, max_model_len=DEFAULT_MODEL_LEN)
    if cache.num_blocks is None and cache.memory is None:
        longest = model.max_model_len or DEFAULT_MODEL_LEN
        cache = replace(cache, num_blocks=POOL_OF_LONGEST * math.ceil(longest / cache.block_size))
    return replace(config, model=model, cache=cache)


@dataclass(frozen=True)
class Backend:
    """What is loaded once and serves all policies. `tokenizer` may be None (shapes without one)."""

    executor: Any
    tokenizer: Any
    runner_of: Callable[[str], Runner]
    max_len: int

    @property
    def vocab_size(self) -> int:
        return int(self.executor.limits.vocab_size)


def load_backend(setup: Setup, say: Callable[[str], None]) -> Backend:
    """Load the model (or the simulation) that the setup asks for. Raises CannotRunError or UsageError."""
    return _simulated(setup) if setup.simulate is not None else _real(setup, say)


def _real(setup: Setup, say: Callable[[str], None]) -> Backend:
    from pagedcli.bench.session import EngineRunner
    from pagedcli.engine.build import build_engine, load

    executor, tokenizer = load(setup.config, say)
    limits = executor.limits

    def make(policy: str) -> Any:
        return build_engine(replace(setup.config, policy=policy), executor=executor, tokenizer=tokenizer,
                            record_times=True)

    engines = EngineRunner(make, limits.vocab_size)
    hf = _hf(limits, tokenizer, setup.config, say) if "hf" in setup.experiment.policies else None

    def runner_of(policy: str) -> Runner:
        return hf if policy == "hf" and hf is not None else engines

    longest = min(limits.max_positions, setup.config.model.max_model_len or limits.max_positions)
    return Backend(executor, tokenizer, runner_of, longest)


def _hf(limits: Any, tokenizer: Any, config: RunConfig, say: Callable[[str], None]) -> Runner:
    """Transformers' own modules with the same weights, loaded beside the engine's (which may have fused them)."""
    from pagedcli.bench.hf_runner import HFRunner, load_module
    from pagedcli.engine.build import NULL_MODEL

    if config.model.model == NULL_MODEL:
        raise CannotRunError("the hf baseline runs transformers' own generate, and --model null has no model to run")
    module = load_module(config.model, say)
    pad = None if tokenizer is None else tokenizer.pad_id
    return HFRunner(module, pad if pad is not None else 0, limits.num_blocks * limits.block_size, limits.block_size,
                    config.scheduler.max_num_seqs)


def _simulated(setup: Setup) -> Backend:
    from pagedcli.bench.simulate import SimulatedRunner
    from pagedcli.execution.hardware import find_hardware
    from pagedcli.execution.shapes import resolve_shape
    from pagedcli.execution.simulated import Deployment, SimulatedExecutor

    config = setup.config
    if "hf" in setup.experiment.policies:
        raise UsageError("--simulate has no model of hf: it runs transformers itself")
    base = Deployment(find_hardware(setup.simulate or "", "--simulate"), resolve_shape(config.model.model),
                      tensor_parallel=config.model.tensor_parallel_size, block_size=config.cache.block_size,
                      num_blocks=config.cache.num_blocks, max_positions=config.model.max_model_len)
    if "swap_space" in setup.settings:  # else the paper's, which is larger than a usual machine's
        limits = base.limits
        base = replace(base, host_blocks=min(limits.num_blocks, config.cache.swap_space // limits.bytes_per_block))

    runner = SimulatedRunner(config, base)
    return Backend(SimulatedExecutor(base), None, lambda policy: runner, base.limits.max_positions)


def load_work(setup: Setup, backend: Backend) -> Workload:
    """The workload, cut to what the model can hold."""
    from pagedcli.workloads import WorkloadOptions, load_workload

    settings, tokenizer = setup.settings, backend.tokenizer
    options = WorkloadOptions(filter=settings.get("filter"), shots=settings.get("shots"), max_total=backend.max_len,
                              synthetic=settings.get("synthetic", False), offline=settings.get("offline", False),
                              text=setup.simulate is None)
    trace, prompts = (None if settings.get(name) is None else Path(settings[name]) for name in ("trace", "prompts"))
    name = settings.get("workload", None if trace or prompts else "sharegpt")
    work = load_workload(name, trace=trace, prompts=prompts, num_requests=setup.count, seed=setup.config.seed,
                         count_tokens=None if tokenizer is None else lambda text: len(tokenizer.encode(text)),
                         tokenizer=setup.config.model.model, options=options)
    most = settings.get("max_tokens")
    if most is None:
        return work
    cut = tuple(replace(row, output_len=min(row.output_len, most)) for row in work.requests)
    return replace(work, requests=cut, notes=(*work.notes, f"outputs cut to {counted(most, 'token')} (--max-tokens)"))
