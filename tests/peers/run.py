"""This tool and other engines on the same rows, in turns: `python -m tests.peers.run --rounds 3` (`make bench-peers`).

Each run is a fresh process on the same threads; rounds go A B C A B C, so that a change of the machine's speed meets
all. Outputs are checked (lengths, first greedy tokens), medians go to results/peers/. For one engine on one workload:
`--peers openvino --workloads W3 --rounds 1`; for a quick look at everything: `--rows 8 --tokens 16`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.peers.check import END_TOKEN, Agreement, agreement, length_faults, read_outputs
from tests.peers.engines import ENGINES, JOB, OURS, OWN_PYTHON, PEERS, REPOSITORY, Ask, Engine, Place, chosen
from tests.peers.measure import run as run_process
from tests.peers.records import Run
from tests.peers.set_up import default_place, prepare
from tests.peers.workloads import NAMES, Source, Workload, make

RESULTS = REPOSITORY / "results" / "peers"
REFERENCE_SECONDS = 3600.0
MACHINE_SECONDS = 300


@dataclass(frozen=True)
class Settings:
    """What was asked on the command line."""

    rounds: int
    workloads: tuple[str, ...]
    engines: tuple[Engine, ...]
    dtype: str
    threads: int
    whole_job: tuple[str, ...]
    rows: int | None
    tokens: int | None
    limit_seconds: float
    pause_seconds: float


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def load_workloads(names: Sequence[str], rows: int | None, tokens: int | None) -> list[Workload]:
    """The workloads, from the development data where it is at hand, else from text of our own."""
    from pagedcli.core.config import ModelConfig
    from pagedcli.execution.model_hub import resolve_model
    from pagedcli.execution.tokenizer import load_tokenizer
    from tests.acceptance.kit import SHARED, real_prompts

    tokenizer = load_tokenizer(resolve_model(ModelConfig()))
    assert tokenizer is not None, "the default model has one"
    texts, origin = real_prompts(800)
    source = Source(texts, origin, SHARED)
    found = [make(name, source, tokenizer.encode) for name in names]
    return [workload.cut(rows, tokens) if rows or tokens else workload for workload in found]


def row_file(workload: Workload, place: Place) -> Path:
    """The workload's rows on disk, where every engine reads them."""
    file = place.root / "rows" / f"{workload.name}-{workload.digest}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(workload.text, encoding="utf-8")
    return file


def reference(workload: Workload, place: Place, threads: int) -> dict[str, list[list[int]]]:
    """First tokens by transformers in fp32, kept from one comparison to the next; empty for sampled rows."""
    if all(row["temperature"] > 0 for row in workload.rows):
        return {}
    file = place.root / "reference" / f"{workload.name}-{workload.digest}.jsonl"
    if not file.is_file():
        say(f"{workload.name}: reference by transformers, fp32, one row at a time; kept for the next comparison")
        file.parent.mkdir(parents=True, exist_ok=True)
        log = file.with_suffix(".log")
        ended = run_process(
            [OWN_PYTHON, "-m", "tests.peers.check", "--rows", row_file(workload, place), "--out", file,
             "--model", place.weights, "--threads", str(threads)], {"PYTHONPATH": str(REPOSITORY)}, log,
            REFERENCE_SECONDS, heed=say)
        if ended.error is not None:
            say(f"{workload.name}: no reference, so no row is compared: {ended.error}")
            return {}
    return read_outputs(file)


def one(engine: Engine, workload: Workload, number: int, settings: Settings, place: Place,
        expected: dict[str, list[list[int]]]) -> Run:
    """Run an engine once on a workload and check what it wrote."""
    folder = place.root / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{workload.name}-{engine.name}-{settings.dtype}-{number}.json"
    for old in folder.glob(f"{out.stem}.*"):
        old.unlink()
    ask = Ask(workload.name, settings.dtype, settings.threads, row_file(workload, place), out)
    ended = run_process(engine.command(place, ask), engine.environment(place, ask), out.with_suffix(".log"),
                        settings.limit_seconds)
    blank = Run(engine.name, workload.name, number)
    if ended.error is not None:
        return replace(blank, error=ended.error)
    if engine.name == JOB:
        faults = job_faults(workload, out.with_suffix(".answers.jsonl"))
        return replace(blank, whole=ended.seconds, peak_mib=ended.peak_mib, faults=tuple(faults[:3]))
    if not out.is_file():
        return replace(blank, error="it ended well, and wrote no figures")
    told: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    outputs = read_outputs(out.with_suffix(".rows.jsonl"))
    until = END_TOKEN if engine.forbids_end else None
    found = agreement(workload.rows, outputs, expected, until=until) if expected else Agreement(0, 0)
    return replace(
        blank, wall=told["wall_seconds"], load=told["load_seconds"], whole=told["done_at"] - ended.started,
        cpu=told["cpu_seconds"], peak_mib=told["peak_mib"] or max(ended.peak_mib, told["own_peak_mib"]),
        equal=found.equal, compared=found.compared, version=told["version"], settings=told["settings"],
        faults=tuple(length_faults(workload.rows, outputs)[:3]))


