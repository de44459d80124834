"""The compile gate: every kernel to machine code for sm_80 and sm_90 with NVRTC, no GPU needed, then registers, spills
and the instructions that must be there. `python -m tests.emulator.nvrtc` prints the table.

Compilation runs in a process of its own: a source that crashes NVRTC takes the interpreter with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import A100, H200, HEAD_DIMS, DeviceLimits
from tests.emulator.problems import make_shape

ARCHES: dict[str, DeviceLimits] = {"sm_80": A100, "sm_90": H200}
REGISTER_LIMITS: dict[str, int] = {
    "decode_v1": 128, "decode_split": 255, "decode_mma": 255, "reduce_splits": 64, "prefill_mma": 255,
    "prefill_simt": 255, "reshape_and_cache": 64, "copy_blocks": 64,
}
"""128 threads a block: 128 registers leave four blocks on an SM, 255 two. Spills are never allowed."""
REQUIRED: dict[str, tuple[str, ...]] = {
    "decode_v1": ("LDG.128",), "decode_split": ("LDG.128",), "decode_mma": ("HMMA", "LDGSTS", "LDSM"),
    "prefill_mma": ("HMMA", "LDGSTS", "LDSM"), "prefill_simt": ("LDG.128",), "reshape_and_cache": ("LDG.128",),
    "copy_blocks": ("LDG.128",), "reduce_splits": (),
}
COUNTED: dict[str, str] = {
    "LDG.128": r"LDG\.E\S*\.128", "LDG.64": r"LDG\.E\S*\.64", "LDGSTS": "LDGSTS", "HMMA": "HMMA", "LDSM": "LDSM",
    "SHFL": "SHFL", "LDL": r"\bLDL", "STL": r"\bSTL",
}


@dataclass
class Report:
    """One kernel on one architecture."""

    arch: str
    kernel: str
    registers: int
    stack: int
    instructions: int
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def spills(self) -> bool:
        return bool(self.stack or self.counts.get("LDL") or self.counts.get("STL"))

    def faults(self) -> list[str]:
        base, found = self.kernel.split("<")[0], []
        if self.spills:
            found.append(f"spills: stack {self.stack}, {self.counts}")
        if self.registers > REGISTER_LIMITS[base]:
            found.append(f"{self.registers} registers, at most {REGISTER_LIMITS[base]}")
        if "fp8" not in self.kernel or base not in ("decode_v1", "decode_split", "prefill_simt"):
            found += [f"no {name}" for name in REQUIRED[base] if not self.counts.get(name)]
        return found


def gate_kernels(device: DeviceLimits) -> list[Kernel]:
    """What is compiled: every kernel at every head size and type, softcap on some, both 8-bit caches."""
    kernels = {plans.COPY_BLOCKS}
    for i, (dim, dtype) in enumerate(product(HEAD_DIMS, ("fp32", "fp16", "bf16"))):
        cap = 30.0 if i % 4 == 0 else 0.0
        one = make_shape(dtype, dim, softcap=cap)
        kernels |= {plans.decode_v1(one), plans.reshape_and_cache(one), plans.reduce_splits(one),
                    plans.prefill(one, device)[0]}
        for group in (2, 4):
            kernels.add(plans.decode_split(make_shape(dtype, dim, group=group, softcap=cap)))
        if dtype != "fp32":
            kernels.add(plans.decode_mma(one, device))
    for kind, dim in product(("fp8_e4m3", "fp8_e5m2"), (64, 120, 128, 256)):
        for dtype in ("fp16", "bf16"):
            one = make_shape(dtype, dim, cache=kind, group=2)
            kernels |= {plans.decode_v1(one), plans.decode_split(one), plans.decode_mma(one, device),
                        plans.prefill(one, device)[0], plans.reshape_and_cache(one)}
    for size in (8, 32, 64, 128):
        one = make_shape(block_size=size)
        kernels |= {plans.decode_v1(one), plans.decode_mma(one, device), plans.prefill(one, device)[0]}
    return sorted(kernels, key=lambda kernel: (kernel.source, kernel.name))


def tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: on the path, beside the interpreter or in NVIDIA's wheels."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    nvidia = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return shutil.which(name) or next((str(path) for path in nvidia.glob(f"**/bin/{name}")), None)


def missing() -> str | None:
    """Why the gate cannot run here; None when it can."""
    from pagedcli.attention.cuda_kernels import _nvrtc, include_folders
    from pagedcli.core.errors import CannotRunError
    try:
        _nvrtc()
    except CannotRunError as fault:
        return str(fault)
    if not include_folders():
        return "CUDA's headers are not installed (pip install nvidia-cuda-runtime-cu12)"
    for name in ("cuobjdump", "nvdisasm"):
        if tool(name) is None:
            return f"{name} is not installed (pip install nvidia-cuda-{name})"
    return None


def compile_in_process(file: str, names: list[str], arch: str, out: Path) -> dict[str, str]:
    """Symbols by kernel name; the machine code goes to `out`."""
    job = json.dumps({"file": file, "names": names, "arch": arch, "out": str(out)})
    done = subprocess.run([sys.executable, "-m", "tests.emulator.nvrtc", job], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{file} for {arch}: status {done.returncode}\n{done.stderr[-3000:]}")
    symbols: dict[str, str] = json.loads(done.stdout)
    return symbols


def inspect(cubin: Path, symbols: dict[str, str], arch: str) -> list[Report]:
    """Registers, stack and instruction counts by NVIDIA's own disassembler."""
    dump = tool("cuobjdump") or "cuobjdump"
    path = f"{Path(tool('nvdisasm') or '').parent}{os.pathsep}{os.environ.get('PATH', '')}"
    usage = subprocess.run([dump, "-res-usage", str(cubin)], capture_output=True, text=True)
    code = subprocess.run([dump, "-sass", str(cubin)], capture_output=True, text=True, env={**os.environ, "PATH": path})
    bodies: dict[str, list[str]] = {}
    current: list[str] = []
    for line in code.stdout.splitlines():
        named = re.search(r"Function : (\S+)", line)
        if named:
            current = bodies.setdefault(named.group(1), [])
        current.append(line)
    names, found = {symbol: name for name, symbol in symbols.items()}, []
    for match in re.finditer(r"Function (\S+):\s*\n\s*(.*)", usage.stdout + usage.stderr):
        symbol, numbers = match.group(1), dict(re.findall(r"(\w+):(\d+)", match.group(2)))
        if symbol not in names:
            continue
        body = "\n".join(bodies.get(symbol, []))
        found.append(Report(arch, names[symbol], int(numbers["REG"]), int(numbers["STACK"]),
                            len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", body, re.M)),
                            {name: n for name, pattern in COUNTED.items() if (n := len(re.findall(pattern, body)))}))
    if len(found) != len(symbols):
        raise RuntimeError(f"{cubin.name}: {len(symbols)} kernels compiled, {len(found)} found in it")
    return found


