"""The parts of the GPU check. Each returns JSON values, "ok" among them, and runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.checkout import ROOT, command


def environment() -> dict[str, Any]:
    """Device and versions."""
    import cupy
    import numpy
    import torch
    import transformers
    found = torch.cuda.get_device_properties(0)
    return {"gpu": found.name, "sms": found.multi_processor_count, "memory_bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}", "torch": torch.__version__, "cuda": torch.version.cuda,
            "cupy": cupy.__version__, "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "numpy": numpy.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0],
            "ok": True}


MOST_FAULTS = 20
"""Cases that may fail before the rest is left out."""


def kernel_cases() -> dict[str, Any]:
    """The emulator's cases on the GPU."""
    from pagedcli.attention.cuda_kernels import CudaLauncher, architecture
    from tests.emulator import faults
    from tests.emulator.cases import all_cases
    from tests.gpu.compile import fill_cache
    from tests.gpu.launch import GpuLaunch
    launcher = CudaLauncher()
    launch = GpuLaunch(launcher)
    worst: dict[str, float] = {}
    failed: list[str] = []
    cases = [*all_cases(), *faults.cases()]
    began = time.perf_counter()
    compiled = fill_cache((kernel for case in cases for kernel in case.kernels()),
                          architecture(launcher.limits.capability))
    compiled_at = time.perf_counter()
    for case in cases:
        try:
            error = float(case.run(launch))
        except Exception as fault:
            failed.append(f"{case.name}: {type(fault).__name__}: {str(fault)[:200]}")
            if len(failed) == MOST_FAULTS:   # after an illegal access every launch fails
                failed.append("the rest was not run")
                break
            continue
        worst[case.dtype] = max(worst.get(case.dtype, 0.0), error)
        if not error <= case.limit:
            failed.append(f"{case.name}: {error:.2e}, at most {case.limit:.0e}")
    return {"cases": len(cases), "failed": failed, "worst_error": worst, "kernels": compiled,
            "compile_seconds": round(compiled_at - began, 1), "ok": not failed}


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
    outputs: list[list[list[int]]] = []
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        model = Path(folder) / "tiny-llama.json"
        model.write_text(json.dumps(TINY_LLAMA))
        for device, backend, extra in runs:
            target, summary = (Path(folder) / f"{len(outputs)}.{end}" for end in ("jsonl", "json"))
            words = ("generate", str(source), "-o", str(target), "--model", str(model), "--load-format", "dummy",
                     "--dtype", "fp32", "--device", device, "--attention-backend", backend, "--max-tokens", "32",
                     "--temperature", "0", "--ignore-eos", "--quiet", "--json-summary", str(summary), *extra)
            done = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True)
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


def sampling() -> dict[str, Any]:
    """Choosing on the GPU: as on the CPU but where rounding decides, whatever the batch."""
    from tests.gpu.sampling import compare_sampling
    found = compare_sampling()
    return {**found, "ok": found["changed_by_neighbours"] == 0 and found["same_as_cpu"] >= found["rows"] - 3}


def microbench() -> dict[str, Any]:
    """`pagedcli kernels` on this GPU: outputs and times against torch's attention, Figure 18a."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.json"
        done = subprocess.run(command("kernels", "--json", str(target), "--device", "cuda"), cwd=ROOT,
                              capture_output=True, text=True)
        if not target.exists():
            return {"ok": False, "status": done.returncode, "stderr": done.stderr[-1500:]}
        found = json.loads(target.read_text())
    return {**found, "ok": done.returncode == 0 and bool(found["rows"])}


def bandwidth() -> dict[str, Any]:
    """Copy bandwidth, then the share of it that decode attention, cache writes and block copies reach."""
    from tests.gpu.cache_speed import cache_table
    from tests.gpu.speed import copy_bandwidth, kernel_table
    peak = copy_bandwidth()
    moving = cache_table(peak)
    table = kernel_table(peak, 50)
    best = max(row["share_of_copy"] for row in table)
    return {"copy_gb_per_s": round(peak / 1e9, 1), "cache": moving, "decode": table, "best_share": best,
            "ok": best >= 0.85}


NEEDED = 34 << 30
"""Bytes of GPU memory below which OPT-13B's 26 GB of weights leave no room for its larger steps."""


def decode_step() -> dict[str, Any]:
    """Decode steps of OPT-13B with random weights against reading weights and KV once."""
    import torch

    have = torch.cuda.get_device_properties(0).total_memory
    if have < NEEDED:
        return {"ok": True, "left_out": f"OPT-13B needs {NEEDED:,} bytes of GPU memory, this one has {have:,}"}
    from tests.gpu.speed import copy_bandwidth, decode_steps
    rows = decode_steps(copy_bandwidth())
    return {"rows": rows, "ok": bool(rows)}


PARTS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "environment": (environment, 60), "streams": (streams, 60), "graphs": (graphs, 60), "moves": (moves, 60),
    "sampling": (sampling, 60), "engine": (engine, 150), "kernel_cases": (kernel_cases, 150),
    "decode_step": (decode_step, 120), "bandwidth": (bandwidth, 90), "microbench": (microbench, 90),
}
"""Name -> (part, seconds after which it is stopped), the most telling first. All of them take about half as long."""