def job_faults(workload: Workload, file: Path) -> list[str]:
    """What is wrong with the answers of `pagedcli generate`: rows, or tokens by its own count."""
    if not file.is_file():
        return [f"{file.name}: not written"]
    answers = {row["id"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    faults = []
    for row in workload.rows:
        answer = answers.get(row["id"])
        got = answer["usage"]["completion_tokens"] if answer and answer.get("usage") else None
        if got != row["max_tokens"] * row["n"]:
            faults.append(f"{row['id']}: {got} tokens, asked for {row['max_tokens'] * row['n']}")
    return faults


def machine(threads: int) -> dict[str, float]:
    """The machine's limits, measured now by a process of its own; empty when it takes too long."""
    say("machine: copy and matrix rates")
    try:
        done = subprocess.run([OWN_PYTHON, "-m", "tests.peers.machine", "--threads", str(threads)], cwd=REPOSITORY,
                              capture_output=True, text=True, check=True, timeout=MACHINE_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"machine: not measured after {MACHINE_SECONDS} s")
        return {}
    return json.loads(done.stdout)


def turns(settings: Settings) -> list[tuple[int, str, Engine]]:
    """Every run in the order in which they are done: rounds of workloads of engines."""
    found = []
    for number in range(1, settings.rounds + 1):
        for workload in settings.workloads:
            for engine in settings.engines:
                if engine.most_rounds is None or number <= engine.most_rounds:
                    found.append((number, workload, engine))
                if engine.name == OURS and workload in settings.whole_job:
                    found.append((number, workload, ENGINES[JOB]))
    return found


def told(run: Run) -> str:
    """A run in one line."""
    if run.error is not None:
        return run.error
    parts = [f"{name} {value:.2f} s" for name in ("wall", "load", "whole", "cpu")
             if (value := getattr(run, name)) is not None]
    parts += [f"{run.peak_mib:.0f} MiB"] if run.peak_mib is not None else []
    parts += [f"{run.equal} of {run.compared} rows agree"] if run.compared else []
    return ", ".join([*parts, *run.faults])


def parse(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--peers", default=",".join(name for name in PEERS if name != "transformers"),
                        help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--whole-job", default="W1", help="workloads on which `pagedcli generate` runs too, or none")
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--tokens", type=int, help="at most so many output tokens")
    parser.add_argument("--limit-seconds", type=float, default=1800, help="of one run")
    parser.add_argument("--pause-seconds", type=float, default=2, help="between runs")
    parser.add_argument("--name", help="of the result; by default the type and the day")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    workloads = tuple(dict.fromkeys(given.workloads.split(",")))
    whole = () if given.whole_job == "none" else tuple(given.whole_job.split(","))
    unknown = sorted({*workloads, *whole} - set(NAMES))
    if unknown:
        parser.error(f"{', '.join(unknown)}: workloads are {', '.join(NAMES)}")
    try:
        engines = chosen(given.peers)
    except ValueError as fault:
        parser.error(str(fault))
    if given.rounds < 1:
        parser.error(f"--rounds = {given.rounds}: must be at least 1")
    return Settings(given.rounds, workloads, engines, given.dtype, given.threads, whole, given.rows, given.tokens,
                    given.limit_seconds, given.pause_seconds), given


def main(arguments: Sequence[str] | None = None) -> int:
    settings, given = parse(arguments)
    from tests.peers.report import Report, show

    place = default_place()
    failed = prepare([engine.needs for engine in settings.engines if engine.needs], place, say)
    able = tuple(engine for engine in settings.engines if engine.needs not in failed)
    report = Report.start(settings, given.name, failed)
    settings = replace(settings, engines=able)
    workloads = {workload.name: workload
                 for workload in load_workloads(settings.workloads, settings.rows, settings.tokens)}
    expected = {name: reference(workload, place, settings.threads) for name, workload in workloads.items()}
    report.workloads = list(workloads.values())
    report.machine = [machine(settings.threads)]
    order = turns(settings)
    for place_in_order, (number, name, engine) in enumerate(order, 1):
        say(f"{place_in_order} of {len(order)}: round {number}, {name}, {engine.title}")
        run = one(engine, workloads[name], number, settings, place, expected[name])
        report.runs.append(run)
        say(f"  {told(run)}")
        report.write(given.results)
        time.sleep(settings.pause_seconds)
    report.machine.append(machine(settings.threads))
    report.write(given.results)
    show(report)
    return 1 if failed or any(run.error or run.faults for run in report.runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
