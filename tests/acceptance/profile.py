"""Where each second of batch generation goes, beside the limits of the machine measured in the same run.

python -m tests.acceptance.profile [--dtype bf16] [--rows FILE] [--threads 2] [--rounds 1] [--output FILE]

The rows are bench_generate's. A step's native program keeps its own time by kind of operation; everything around it is
booked by wrapping the engine's parts, innermost first, so that the kinds add up to the wall time but for a last row.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.attention.interface import LayerSpec
from pagedcli.bench.signature import make_signature
from pagedcli.core.config import ModelConfig
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.engine import Engine
from pagedcli.execution.hf_model import load_config
from pagedcli.execution.model_hub import resolve_model
from pagedcli.execution.native_program import Program
from tests.acceptance.bench_generate import ours, rows_of
from tests.acceptance.kit import SHARED, Bench
from tests.acceptance.ledger import BETWEEN, Account, Ledger, bucket, least_seconds, markdown
from tests.acceptance.limits import DTYPES, Limits, measure_limits

PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
PROGRAM = (*PRODUCTS, "attention", "write", "norm", "rope", "embedding", "last rows", "linear", "program")
"""What torch or native code computes; every other kind counts as overhead of the step."""
FORWARD, EXECUTE, ENGINE = "arguments of the program", "handing over the step", "other Python in a step"
ITSELF = "this profile itself"
NO_OVERHEAD = (*PROGRAM, ITSELF)
BATCH = 64
MOST_OVERHEAD = 0.05


@dataclass(frozen=True)
class Sizes:
    """What a model's operations cost. FLOP and bytes of weights are of all layers; `head` of one row of logits."""

    spec: LayerSpec
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    cell: int

    @property
    def flop(self) -> dict[str, int]:
        """FLOP of a row by product."""
        spec, wide = self.spec, self.layers * self.hidden
        turned = spec.heads * spec.key_dim + spec.kv_heads * (spec.key_dim + spec.value_dim)
        return {"qkv": 2 * wide * turned, "out": 2 * wide * spec.heads * spec.value_dim,
                "gate_up": 4 * wide * self.inner, "down": 2 * wide * self.inner,
                "head": 2 * self.hidden * self.vocabulary}

    def counts(self, plan: StepPlan) -> Counter[str]:
        """FLOP and bytes that a step needs at least, by kind; its rows, rows of logits, and itself."""
        spec, rows = self.spec, plan.num_tokens
        made: Counter[str] = Counter({"steps": 1, "rows": rows, "logit rows": plan.num_logit_rows})
        for name, flop in self.flop.items():
            times = plan.num_logit_rows if name == "head" else rows
            made[f"{name} flop"] = flop * times
            made[f"{name} bytes"] = flop // 2 * self.cell if times else 0
        dims = spec.key_dim + spec.value_dim
        for item in plan.slices:
            end = item.start + len(item.tokens)
            pairs = (item.start + 1 + end) * len(item.tokens) // 2
            made["attention flop"] += 2 * pairs * spec.heads * dims * self.layers
            made["attention bytes"] += end * spec.kv_heads * dims * self.layers * self.cell
        return made


def sizes_of(bench: Bench) -> Sizes:
    decoder: Any = bench.executor.decoder
    config: Any = load_config(resolve_model(ModelConfig(model=bench.config.model.model)), trust_remote_code=False)
    return Sizes(decoder.specs[0], len(decoder.specs), config.hidden_size, config.intermediate_size,
                 decoder.vocab_size, decoder.dtype.itemsize)


def edge_of(plan: StepPlan) -> int:
    """The bucket of a step, by its rows; one that only moves blocks has none."""
    return bucket(plan.num_tokens) if plan.num_tokens else BETWEEN


def full_only(plan: StepPlan) -> int:
    """BATCH for steps in which just BATCH sequences decode, and one bucket for all others."""
    return BATCH if len(plan.slices) == plan.num_tokens == BATCH else BETWEEN


