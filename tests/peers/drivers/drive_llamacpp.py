"""llama.cpp: its own server over loopback, with one slot a sequence up to a limit and continuous batching.

All rows are handed over at once; slots take them as they become free.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from driver_kit import now, options, read_rows, report

KV_TYPES = {"bf16": "f16", "fp32": "f32"}
"""f16 is what its attention on a CPU is fastest at, and takes the same bytes as bf16."""
START_SECONDS = 120.0


def add(parser: ArgumentParser) -> None:
    parser.add_argument("--server", type=Path, required=True, help="the llama-server program")
    parser.add_argument("--release", default="unknown release", help="what it was built from; it cannot tell itself")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--split", action="store_true", help="a cache of its own for each slot, not one for all")
    parser.add_argument("--ubatch", type=int, default=512, help="rows of one computation")
    parser.add_argument("--first-alone", action="store_true", help="the first row by itself, then the others")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running llama-server. `peak_mib` and `cpu` are its own, not this client's."""

    def __init__(self, given: Namespace, context: int, slots: int) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = given.out.with_suffix(".server.log")
        command = [given.server, "--model", given.model, "--host", "127.0.0.1", "--port", port,
                   "--threads", given.threads, "--threads-batch", given.threads, "--parallel", slots,
                   "--no-kv-unified" if given.split else "--kv-unified", "--ctx-size", context,
                   "--batch-size", 2048, "--ubatch-size", given.ubatch, "--flash-attn", "on",
                   "--cache-type-k", KV_TYPES[given.dtype], "--cache-type-v", KV_TYPES[given.dtype],
                   "--cache-ram", 0, "--threads-http", 16 + slots, "--no-ui", "--offline"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        end = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                sys.exit(f"llama-server did not come up:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def complete(self, row: dict[str, Any], number: int) -> list[list[int]]:
        """A row's samples: token ids."""
        greedy = row["temperature"] == 0
        body = {"prompt": row["prompt_token_ids"], "n_predict": row["max_tokens"], "ignore_eos": True,
                "n_cmpl": row["n"], "seed": number, "samplers": ["top_k"] if greedy else ["temperature"],
                "top_k": 1 if greedy else 0, "temperature": row["temperature"], "return_tokens": True,
                "cache_prompt": True, "stream": False}
        call = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(),
                                      {"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=3600) as answer:
            found = json.loads(answer.read())
        return [sample["tokens"] for sample in (found if isinstance(found, list) else [found])]

    @property
    def peak_mib(self) -> float:
        """Its resident high-water mark."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found.group(1)) / 1024 if found else 0.0

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds it has used; fields 14 and 15 of its stat, in hundredths."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    given = options(__doc__ or "", add)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the server ends too
    rows = read_rows(given.rows)
    longest = max(len(row["prompt_token_ids"]) + row["max_tokens"] * row["n"] for row in rows)
    slots = min(given.slots, sum(row["n"] for row in rows))
    server = Server(given, slots * (longest + 32), slots)
    try:
        server.complete({"prompt_token_ids": [1, 9690, 198], "max_tokens": 2, "n": 1, "temperature": 0.0}, 0)
        loaded = now()[0], server.cpu_seconds
        outputs = {}
        alone = 1 if given.first_alone else 0
        for row in rows[:alone]:
            outputs[row["id"]] = server.complete(row, 0)
        with ThreadPoolExecutor(max_workers=len(rows)) as pool:
            waiting = {row["id"]: pool.submit(server.complete, row, number)
                       for number, row in enumerate(rows[alone:], alone)}
            outputs |= {key: future.result() for key, future in waiting.items()}
        done = now()[0], server.cpu_seconds
        report(given, version=f"llama.cpp, {given.release}", loaded=loaded, done=done, outputs=outputs,
               peak_mib=server.peak_mib,
               settings={"slots": slots, "kv": KV_TYPES[given.dtype], "unified": not given.split,
                         "ubatch": given.ubatch, "first_alone": given.first_alone})
    finally:
        server.stop()


if __name__ == "__main__":
    main()