def run_gate(arches: tuple[str, ...] = tuple(ARCHES), jobs: int = 2,
             kernels: dict[str, list[Kernel]] | None = None) -> list[Report]:
    """Compiles and inspects everything, `jobs` files at a time."""
    work: list[tuple[str, str, list[str]]] = []
    for arch in arches:
        by_file: dict[str, list[str]] = {}
        for kernel in (kernels or {}).get(arch) or gate_kernels(ARCHES[arch]):
            by_file.setdefault(kernel.source, []).append(kernel.name)
        work += [(arch, file, names[i:i + 20]) for file, names in by_file.items() for i in range(0, len(names), 20)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        def one(index: int) -> list[Report]:
            arch, file, names = work[index]
            out = Path(folder) / f"{index}.cubin"
            return inspect(out, compile_in_process(file, names, arch, out), arch)
        return [report for reports in pool.map(one, range(len(work))) for report in reports]


def print_gate(reports: list[Report], every: bool = True) -> int:
    """The table; returns how many kernels fall short."""
    bad = 0
    for r in sorted(reports, key=lambda r: (r.kernel, r.arch)):
        faults = r.faults()
        bad += bool(faults)
        if every or faults:
            counts = " ".join(f"{name} {n}" for name, n in r.counts.items())
            print(f"{r.arch} {r.kernel:62s} {r.registers:3d} registers {r.instructions:5d} instructions  {counts}"
                  f"{'  FAULT ' + '; '.join(faults) if faults else ''}")
    for arch in sorted({r.arch for r in reports}):
        mine = [r for r in reports if r.arch == arch]
        spilled = sum(r.spills for r in mine)
        print(f"{arch}: {len(mine)} kernels compiled, {spilled} spill, most registers {max(r.registers for r in mine)}")
    return bad


def main() -> int:
    if len(sys.argv) == 2:
        from pagedcli.attention.cuda_kernels import compile_kernels
        job = json.loads(sys.argv[1])
        made = compile_kernels(job["file"], job["names"], job["arch"])
        Path(job["out"]).write_bytes(made.cubin)
        print(json.dumps(made.symbols))
        return 0
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    started = time.time()
    bad = print_gate(run_gate())
    print(f"{time.time() - started:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
