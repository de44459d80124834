"""What only a GPU can show, in under eight minutes: `python -m tests.gpu.check [--name NAME]` (make gpu-check).

Every kernel case against float64, streams with reused buffers, graph replays, swaps beside steps, engine outputs equal
to the CPU's, whole decode steps, and bandwidth against a copy of the same run. Writes results/gpu/NAME.json after each
part. Needs torch with CUDA, CuPy with NVRTC, numpy, numba, transformers, typer, rich and pandas; no installation of
this project, no compiler, no network, no weights.

Each part runs in a process of its own, since an illegal access leaves a process's GPU context unusable, and is stopped
when its time is over. `--only` runs some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.checkout import ROOT, use_checkout
from tests.gpu.parts import PARTS

SECONDS = 460.0
"""For all parts together: what has not begun by then is not run, and what runs is stopped."""
LEAST = 15.0
"""Seconds that a part needs to be worth starting."""


def run_part(name: str, seconds: float) -> dict[str, Any]:
    """One part's findings, or how it ended, from a process that is stopped with all its own after `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "out.json", Path(folder) / "said.txt"
        with said.open("wb") as log:
            child = subprocess.Popen([sys.executable, "-m", "tests.gpu.check", "--part", name, "--out", str(out)],
                                     cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                     start_new_session=True, env=_surroundings())
            try:
                status = child.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                _stop(child)
                return {"ok": False, "fault": f"stopped after {seconds:.0f} s", "said": _end(said)}
            except BaseException:
                _stop(child)
                raise
        if not out.exists():
            ended = f"signal {-status}" if status < 0 else f"status {status}"
            return {"ok": False, "fault": f"its process ended with {ended}", "said": _end(said)}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _surroundings() -> dict[str, str]:
    """Compiled code goes under build/, since a home folder may be missing or read-only."""
    kept = ROOT / "build" / "gpu-check"
    return {"PAGEDCLI_CUDA_CACHE": str(kept / "cubins"), "NUMBA_CACHE_DIR": str(kept / "numba"), **os.environ}


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a part and the processes it started. One that hangs in the driver may outlive this; it is left behind."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def _end(said: Path) -> str:
    return said.read_text(errors="replace")[-3000:]


def part_main(name: str, out: Path) -> int:
    """A part's process."""
    try:
        found = PARTS[name][0]()
        text = json.dumps(found)
    except Exception:
        text = json.dumps({"ok": False, "fault": traceback.format_exc()[-3000:]})
    out.write_text(text)
    return 0


def run_all(names: Sequence[str], name: str | None, seconds: float = SECONDS) -> int:
    """Runs parts and writes what they find; 1 when one of them fails."""
    started = time.time()
    result: dict[str, Any] = {"environment": {}, "parts": {}}
    parts: dict[str, Any] = result["parts"]
    for part in dict.fromkeys(["environment", *names]):
        began = time.time()
        left = started + seconds - began
        found = (run_part(part, min(PARTS[part][1], left)) if left >= LEAST else
                 {"ok": False, "fault": f"not run: the {seconds:.0f} s for all parts were over"})
        if part == "environment":
            result["environment"] = found
        parts[part] = {"ok": found["ok"]} if part == "environment" and found["ok"] else found
        parts[part]["seconds"] = round(time.time() - began, 1)
        print(f"{part}: {'ok' if found['ok'] else 'FAILED'} in {time.time() - began:.0f} s", flush=True)
        if not found["ok"]:
            print("  " + "\n  ".join(_reason(found).splitlines()[-6:]), flush=True)
        gpu = re.sub(r"[^a-z0-9]+", "-", str(result["environment"].get("gpu", "unknown")).lower())
        target = ROOT / "results" / "gpu" / f"{name or gpu}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n")
    failed = [part for part, found in parts.items() if not found["ok"]]
    print(f"gpu-check: {'passed' if not failed else 'FAILED ' + ', '.join(failed)} in {time.time() - started:.0f} s; "
          f"{target.relative_to(ROOT)}")
    return int(bool(failed))


def _reason(found: dict[str, Any]) -> str:
    """Why a part failed, in its own words where it has some."""
    for key in ("fault", "stderr"):
        if found.get(key):
            return f"{found.get('said', '')}\n{found[key]}".strip()
    return json.dumps(found)[:600]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="name of the result file (default: the GPU's name)")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_checkout()
    if options.part:
        return part_main(options.part, options.out)
    import torch
    if not torch.cuda.is_available():
        print("gpu-check skipped: torch sees no CUDA device on this machine; use `make cuda-check`, which needs none")
        return 0
    return run_all(options.only, options.name)


if __name__ == "__main__":
    raise SystemExit(main())
