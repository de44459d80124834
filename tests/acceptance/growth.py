"""Cost as work grows: 8 to 512 rows, and prompts of 128 to 8k tokens; tokens a second, memory, and no cliff.

python -m tests.acceptance.growth [--dtype bf16] [--threads 2] [--output results/growth]

Every setting runs in a process of its own, so that its peak memory is its own. Two cores need about two minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from pagedcli.bench.figures import Chart, Series
from pagedcli.bench.plots import MISSING, available, write_plots
from pagedcli.bench.signature import make_signature
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.memory.interface import Usage
from tests.acceptance.kit import Bench, real_prompts
from tests.acceptance.ledger import markdown

BLOCK = 16
LEAST_SPEED = 0.9
"""Output tokens/s with more rows, of the best with fewer."""
MOST_COST = 3.0
"""Seconds a prompt token, and a decode step, of a prompt against those of the next shorter one, which is a quarter as
long: attention alone would come to 4, the rest to 1."""
MOST_MEMORY, SLACK = 2.0, 128 << 20
"""Growth of peak memory between neighbours, of the keys and values that were added; and bytes that may come on top."""
LONG = 4000
"""Prompt tokens in all beyond which a setting runs once, not three times: it is long enough to tell."""


@dataclass(frozen=True)
class Setting:
    """`rows` rows of `prompt` tokens in and `out` tokens out."""

    rows: int
    prompt: int
    out: int

    @property
    def blocks(self) -> int:
        """KV blocks for all rows at once."""
        return self.rows * -(-(self.prompt + self.out) // BLOCK)


ROWS = tuple(Setting(rows, 64, 32) for rows in (8, 32, 128, 512))
PROMPTS = (Setting(2, 128, 16), Setting(2, 512, 16), Setting(2, 2048, 16), Setting(1, 8176, 16))
"""The last fills all 8,192 positions of the model."""


@dataclass(frozen=True)
class Point:
    """What a setting gave. Rates in tokens a second: prompt tokens over the steps that computed prompts, output tokens
    over the whole run. `step` is the median decode step, s; `peak` the process's memory and `kv` its share in use,
    bytes."""

    setting: Setting
    seconds: float
    prompt_rate: float
    output_rate: float
    step: float
    peak: int
    kv: int


def falling(points: Sequence[Point], least: float = LEAST_SPEED) -> list[str]:
    """Points whose output rate is under `least` of the best before them, in words."""
    found, best = [], 0.0
    for point in points:
        if point.output_rate < least * best:
            found.append(f"{point.setting.rows} rows: {point.output_rate:.0f} output tokens/s, under {least:g} of the "
                         f"{best:.0f} with fewer rows")
        best = max(best, point.output_rate)
    return found


def dearer(points: Sequence[Point], most: float = MOST_COST) -> list[str]:
    """Prompts of which a token, or after which a decode step, costs over `most` times that of the one before."""
    found = []
    for before, after in pairwise(points):
        for name, low, high in (("a prompt token", 1 / before.prompt_rate, 1 / after.prompt_rate),
                                ("a decode step", before.step, after.step)):
            if high > most * low:
                found.append(f"prompts of {after.setting.prompt:,}: {name} takes {1e3 * high:.2f} ms, over {most:g} "
                             f"times the {1e3 * low:.2f} of prompts of {before.setting.prompt:,}")
    return found


def swelling(points: Sequence[Point], most: float = MOST_MEMORY, slack: int = SLACK) -> list[str]:
    """Points whose peak memory grew by more than `slack` and `most` times the keys and values that were added."""
    found = []
    for before, after in pairwise(points):
        grown, allowed = after.peak - before.peak, slack + most * max(0, after.kv - before.kv)
        if grown > allowed:
            found.append(f"{after.setting.rows} rows of {after.setting.prompt:,}: {grown / 2**20:.0f} MiB more, where "
                         f"keys and values allow {allowed / 2**20:.0f}")
    return found


def measure(setting: Setting, dtype: str, threads: int, rounds: int) -> Point:
    """Run a setting in this process, `rounds` times; the fastest counts."""
    bench = Bench.open(dtype=dtype, blocks=setting.blocks + 64, block_size=BLOCK, threads=threads, swap=0)
    stream = [token for ids in bench.ids(real_prompts(800)[0]) for token in ids]
    prompts = [tuple(stream[(97 * row + at) % len(stream)] for at in range(setting.prompt))
               for row in range(setting.rows)]
    params = SamplingParams(temperature=0, max_tokens=setting.out, ignore_eos=True)
    serve_once(bench, setting, prompts[:2], params)
    points = [serve_once(bench, setting, prompts, params) for _ in range(rounds)]
    return min(points, key=lambda point: point.seconds)


def serve_once(bench: Bench, setting: Setting, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Point:
    engine = bench.engine(prefix=False)
    steps: list[tuple[bool, float]] = []

    def watch(plan: StepPlan, result: StepResult, usage: Usage) -> None:
        del result, usage
        steps.append((any(item.start < setting.prompt for item in plan.slices), time.perf_counter()))

    engine.on_step = watch
    begun = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add(Request(index, str(index), prompt, params, output_len=setting.out))
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - begun
    times = [after - before for before, after in pairwise([begun, *(at for _, at in steps)])]
    prefill = sum(spent for spent, (filling, _) in zip(times, steps, strict=True) if filling)
    decode = [spent for spent, (filling, _) in zip(times, steps, strict=True) if not filling]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kv = engine.counters.peak_used_blocks * bench.executor.limits.bytes_per_block
    return Point(setting, seconds, len(prompts) * setting.prompt / prefill, len(prompts) * setting.out / seconds,
                 statistics.median(decode), peak, kv)


def in_own_process(setting: Setting, dtype: str, threads: int) -> Point:
    arguments = [str(value) for value in (setting.rows, setting.prompt, setting.out)]
    done = subprocess.run([sys.executable, "-m", "tests.acceptance.growth", "--dtype", dtype, "--threads", str(threads),
                           "--one", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setting}: status {done.returncode}\n{done.stderr}")
    record = json.loads(done.stdout.splitlines()[-1])
    return Point(Setting(**record.pop("setting")), **record)


def table(points: Sequence[Point]) -> str:
    lines = [[f"{p.setting.rows}", f"{p.setting.prompt:,}", f"{p.setting.out}", f"{p.seconds:.2f}",
              f"{p.prompt_rate:,.0f}", f"{p.output_rate:,.0f}", f"{1e3 * p.step:.1f}",
              f"{1e3 * p.step / p.setting.rows:.2f}", f"{p.peak / 2**20:,.0f}", f"{p.kv / 2**20:,.0f}"]
             for p in points]
    return markdown(["rows", "prompt, tokens", "output, tokens", "run, s", "prompt tokens/s", "output tokens/s",
                     "decode step, ms", "a row of it, ms", "peak memory, MiB", "of it KV, MiB"], lines)


def charts(rows: Sequence[Point], prompts: Sequence[Point]) -> list[Chart]:
    """Speed and memory against rows and against the prompt's length."""
    made = []
    for key, points, label in (("rows", rows, "rows of 64 tokens in, 32 out"),
                               ("prompts", prompts, "prompt tokens of a row")):
        x = tuple(float(p.setting.rows if key == "rows" else p.setting.prompt) for p in points)
        speed = (Series("prompt tokens", "paged", tuple(p.prompt_rate for p in points), x),
                 Series("output tokens", "orca-oracle", tuple(p.output_rate for p in points), x))
        memory = (Series("process, peak", "paged", tuple(p.peak / 2**20 for p in points), x),
                  Series("keys and values", "orca-oracle", tuple(p.kv / 2**20 for p in points), x))
        made += [Chart(f"{key}_speed", f"Speed against {key}", "lines", label, "tokens/s", speed, log_x=True),
                 Chart(f"{key}_memory", f"Memory against {key}", "lines", label, "MiB", memory, log_x=True)]
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("results") / "growth")
    parser.add_argument("--one", type=int, nargs=3, metavar=("ROWS", "PROMPT", "OUT"), help="one setting, as JSON")
    options = parser.parse_args()
    if options.one:
        setting = Setting(*options.one)
        rounds = 1 if setting.rows * setting.prompt > LONG else 3
        print(json.dumps(asdict(measure(setting, options.dtype, options.threads, rounds))))
        return
    begun = time.perf_counter()
    measured = {}
    for name, settings in (("rows", ROWS), ("prompts", PROMPTS)):
        measured[name] = [in_own_process(setting, options.dtype, options.threads) for setting in settings]
        print(table(measured[name]), flush=True)
    rows, prompts = measured["rows"], measured["prompts"]
    cliffs = [*falling(rows), *dearer(prompts), *swelling(rows), *swelling(prompts)]
    limits = (f"No cliff means: output tokens/s with more rows at least {LEAST_SPEED:g} of the best with fewer; a "
              f"prompt token and a decode step at most {MOST_COST:g} times as dear with prompts four times as long; "
              f"memory grows by at most {MOST_MEMORY:g} times the keys and values added, and {SLACK >> 20} MiB.")
    verdict = "No cliff." if not cliffs else "Cliffs: " + "; ".join(cliffs) + "."
    signature = make_signature({"growth": "rows,prompts", "dtype": options.dtype}, threads=options.threads)
    text = "\n\n".join([f"# Cost as work grows, smollm2-135m {options.dtype}", table(rows), table(prompts),
                        limits, verdict, signature.text]) + "\n"
    print(f"{limits}\n{verdict}\n{time.perf_counter() - begun:.0f} s")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    record = {"signature": signature.as_dict(), **{name: [asdict(p) for p in points]
                                                   for name, points in measured.items()}}
    (options.output / "growth.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if available():
        write_plots(charts(rows, prompts), options.output, f"SmolLM2-135M, {options.dtype}, {options.threads} threads")
    else:
        print(MISSING)
    raise SystemExit(bool(cliffs))


if __name__ == "__main__":
    main()