@contextmanager
def watched(engine: Engine, ledger: Ledger, sizes: Sizes, file_under: Callable[[StepPlan], int]) -> Iterator[None]:
    """The engine's parts book their time while this is open. It leaves the shared decoder and class as they were."""
    own: Any = engine   # untyped, since its methods are replaced
    program: Any = Program
    decoder = own.executor.decoder
    execute, forward, run = own.executor.execute, decoder.forward, program.run
    inner = ledger.timed(FORWARD, forward)
    outer = ledger.timed(EXECUTE, execute)
    plan_of_step = StepPlan()

    def forward_split(*args: Any) -> Any:
        logits = inner(*args)
        ledger.enter(ITSELF)
        if hasattr(decoder, "seconds"):
            ledger.split("program", decoder.seconds)
        else:
            ledger.split(FORWARD, {"attention": decoder.attention_seconds,
                                   "linear": ledger.step[FORWARD] - decoder.attention_seconds})
        ledger.leave()
        return logits

    def execute_split(plan: StepPlan) -> StepResult:
        nonlocal plan_of_step
        plan_of_step = plan
        result = outer(plan)
        ledger.move(EXECUTE, {name: result.parts.get(name, 0.0) for name in ("memory", "layout")})
        return result

    step = ledger.timed(ENGINE, engine.step)

    def whole_step() -> Any:
        done = step()
        ledger.close(file_under(plan_of_step), sizes.counts(plan_of_step))
        return done

    own.scheduler.plan = ledger.timed("scheduling", own.scheduler.plan)
    own.scheduler.commit = ledger.timed("scheduling", own.scheduler.commit)
    own.sampler.choose = ledger.timed("sampling", own.sampler.choose)
    text = own.lifecycle.text
    if text is not None:
        text.start, text.advance, text.finish = (
            ledger.timed("detokenising", part) for part in (text.start, text.advance, text.finish))
    own.add, own.step = ledger.timed("admission", own.add), whole_step
    own.executor.execute, decoder.forward = execute_split, forward_split
    program.run = ledger.timed("program", run)
    try:
        yield
    finally:
        program.run = run
        decoder.forward = forward
        own.executor.execute = execute


def run_rows(bench: Bench, sizes: Sizes, rows: list[tuple[tuple[int, ...], int]], temperature: float = 0,
             file_under: Callable[[StepPlan], int] = edge_of) -> Account:
    """Serve all rows at once, by an engine with a cold cache, and account for the time."""
    engine, ledger = bench.engine(), Ledger()
    with watched(engine, ledger, sizes, file_under):
        begun = time.perf_counter()
        for index, (prompt, out) in enumerate(rows):
            params = SamplingParams(temperature=temperature, max_tokens=out, ignore_eos=True)
            engine.add(Request(index, str(index), prompt, params, output_len=out))
        ledger.close(BETWEEN)
        while engine.has_work():
            engine.step()
        wall = time.perf_counter() - begun
    assert engine.counters.output_tokens == sum(out for _, out in rows)
    return Account(ledger.seconds, wall, ledger.counts)


def where_time_goes(account: Account) -> str:
    """Seconds by kind and by rows of the step, then what was not accounted for."""
    edges = account.edges
    lines = [[kind, *(f"{account.of([kind], edge):.2f}" for edge in edges), f"{account.of([kind]):.2f}",
              f"{100 * account.of([kind]) / account.wall:.1f}"] for kind in account.kinds]
    lines.append(["not accounted for", *("" for _ in edges), f"{account.unaccounted:.2f}",
                  f"{100 * account.unaccounted / account.wall:.1f}"])
    lines.append(["wall time", *(f"{account.of(account.kinds, edge):.2f}" for edge in edges), f"{account.wall:.2f}",
                  "100.0"])
    for name in ("steps", "rows", "logit rows"):
        lines.append([f"({name})", *(f"{account.count(name, edge):,.0f}" for edge in edges),
                      f"{account.count(name):,.0f}", ""])
    names = ["between" if edge == BETWEEN else f"to {edge}" for edge in edges]
    return markdown(["seconds, by rows of a step", *names, "all", "%"], lines)


