"""Bugs planted in the kernels one at a time: the test of the tests. Each must be caught by some case on some build.

`python -m tests.emulator.mutants` tries them all and says what caught each; a kernel that crashes its process counts,
so every try is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pagedcli.attention.cuda_launch import Kernel
from pagedcli.cuda import HEADER_FILES, source
from tests.emulator import faults
from tests.emulator.cases import Case, decode_case, prefill_case, write_case
from tests.emulator.emulator import EmulatorError, EmuModule
from tests.emulator.problems import copy_error

BUILDS: tuple[tuple[str, int], ...] = (("fast", 0), ("fast", 1), ("fast", 7), ("asan", 0), ("tsan", 0))
"""Tried in this order: (build, schedule)."""


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` (first place) in `file`; `cases` are tried on each build of BUILDS in turn."""

    name: str
    file: str
    old: str
    new: str
    cases: tuple[str, ...]
    host: bool = False   # the bug is in how the case launches, not in the source

    def texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Changed kernel files and changed headers. ValueError: the text to change is gone."""
        text = source(self.file)
        if self.old not in text:
            raise ValueError(f"{self.name}: {self.file} no longer holds {self.old!r}")
        changed = {self.file: text.replace(self.old, self.new, 1)}
        return ({}, changed) if self.file in HEADER_FILES else (changed, {})


CASES: dict[str, Case] = {
    "v1": decode_case("v1", contexts=(33, 80), block_size=16, group=2),
    "v1 exact": decode_case("v1", contexts=(24,), block_size=8),
    "v1 long": decode_case("v1", contexts=(300,)),
    "v1 softcap": decode_case("v1", contexts=(33,), softcap=4.0, sharp=9.0),
    "v1 sinks": decode_case("v1", contexts=(33,), sinks=True),
    "v1 fp8": decode_case("v1", cache="fp8_e4m3", contexts=(33,), scales=True),
    "far v1": faults.far_offsets()[0],
    "split": decode_case("split", 3, group=3, contexts=(33, 150)),
    "split window": decode_case("split", 3, group=3, contexts=(33, 150), window=70),
    "far split": faults.far_offsets()[1],
    "mma": decode_case("mma", 2, group=5, contexts=(33, 150)),
    "mma 12": decode_case("mma", 1, group=12, kv_heads=1, contexts=(33,)),
    "mma long": decode_case("mma", 1, group=4, contexts=(400,)),
    "mma 120": decode_case("mma", 2, group=5, contexts=(33,), head_dim=120),
    "mma fp8": decode_case("mma", 1, group=5, cache="fp8_e4m3", contexts=(33, 150), scales=True),
    "mma last": decode_case("mma", 1, group=3, kv_heads=1, contexts=(20,)),
    "far mma": faults.far_offsets()[2],
    "prefill": prefill_case(((40, 40), (70, 33), (131, 70)), group=2),
    "prefill fp8": prefill_case(((131, 70),), group=2, cache="fp8_e4m3", scales=True),
    "prefill fp32": prefill_case(((9, 9), (40, 7)), dtype="fp32", group=2),
    "write": write_case(separate=True, dtype="fp16"),
    "write fp8": write_case(True, separate=True, cache="fp8_e4m3"),
    "far write": next(c for c in faults.far_offsets() if c.name == "1 far write"),
    "copy": Case("copy", "bytes", 0.0, lambda launch: copy_error(launch, [(0, 3), (1, 4)], 6, 4096 + 512)),
    "copy overlap": Case("copy overlap", "bytes", 0.0, lambda launch: copy_error(
        launch, [(0, 1), (1, 2)], 4, 4096, waves=False)),
}

_S, _A, _M, _D, _P, _C = ("simt_attention.cuh", "paged_attention.cu", "mma_attention.cuh", "paged_attention_mma.cu",
                          "paged_prefill.cu", "cache_ops.cu")

MUTANTS: tuple[Mutant, ...] = (
    Mutant("one token past the context", _S, "t < row_hi[r] ?", "t <= row_hi[r] ?", ("v1",)),
    Mutant("reads to the end of the last block", _S, "const bool live = t >= lo && t < hi;",
           "const bool live = t >= lo && t < (hi + BS - 1) / BS * BS;", ("v1",)),
    Mutant("table read past its end", _S, "const bool live = t >= lo && t < hi;",
           "const bool live = t >= lo && t < hi + 1;", ("v1 exact",)),
    Mutant("32-bit cache offset", _S, "cache.table[t0 / BS] * cache.block_stride",
           "cache.table[t0 / BS] * (int)cache.block_stride", ("far v1", "far split")),
    Mutant("no care of minus infinity", "common.cuh", "return m == NEG_INF ? 0.f : m;", "return m;", ("v1",)),
    Mutant("a shuffle step short", _S, "for (int o = G / 2; o > 0; o >>= 1)", "for (int o = G / 4; o > 0; o >>= 1)",
           ("v1",)),
    Mutant("half a warp in the shuffle's mask", _S, "x += __shfl_xor_sync(FULL_WARP, x, o)",
           "x += __shfl_xor_sync(0x0000ffffu, x, o)", ("v1",)),
    Mutant("shuffle in a divergent branch", _S, "        float top = m[r];",
           "        float top = m[r];\n        if (row == 0) top = __shfl_sync(FULL_WARP, top, 0);", ("v1",)),
    Mutant("old sums not rescaled", _S, "for (int i = 0; i < S::E; i++) acc[r][i] *= f;", "", ("v1 long",)),
    Mutant("no barrier before the merge", _S, "    __syncthreads();\n", "", ("v1",)),
    Mutant("barriers at different places", _S, "    __syncthreads();\n",
           "    if (warp == 0) __syncthreads();\n    else\n    __syncthreads();\n", ("v1",)),
    Mutant("threads exit before the barrier", _S, "    __syncthreads();\n",
           "    if (threadIdx.x >= 100) return;\n    __syncthreads();\n", ("v1",)),
    Mutant("shared array overrun", _S, "s.o[warp][r][(col + j * G) * V + i]",
           "s.o[warp][r][(col + j * G) * V + i + (warp == NW - 1 ? 8 : 0)]", ("v1",)),
    Mutant("wrong kv head", _A, "kv_head = head / group;", "kv_head = head % (heads / group);", ("v1",)),
    Mutant("sink without rescaling", _A, "o *= add_sink(sinks, head, m, l) *",
           "add_sink(sinks, head, m, l);\n    o *=", ("v1 sinks",)),
    Mutant("softcap before the scale", "common.cuh", "tanhf(x * scale / softcap)", "tanhf(x / softcap) * scale",
           ("v1 softcap",)),
    Mutant("8-bit exponent off", "convert.cuh", "256.f, 256.f", "128.f, 256.f", ("v1 fp8",)),
    Mutant("merge counts empty splits", _A, "for (int p = 0; p < count; p++) {", "for (int p = 0; p < splits; p++) {",
           ("split",)),
    Mutant("split boundary overlaps", _A, "hi = min(ctx, s.base + (split + 1) * s.len);",
           "hi = min(ctx, s.base + (split + 1) * s.len + 1);", ("split",)),
    Mutant("window start ignored", "common.cuh", "? hi - window : 0", "? 0 : 0", ("split window",)),
    Mutant("last heads of the group skipped", _A, "chunks = (group + ROWS - 1) / ROWS", "chunks = 1 + 0 * group / ROWS",
           ("split 5",)),
    Mutant("no wait for cp.async", _D, "ptx::cp_async_wait<ST - 2>();", "", ("mma",)),
    Mutant("wait one group short", _D, "ptx::cp_async_wait<ST - 2>();", "ptx::cp_async_wait<ST - 1>();", ("mma long",)),
    Mutant("no warp barrier after the wait", _D, "__syncwarp();  // other", "// other", ("mma long",)),
    Mutant("absent tokens not zero-filled", _M, "const bool live = t >= lo && t < hi;",
           "const bool live = t >= lo && t < (hi + BS - 1) / BS * BS;", ("mma",)),
    Mutant("32-bit tile offset", _M, "table[t0 / BS] * block_stride", "table[t0 / BS] * (int)block_stride",
           ("far mma",)),
    Mutant("padding columns not cleared", _M, "if constexpr (DP != D)", "if constexpr (DP > 2 * D)", ("mma 120",)),
    Mutant("V not transposed", _M, "ldmatrix_x4<true>", "ldmatrix_x4<false>", ("mma",)),
    Mutant("weights packed in the wrong order", _M, "pack_pair<T>(s[2 * k][2], s[2 * k][3])",
           "pack_pair<T>(s[2 * k][3], s[2 * k][2])", ("mma 12",)),
    Mutant("row sum over half its lanes", _M, "l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);", "", ("mma",)),
    Mutant("no barrier before shared memory is reused", _D, "__syncthreads();  // no warp", "// no warp", ("mma",)),
    Mutant("no barrier after widening", _D, "      __syncwarp();\n      a.step(wide", "      a.step(wide",
           ("mma fp8",)),
    Mutant("queries beyond the last head", _D, "rows[r] = i < live ?", "rows[r] = i < 16 ?", ("mma last",)),
    Mutant("keys' scale for values", _D, "v_scale[kv_head];", "k_scale[kv_head];", ("mma fp8",)),
    Mutant("prompt sees one token ahead", _P, "position + row / group + 1 : 0", "position + row / group + 2 : 0",
           ("prefill", "prefill fp32")),
    Mutant("cached prefix forgotten", _P, "r.position = positions[seq];", "r.position = 0;", ("prefill",)),
    Mutant("mask skipped on the diagonal", _P, "t0 + 32 > all_see_to ||", "t0 > all_see_to ||", ("prefill",)),
    Mutant("stages never alternate", _P, "stages + (t0 / 32 & 1) * 2 * Tile::STAGE;\n      Tile",
           "stages;\n      Tile", ("prefill",)),
    Mutant("no barrier between tiles", _P, "__syncthreads();  // tile t0", "// tile t0", ("prefill",)),
    Mutant("widened tile used at once", _P, "      __syncthreads();\n      tk = wide;", "      tk = wide;",
           ("prefill fp8",)),
    Mutant("padding row written", _C, "if (slot < 0) return;", "", ("write",)),
    Mutant("32-bit slot offset", _C, "slot / BS * block_stride", "(int)(slot / BS) * (int)block_stride",
           ("far write",)),
    Mutant("head stride taken for the head size", _C, "head * k_head_stride + d", "head * D + d", ("write",)),
    Mutant("8-bit write multiplies by the scale", _C, "1.f / k_scale[head]", "k_scale[head]", ("write fp8",)),
    Mutant("copy runs past its block", _C, "min(block_bytes, from + piece_bytes)", "from + piece_bytes", ("copy",)),
    Mutant("overlapping copies in one launch", _C, "pairs[2 * (i64)blockIdx.x]", "pairs[2 * (i64)blockIdx.x + 0]",
           ("copy overlap",), host=True),
)
CASES["split 5"] = decode_case("split", 2, group=5, contexts=(33,))


def attempt(names: Sequence[str], build: str, schedule: int, kernels: dict[str, str], headers: dict[str, str]) -> str:
    """What a build says of changed sources: empty when nothing was noticed."""

    def launch(kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], only: Sequence[int] = ()) -> None:
        module = EmuModule(kernel.source, [kernel.name], build, schedule, kernels.get(kernel.source), headers)
        module.launch(kernel.name, grid, kernel.threads, args, kernel.shared_bytes, only)

    for name in names:
        if build != "fast" and name.startswith("far"):
            continue   # the sanitizer builds copy arguments, pools of gigabytes included
        try:
            error = CASES[name].run(launch)
        except EmulatorError as fault:
            lines = [line for line in str(fault).splitlines() if "ERROR" in line or "WARNING" in line
                     or "runtime error" in line or "EMU" in line] or str(fault).splitlines()
            return lines[0].strip()[:150]
        if not error <= CASES[name].limit:
            return f"error {error:.1e} in {name}"
    return ""


def _try(number: int, build: str, schedule: int, planted: bool) -> str:
    """One try in a process of its own, with the bug or (to know that the case itself is clean) without."""
    done = subprocess.run([sys.executable, "-m", "tests.emulator.mutants", str(number), build, str(schedule),
                           str(int(planted))], capture_output=True, text=True)
    if done.returncode < 0:
        return f"crashed with signal {-done.returncode}"
    if done.returncode != 0:
        raise RuntimeError(f"{MUTANTS[number].name} on {build}: {done.stderr[-1500:]}")
    return done.stdout.strip()


def hunt(number: int) -> tuple[str, str]:
    """(build that caught the mutant or empty, what it said)."""
    for build, schedule in BUILDS:
        said = _try(number, build, schedule, planted=True)
        if not said:
            continue
        plain = "" if MUTANTS[number].host else _try(number, build, schedule, planted=False)
        if plain:
            raise RuntimeError(f"{MUTANTS[number].cases} fails on {build} without any bug: {plain}")
        return f"{build} {schedule}", said
    return "", ""


def main() -> int:
    """Tries every mutant, two at a time; 0 when all were caught."""
    if len(sys.argv) == 5:
        mutant, planted = MUTANTS[int(sys.argv[1])], sys.argv[4] == "1"
        kernels, headers = mutant.texts() if planted else ({}, {})
        print(attempt(mutant.cases, sys.argv[2], int(sys.argv[3]), kernels, headers))
        return 0
    missed = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, (build, said) in zip(MUTANTS, pool.map(hunt, range(len(MUTANTS))), strict=True):
            missed += not build
            print(f"{'caught' if build else 'MISSED':6s} {mutant.name:45s} {build:7s} {said}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} planted bugs caught")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
