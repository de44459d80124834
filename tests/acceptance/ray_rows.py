"""Many rows on null engines by Ray: rows per second, and what the driver's memory does meanwhile.

python -m tests.acceptance.ray_rows [--rows 200000] [--replicas 2] [--tokens 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.cli.test_crash import PROGRAM

BEGINNINGS = ("", "Answer in one word. ", "Answer in one word, and say how sure you are of it. ")
"""What rows share: nothing, one full block, three."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "in.jsonl").open("w") as stream:
            for index in range(options.rows):
                beginning = BEGINNINGS[index % len(BEGINNINGS)]
                stream.write(json.dumps({"prompt": f"{beginning}What is {index} and {index * 7 % 1000}?"}) + "\n")
        base = ["generate", "in.jsonl", "--model", "null", "--max-tokens", str(options.tokens)]
        one, _ = run(folder, [*base, "-o", "one"], options.rows)
        many, samples = run(folder, [*base, "-o", "many", "--ray", "--replicas", str(options.replicas)], options.rows)
        same = (folder / "one").read_bytes() == (folder / "many").read_bytes()
    print(f"{options.rows:,} rows: {one:,.0f} rows/s on one engine, {many:,.0f} rows/s on {options.replicas} replicas "
          f"by Ray (generation only); bytes {'equal' if same else 'DIFFER'}")
    print("driver memory by share of rows done: " + ", ".join(f"{share:.0%} {mib:.0f} MiB" for share, mib in samples))
    raise SystemExit(not same)


def run(folder: Path, arguments: list[str], rows: int) -> tuple[float, list[tuple[float, float]]]:
    """Rows per second, and the driver's resident memory each time another tenth of the journal is there."""
    output = folder / arguments[arguments.index("-o") + 1]
    summary = output.with_suffix(".json")
    process = subprocess.Popen([*PROGRAM, *arguments, "-q", "--json-summary", summary.name], cwd=folder)
    watched, samples, tenth = psutil.Process(process.pid), [], 1
    size_of_row = 0.0
    while process.poll() is None:
        time.sleep(0.25)
        journal = output.with_name(output.name + ".partial")
        if not journal.exists():
            continue
        if not size_of_row and journal.stat().st_size > 100_000:
            head = journal.read_bytes()[:100_000]
            size_of_row = len(head) / head.count(b"\n")
        if size_of_row and journal.stat().st_size / size_of_row / rows >= tenth / 10:
            try:
                samples.append((tenth / 10, watched.memory_info().rss / 2**20))
            except psutil.NoSuchProcess:
                break
            tenth += 1
    if process.wait() != 0:
        sys.exit(f"{arguments} ended with {process.returncode}")
    return json.loads(summary.read_text())["rows_per_s"], samples


if __name__ == "__main__":
    main()
