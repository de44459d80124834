"""What only a GPU can show, in under eight minutes: `python -m tests.gpu.check [--name NAME]` (make gpu-check).

Every kernel case against float64, streams with reused buffers, graph replays, swaps beside steps, engine outputs equal
to the CPU's, whole decode steps, and bandwidth against a copy of the same run. Writes results/gpu/NAME.json. Needs
torch with CUDA, CuPy with NVRTC, numpy, numba, transformers, typer, rich and pandas; no compiler, no network, no
weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 400.0
"""Seconds after which no further part starts: the longest of the last ones takes about a minute."""


def kernel_cases() -> dict[str, Any]:
    """The emulator's cases on the GPU."""
    from pagedcli.attention.cuda_kernels import CudaLauncher
    from tests.emulator import faults
    from tests.emulator.cases import all_cases
    from tests.gpu.launch import GpuLaunch
    launch = GpuLaunch(CudaLauncher())
    worst: dict[str, float] = {}
    failed: list[str] = []
    cases = [*all_cases(), *faults.cases()]
    for case in cases:
        error = case.run(launch)
        worst[case.dtype] = max(worst.get(case.dtype, 0.0), error)
        if not error <= case.limit:
            failed.append(f"{case.name}: {error:.2e}")
    return {"cases": len(cases), "failed": failed, "worst_error": worst, "ok": not failed}