def against_limits(account: Account, limits: Limits, dtype: str) -> str:
    """Rates of the products and of attention by rows of the step, and their share of the limit that binds."""
    edges = [edge for edge in account.edges if edge != BETWEEN]
    lines = []
    for kind in (*PRODUCTS, "attention"):
        rates, shares = [], []
        for edge in [*edges, None]:
            spent, flop, moved = (account.of([kind], edge), account.count(f"{kind} flop", edge),
                                  account.count(f"{kind} bytes", edge))
            least = least_seconds(flop, limits.flops(dtype), moved, limits.read)
            bound = "m" if moved / limits.read > flop / limits.flops(dtype) else "a"
            rates.append(f"{flop / spent / 1e9:.0f}" if spent else "-")
            shares.append(f"{100 * least / spent:.0f} {bound}" if spent else "-")
        lines += [[f"{kind}, GFLOP/s", *rates], [f"{kind}, % of limit", *shares]]
    return markdown(["rates, by rows of a step", *(f"to {edge}" for edge in edges), "all"], lines)


def overhead(account: Account) -> tuple[float, str]:
    """Share of the step outside torch and native code in steps of just BATCH rows, and a line that tells it."""
    kinds = [kind for kind in account.kinds if kind not in NO_OVERHEAD]
    steps = account.count("steps", BATCH)
    share = account.share_outside(NO_OVERHEAD, BATCH)
    whole = account.of(account.kinds, BATCH) / steps
    parts = ", ".join(f"{kind} {1e3 * account.of([kind], BATCH) / steps:.2f}" for kind in kinds
                      if account.of([kind], BATCH) / steps > 5e-6)
    return share, f"{100 * share:.1f} % of {1e3 * whole:.1f} ms ({steps:.0f} steps; ms a step: {parts})"


def steady(rows: list[tuple[tuple[int, ...], int]], out: int = 48) -> list[tuple[tuple[int, ...], int]]:
    """BATCH rows of one output length, so that all decode together for a while."""
    return [(prompt, out) for prompt, _ in (rows * BATCH)[:BATCH]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=SHARED / "peers" / "W1.jsonl")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    output = options.output or Path("results") / "cpu" / f"profile-{options.dtype}.md"
    bench = Bench.open(dtype=options.dtype, blocks=4000, threads=options.threads)
    rows, origin = rows_of(options.rows, bench)
    sizes = sizes_of(bench)
    ours(bench, rows[:8])
    limits = measure_limits()
    made = sum(out for _, out in rows)
    for _ in range(options.rounds):
        account = run_rows(bench, sizes, rows)
        print(f"{account.wall:.2f} s, {made / account.wall:.0f} output tokens/s", flush=True)
    limits = limits.best(measure_limits())
    pages = [f"# Where the time goes: {len(rows)} rows ({origin}), {options.dtype}", limits.text,
             f"{sum(len(prompt) for prompt, _ in rows):,} prompt tokens and {made:,} output tokens, greedy, in "
             f"{account.wall:.2f} s: {made / account.wall:.0f} output tokens/s.", where_time_goes(account),
             "Share of the limit that binds: a, the multiply-add instructions; m, reading memory.",
             against_limits(account, limits, options.dtype)]
    good = True
    for name, temperature in (("greedy", 0.0), ("sampled at temperature 1", 1.0)):
        share, line = overhead(run_rows(bench, sizes, steady(rows), temperature, full_only))
        good &= share < MOST_OVERHEAD
        pages.append(f"Outside torch and native code, {BATCH} rows decoding, {name}: {line}. Limit "
                     f"{100 * MOST_OVERHEAD:.0f} %: {'kept' if share < MOST_OVERHEAD else 'MISSED'}.")
    pages.append(make_signature({"profile": origin, "dtype": options.dtype}, threads=options.threads).text)
    text = "\n\n".join(pages) + "\n"
    print(text)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
