"""Fits the cost model to this machine's own engine: a results folder of `pagedcli bench` has the time of every step.

Steps say how many sequences and tokens they computed and how many slots were filled, which is what the cost model asks
for; nothing needs to be simulated for the fit. The fitted peaks stand in the hardware file as they are (efficiency 1):
a CPU has no datasheet figure that would mean anything here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagedcli.bench.least_squares import fit_positive
from pagedcli.bench.records import Floats
from pagedcli.bench.simulate import light_requests, simulate
from pagedcli.bench.storage import Results, RunData
from pagedcli.core.config import CacheConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import UsageError
from pagedcli.execution.cost_model import CostModel
from pagedcli.execution.hardware import Coefficients, Hardware
from pagedcli.execution.shapes import ModelShape, resolve_shape
from pagedcli.execution.simulated import Deployment

_BASE = Coefficients(weight_efficiency=1.0, flop_efficiency=1.0, kv_efficiency=1.0, attention_efficiency=1.0,
                     step_seconds=1e-3, copy_seconds=1e-5, swap_efficiency=1.0)
_FREE: Mapping[str, tuple[float, float]] = {
    "bandwidth": (1e8, 1e14), "flops": (1e8, 1e16), "kv_efficiency": (1e-3, 1e3), "step_seconds": (1e-6, 1.0),
    "sequence_seconds": (1e-8, 0.1), "prompt_seconds": (1e-7, 1.0),
}
_OUTLIER = 10.0


@dataclass(frozen=True)
class RunFit:
    """A fit to steps. `median_error`: of single steps; `total_error`: of the time of all steps together (signed)."""

    hardware: Hardware
    steps: int
    median_error: float
    total_error: float


@dataclass(frozen=True)
class Replayed:
    """One measured run and its simulation: mean normalized latency, s/token, and output tokens/s."""

    rate: float
    measured: float
    simulated: float
    measured_throughput: float
    simulated_throughput: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def settings_of(results: Results) -> dict[str, str]:
    """What the run was made with, from its signature. UsageError when it was itself simulated."""
    settings = dict(results.signature.settings)
    if settings.get("simulate"):
        raise UsageError(f"{results.name} was simulated: calibrate from a run of the real engine")
    return settings


def _loads(run: RunData) -> tuple[Floats, Floats]:
    """[steps, 5] loads as the cost model counts them, and the seconds of each step.

    Steps with more tokens than sequences computed prompts: one at a time in most cases, so the others are decodes.
    """
    steps = run.steps
    sequences, computed = steps.column("sequences").astype(float), steps.column("computed").astype(float)
    context = steps.column("token").astype(float)
    extra = computed > sequences
    prompts = np.where(extra, 1.0, 0.0)
    decodes = np.maximum(sequences - prompts, 0.0)
    prompt_tokens = np.where(extra, computed - decodes, 0.0)
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    loads = np.stack([decodes, np.maximum(context - prompt_tokens, 0.0), prompts, prompt_tokens, pairs], axis=1)
    return loads, np.asarray(steps.column("seconds"), dtype=np.float64)


def fit_run(results: Results, shape: ModelShape, name: str = "this-machine", *, policy: str = "paged",
            dtype: str = "fp32") -> RunFit:
    """Fit to the steps of every run of `policy` in a results folder. Raises UsageError when there are too few."""
    from pagedcli.bench.paper_fit import step_seconds

    parts = [_loads(run) for run in results.runs if run.policy == policy]
    if not parts or sum(len(seconds) for _, seconds in parts) < 50:
        raise UsageError(f"{results.name}: fewer than 50 steps of policy {policy}; measure a longer run")
    loads = np.concatenate([part[0] for part in parts])
    seconds = np.concatenate([part[1] for part in parts])
    scale = np.sqrt(np.maximum(seconds, np.median(seconds) / 4) * seconds.mean())

    def hardware_of(values: Mapping[str, float]) -> Hardware:
        own = {key: value for key, value in values.items() if key not in ("bandwidth", "flops")}
        return Hardware(name=name, title="this machine", memory_bytes=1, bandwidth=values["bandwidth"],
                        flops=values["flops"], link_bandwidth=1e9, host_bandwidth=1e10,
                        source=f"fitted to {results.name}", coefficients=replace(_BASE, **own))

    def predicted(values: Mapping[str, float]) -> Floats:
        return step_seconds(CostModel(hardware_of(values), shape, dtype=dtype, kv_dtype=dtype), loads)

    def residuals(values: Mapping[str, float]) -> Floats:
        raw = (predicted(values) - seconds) / scale
        return np.sign(raw) * np.minimum(np.abs(raw), _OUTLIER)

    quick = float(np.percentile(seconds, 5))
    start = {"bandwidth": shape.weight_bytes(dtype) / (0.5 * quick), "flops": 2 * shape.active_parameters / (quick / 8),
             "kv_efficiency": 0.5, "step_seconds": 0.2 * quick, "sequence_seconds": 0.01 * quick,
             "prompt_seconds": 0.1 * quick}
    found = fit_positive(residuals, start, _FREE, prior=1e-3 * len(seconds) ** 0.5)
    # The fit weighs steps by how well they can be told; what is simulated is the time of all of them together.
    slower = float(seconds.sum() / predicted(found).sum())
    found = {name: value / slower if name in ("bandwidth", "flops") else
             value * slower if name.endswith("_seconds") else value for name, value in found.items()}
    times = predicted(found)
    hardware = hardware_of(found)
    error = float(np.median(np.abs(times / np.maximum(seconds, 1e-9) - 1)))
    blocks = results.signature.settings.get("kv_blocks")
    memory = int(hardware.bandwidth)  # a size is required, the measured pool decides
    hardware = replace(hardware, memory_bytes=max(memory, 1), num_blocks=int(blocks) if blocks else None, calibrated=(
        f"coefficients fitted to {len(seconds)} steps of {results.name} (median error of a step {100 * error:.1f} %)"))
    return RunFit(hardware, len(seconds), error, float(times.sum() / seconds.sum() - 1))


def replay_runs(results: Results, hardware: Hardware, policy: str = "paged") -> list[Replayed]:
    """Simulate what was measured: the same arrivals and lengths, each run of `policy` beside its simulation."""
    settings = settings_of(results)
    shape = resolve_shape(settings["model"])
    config = _config(settings, policy)
    deployment = Deployment(hardware, shape, block_size=int(settings.get("block_size", 16)), dtype="fp32",
                            max_positions=int(settings.get("max_model_len", shape.max_positions)))
    found = []
    for run in results.runs:
        if run.policy != policy:
            continue
        columns = run.requests
        good = np.asarray(columns["ok"], dtype=bool)
        order = np.argsort(np.asarray(columns["arrival"], dtype=float)[good], kind="stable")

        def column(name: str, good: Any = good, order: Any = order, columns: Any = columns) -> Floats:
            return np.asarray(columns[name], dtype=np.float64)[good][order]

        arrival, finish, output = column("arrival"), column("finish"), column("output_len")
        lengths = [(int(p), int(o)) for p, o in zip(column("prompt_tokens"), output, strict=True)]
        simulated = simulate(config, deployment, light_requests(lengths, arrival.tolist()))
        ended = np.array([record.finish or np.nan for record in simulated.requests], dtype=np.float64)
        found.append(Replayed(
            run.rate, float(np.mean((finish - arrival) / output)), float(np.nanmean((ended - arrival) / output)),
            float(output.sum() / (finish.max() - arrival.min())),
            float(output.sum() / (np.nanmax(ended) - arrival.min()))))
    return found


def _config(settings: Mapping[str, str], policy: str) -> RunConfig:
    def flag(name: str, default: bool) -> bool:
        return settings.get(name, str(default)) == "True"

    return RunConfig(
        policy=policy, cache=CacheConfig(prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=int(settings.get("max_num_seqs", 256)), chunked_prefill=flag("chunked_prefill", True),
            max_num_batched_tokens=int(settings.get("token_budget", 2048)),
            preemption=settings.get("preemption", "auto")))  # type: ignore[arg-type]  # as it was written