def streams() -> dict[str, Any]:
    """1,000 decode steps on a side stream, buffers reused, nothing synchronised: each output must be its own step's."""
    import torch

    from pagedcli.attention.cuda import CudaBackend
    from pagedcli.attention.interface import KVLayout, LayerSpec, build_layout
    from pagedcli.attention.reference import ReferenceBackend
    from pagedcli.core.plan import Slice, StepPlan
    spec, seqs, steps = LayerSpec(8, 2, 64, 64, 0.125), 7, 1000
    layout = KVLayout((spec,), 16)
    per = -(-steps // 16)
    tables = torch.randperm(seqs * per, generator=torch.Generator().manual_seed(0)).view(seqs, per).tolist()
    pool = torch.zeros(seqs * per, layout.block_elements, device="cuda")
    backend = CudaBackend()
    backend.bind(layout, pool)
    rows = torch.randn(steps, seqs, 12, 64, device="cuda")
    out = torch.empty(steps, seqs, 8, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(steps):
            plan = StepPlan(slices=[Slice(s, [0], step, tables[s]) for s in range(seqs)])
            backend.prepare(build_layout(plan, 16))
            q, k, v = rows[step].split([8, 2, 2], dim=1)
            out[step] = backend.attend(0, q, k, v, spec)
    side.synchronize()
    judge = ReferenceBackend()
    judge.bind(layout, pool.cpu())
    worst = 0.0
    for step in range(0, steps, 37):
        plan = StepPlan(slices=[Slice(s, [0], step, tables[s]) for s in range(seqs)])
        judge.prepare(build_layout(plan, 16))
        q, k, v = rows[step].cpu().split([8, 2, 2], dim=1)
        worst = max(worst, float((judge.attend(0, q, k, v, spec) - out[step].cpu()).abs().max()))
    return {"steps": steps, "worst_error": worst, "ok": worst < 2e-5}


def graphs() -> dict[str, Any]:
    """Replayed decode steps of changing batches against the same steps without a graph, bit for bit."""
    import torch

    from pagedcli.attention.cuda import CudaBackend
    from pagedcli.attention.cuda_graph import DecodeGraphs
    from pagedcli.attention.interface import KVLayout, LayerSpec, build_layout
    from pagedcli.core.plan import Slice, StepPlan
    spec, blocks = LayerSpec(8, 2, 64, 64, 0.125), 8
    layout = KVLayout((spec,) * 2, 16)
    pools = [torch.zeros(32 * blocks, layout.block_elements, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    graphed, plain = CudaBackend(), CudaBackend()
    for backend, pool in zip((graphed, plain), pools, strict=True):
        backend.bind(layout, pool)
    static = torch.zeros(32, 12, 64, device="cuda", dtype=torch.bfloat16)

    def forward(backend: CudaBackend, rows: int) -> torch.Tensor:
        q, k, v = static[:rows].split([8, 2, 2], dim=1)
        return backend.attend(1, backend.attend(0, q, k, v, spec), k, v, spec)

    runner = DecodeGraphs(graphed, lambda rows: forward(graphed, rows), blocks, counts=(8, 32))
    different = replays = 0
    for step in range(100):
        seqs = (3, 8, 20, 31)[step % 4]
        static.copy_(torch.randn_like(static))
        plan = StepPlan(slices=[Slice(s, [0], step, list(range(s * blocks, (s + 1) * blocks))) for s in range(seqs)])
        got = runner.run(build_layout(plan, 16))
        assert got is not None
        kept = got[:seqs].clone()
        plain.prepare_graph(build_layout(plan, 16), len(got), blocks)
        different += int(not torch.equal(kept, forward(plain, len(got))[:seqs]))
        replays += 1
    return {"replays": replays, "different": different, "ok": different == 0}


TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}
"""Heads of 64, groups of two; weights are random from a fixed seed, the same on every device."""


ROOMY, TIGHT = ("--num-kv-blocks", "256"), ("--num-kv-blocks", "24", "--preemption", "swap")
"""Settings of an engine run: blocks for all rows at once, or so few that sequences are swapped out and in."""
RUNS = (("cpu", "reference", ROOMY), ("cuda", "cuda", ROOMY), ("cuda", "cuda", TIGHT))


def engine(runs: tuple[tuple[str, str, tuple[str, ...]], ...] = RUNS) -> dict[str, Any]:
    """Greedy outputs of a tiny model in fp32: on the CPU, on the GPU (decode steps from graphs), and on the GPU with
    sequences swapped out and in. All must be equal."""
    prompts = [{"prompt_token_ids": [(7 * i + j) % 90 + 3 for j in range(3 + 5 * i)]} for i in range(12)]
    outputs, reports = [], []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        model = Path(folder) / "tiny-llama.json"
        model.write_text(json.dumps(TINY_LLAMA))
        for device, backend, words in runs:
            target, summary = (Path(folder) / f"{len(outputs)}.{end}" for end in ("jsonl", "json"))
            command = [sys.executable, "-c", "from pagedcli.cli.app import main; main()", "generate", str(source), "-o",
                       str(target), "--model", str(model), "--load-format", "dummy", "--dtype", "fp32", "--device",
                       device, "--attention-backend", backend, "--max-tokens", "32", "--temperature", "0",
                       "--ignore-eos", "--quiet", "--json-summary", str(summary), *words]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                return {"ok": False, "device": device, "status": done.returncode, "stderr": done.stderr[-1500:]}
            lines = [line for line in target.read_text().split("\n") if line]
            outputs.append([json.loads(line)["outputs"][0]["token_ids"] for line in lines])
            told = json.loads(summary.read_text())
            reports.append({"device": device, "attention": backend, "blocks": told["kv_blocks"],
                            "swaps": told["preemptions"]["swap"], "notes": told["notes"]})
    same = sum(all(ids == row[0] for ids in row) for row in zip(*outputs, strict=True))
    swapped = all(report["swaps"] > 0 for report, (_, _, words) in zip(reports, runs, strict=True) if words is TIGHT)
    return {"prompts": len(prompts), "equal": same, "runs": reports, "ok": same == len(prompts) and swapped}


def moves() -> dict[str, Any]:
    """Random swaps and copies of the real store under steps of compute, nothing synchronised, against plain tensors."""
    from tests.gpu.moves import random_moves
    found = random_moves(600)
    return {**found, "ok": found["different"] == 0}


def microbench() -> dict[str, Any]:
    """`pagedcli kernels` on this GPU: outputs and times against torch's attention, Figure 18a."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.json"
        command = [sys.executable, "-c", "from pagedcli.cli.app import main; main()", "kernels", "--json", str(target),
                   "--device", "cuda"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not target.exists():
            return {"ok": False, "status": done.returncode, "stderr": done.stderr[-1500:]}
        found = json.loads(target.read_text())
    return {**found, "ok": done.returncode == 0 and bool(found["rows"])}


def bandwidth() -> dict[str, Any]:
    """Copy bandwidth, then the share of it that decode attention reaches."""
    from tests.gpu.speed import copy_bandwidth, kernel_table
    peak = copy_bandwidth()
    table = kernel_table(peak, 60)
    best = max(row["share_of_copy"] for row in table)
    return {"copy_gb_per_s": round(peak / 1e9, 1), "decode": table, "best_share": best, "ok": best >= 0.85}


def decode_step() -> dict[str, Any]:
    """Decode steps of OPT-13B with random weights against reading weights and KV once."""
    from tests.gpu.speed import copy_bandwidth, decode_steps
    rows = decode_steps(copy_bandwidth())
    return {"rows": rows, "ok": bool(rows)}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "streams": streams, "graphs": graphs, "moves": moves, "engine": engine, "kernel_cases": kernel_cases,
    "decode_step": decode_step, "bandwidth": bandwidth, "microbench": microbench,
}


def environment() -> dict[str, Any]:
    """Device and versions."""
    import cupy
    import numpy
    import torch
    found = torch.cuda.get_device_properties(0)
    return {"gpu": found.name, "sms": found.multi_processor_count, "memory_bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}", "torch": torch.__version__, "cuda": torch.version.cuda,
            "cupy": cupy.__version__, "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "numpy": numpy.__version__, "python": sys.version.split()[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", help="name of the result file (default: the GPU's name)")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    import torch
    if not torch.cuda.is_available():
        print("gpu-check skipped: torch sees no CUDA device on this machine; use `make cuda-check`, which needs none")
        return 0
    started = time.time()
    result: dict[str, Any] = {"environment": environment(), "parts": {}}
    name = options.name or result["environment"]["gpu"].replace(" ", "-").lower()
    target = ROOT / "results" / "gpu" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        began = time.time()
        if began - started > BUDGET:
            found: dict[str, Any] = {"ok": False, "fault": f"not run: {BUDGET:.0f} s were over"}
        else:
            try:
                found = PARTS[part]()
            except Exception:
                found = {"ok": False, "fault": traceback.format_exc()[-3000:]}
        result["parts"][part] = {**found, "seconds": round(time.time() - began, 1)}
        print(f"{part}: {'ok' if found['ok'] else 'FAILED'} in {time.time() - began:.0f} s", flush=True)
        target.write_text(json.dumps(result, indent=1) + "\n")
    failed = [part for part, found in result["parts"].items() if not found["ok"]]
    print(f"gpu-check: {'passed' if not failed else 'FAILED ' + ', '.join(failed)} in {time.time() - started:.0f} s; "
          f"{target.relative_to(ROOT)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
